"""How far a model is fetched and loaded: a bar on a terminal, a line a stage elsewhere."""

from typing import Self

from rich.console import Console
from rich.progress import BarColumn, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from mlx_swarm.broker.models.progress import Progress


class LoadingDisplay:
    """A context manager; `report` may be called from any thread."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._stages: dict[str, TaskID] = {}
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )

    def report(self, progress: Progress) -> None:
        """Show a step of loading."""
        known = progress.stage in self._stages
        if not known:
            self._stages[progress.stage] = self._bars.add_task(progress.stage, total=None)
            if not self._console.is_terminal:
                self._console.out(f"model: {progress.stage}", highlight=False)
        self._bars.update(
            self._stages[progress.stage], completed=progress.done, total=progress.total or None
        )

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bars.stop()
