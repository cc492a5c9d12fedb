"""Turns: what an API call asks for, whichever API it came through, and what comes of it."""
