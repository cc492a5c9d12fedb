"""OpenAI's completions of plain text: `POST /v1/completions`."""
