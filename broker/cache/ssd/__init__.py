"""The cold store on an SSD: a file an extent, named by what it holds.

Importing this package does not import MLX: who only looks into a folder does without.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .store import SsdStore as SsdStore

__all__ = ["SsdStore"]


def __getattr__(name: str) -> object:
    """Import the store itself on first use."""
    if name != "SsdStore":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(".store", __name__).SsdStore
