"""The prompt cache: a prefix tree over packed KV. Begin with `prompt_cache` and `plan`."""
