"""How long-running steps of loading report where they are."""

from collections.abc import Callable

from msgspec import Struct


class Progress(Struct, frozen=True):
    """`done` of `total` units (bytes, tensors or layers) of one stage; `total` is 0 if it is not
    known."""

    stage: str
    done: int
    total: int


ReportProgress = Callable[[Progress], None]


def ignore_progress(progress: Progress) -> None:
    """Report to nobody."""
