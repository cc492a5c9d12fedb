"""What was read, as a row that the cache takes in without another copy."""

from ...errors import CacheError
from ..extents import Extent, pack
from ..kinds import Checkpoint
from ..layout import Layout
from ..runs import Runs, intersect_runs


class RestoredRow:
    """A sequence of `length` tokens, of which the extent holds those that RAM lacked; evaluated."""

    def __init__(
        self, layout: Layout, length: int, extent: Extent | None, checkpoint: Checkpoint | None
    ) -> None:
        self.layout = layout
        self.length = length
        self._extent = extent
        self._checkpoint = checkpoint

    def held(self) -> tuple[Runs, ...]:
        """The positions that were read for each group of the layout."""
        if self._extent is None:
            return tuple(() for _ in self.layout.groups)
        return self._extent.runs

    def cut(self, start: int, stop: int) -> Extent:
        """Tokens [start, stop): what was read itself, if that is all of it, else a copy."""
        extent = self._extent
        if extent is None or start < extent.start or stop > extent.stop:
            read = f"[{extent.start}, {extent.stop})" if extent is not None else "none"
            raise CacheError(f"tokens [{start}, {stop}) wanted, {read} were read")
        if (start, stop) == (extent.start, extent.stop):
            return extent
        runs = tuple(intersect_runs(held, ((start, stop),)) for held in extent.runs)
        return pack(self.layout, start, stop, runs, lambda leaf: extent.segments(leaf, start, stop))

    def checkpoint(self) -> Checkpoint | None:
        """The state at `length`; None for a layout without state."""
        return self._checkpoint
