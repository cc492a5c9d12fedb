"""Models: found, fetched, converted, made up and loaded; who they are; how prompts become
tokens."""

# The backend puts a fast BLAS in place, which must happen before MLX is imported.
from ..backend import require_mlx

require_mlx()

from .identity import ModelIdentity, namespace_digest  # noqa: E402
from .loaded import LoadedModel, Rendered  # noqa: E402
from .loading import load  # noqa: E402
from .progress import Progress  # noqa: E402

__all__ = ["LoadedModel", "ModelIdentity", "Progress", "Rendered", "load", "namespace_digest"]
