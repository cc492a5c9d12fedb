"""Models: found, fetched, converted, made up and loaded; who they are; how prompts become
tokens.

Importing this package does not import MLX; using one of its names does.
"""

from importlib import import_module
from typing import TYPE_CHECKING

# The backend puts a fast BLAS in place, which must happen before MLX is imported.
from ..backend import require_mlx

if TYPE_CHECKING:
    from .adapters import adapter_bytes as adapter_bytes
    from .adapters import load_adapter as load_adapter
    from .chat_format import ChatFormat as ChatFormat
    from .chat_format import Rendered as Rendered
    from .identity import ModelIdentity as ModelIdentity
    from .identity import namespace_digest as namespace_digest
    from .loaded import LoadedModel as LoadedModel
    from .loading import load as load
    from .loading import prepare as prepare
    from .progress import Progress as Progress
    from .reply_reader import CallPiece as CallPiece
    from .reply_reader import Piece as Piece
    from .reply_reader import ReasoningPiece as ReasoningPiece
    from .reply_reader import ReplyReader as ReplyReader
    from .reply_reader import TextPiece as TextPiece

_HOMES = {
    "CallPiece": "reply_reader",
    "ChatFormat": "chat_format",
    "LoadedModel": "loaded",
    "ModelIdentity": "identity",
    "Piece": "reply_reader",
    "Progress": "progress",
    "ReasoningPiece": "reply_reader",
    "Rendered": "chat_format",
    "ReplyReader": "reply_reader",
    "TextPiece": "reply_reader",
    "adapter_bytes": "adapters",
    "load": "loading",
    "load_adapter": "adapters",
    "prepare": "loading",
    "namespace_digest": "identity",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    """Import a public name from its home on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require_mlx()
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
