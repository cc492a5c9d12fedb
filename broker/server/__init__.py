"""The broker over the network: OpenAI's and Anthropic's HTTP APIs, and Responses over WebSocket."""
