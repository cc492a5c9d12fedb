"""The engine: the one thread that owns MLX, what it does next, and the lanes that compute it."""
