"""Models: found, fetched, converted, made up and loaded; who they are; how prompts become
tokens."""

# The backend puts a fast BLAS in place, which must happen before MLX is imported.
from .. import backend as _backend  # noqa: F401
from .identity import ModelIdentity, namespace_digest
from .loaded import LoadedModel, Rendered
from .loading import load
from .progress import Progress

__all__ = ["LoadedModel", "ModelIdentity", "Progress", "Rendered", "load", "namespace_digest"]
