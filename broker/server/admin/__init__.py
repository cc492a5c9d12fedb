"""Endpoints for who runs the server: cache, trace, metrics, models, tokens, health."""
