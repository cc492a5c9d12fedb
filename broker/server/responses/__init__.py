"""OpenAI's Responses API: what is asked, the conversation it continues, the events of its run."""
