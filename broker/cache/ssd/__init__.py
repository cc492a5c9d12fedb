"""The cold store on an SSD: a file an extent, named by what it holds."""

from .store import SsdStore

__all__ = ["SsdStore"]
