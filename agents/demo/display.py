"""Agents side by side while they write: a live table on a terminal, plain lines anywhere else."""

import unicodedata
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..events import AgentDelta, AgentFailed, AgentFinished, AgentStarted, AgentStopped, SwarmEvent

REFRESHES_A_SECOND = 12
FRAME_LINES = 2
STATE_WIDTH = len("cancelled")
LINES_AN_AGENT = 3
PLAIN_WIDTH = 72


class Display(AbstractContextManager["Display"], Protocol):
    """Shows the events of a swarm as they come."""

    def show(self, event: SwarmEvent) -> None: ...


def display_for(console: Console, names: Sequence[str]) -> Display:
    """The display that suits where `console` writes to."""
    return LiveDisplay(console, names) if console.is_terminal else LineDisplay(console, names)


class LiveDisplay:
    """One row an agent, with the end of what it has written so far."""

    def __init__(self, console: Console, names: Sequence[str]) -> None:
        self._console = console
        self._states = dict.fromkeys(names, "waiting")
        self._texts = dict.fromkeys(names, "")
        self._live = Live(
            console=console, get_renderable=self.table, refresh_per_second=REFRESHES_A_SECOND
        )

    def show(self, event: SwarmEvent) -> None:
        """Take an event in; the next refresh shows it."""
        match event:
            case AgentStarted(agent=name):
                self._states[name] = "reading"
            case AgentDelta(agent=name, text=text):
                self._states[name] = "writing"
                self._texts[name] += printable(text)
            case AgentFinished(agent=name):
                self._states[name] = "done"
            case AgentFailed(agent=name):
                self._states[name] = "failed"
            case AgentStopped(agent=name):
                self._states[name] = "cancelled"

    def table(self) -> Table:
        """What is on the screen now."""
        table = Table(box=None, padding=(0, 1), expand=True, show_header=False)
        name_width = max(map(len, self._texts))
        table.add_column(style="bold", width=name_width)
        table.add_column(style="dim", width=STATE_WIDTH)
        table.add_column(ratio=1)
        width = max(self._console.width - name_width - STATE_WIDTH - 6, 10)
        room = (self._console.height - FRAME_LINES) // len(self._texts)
        lines = min(max(room, 1), LINES_AN_AGENT)
        for name, text in list(self._texts.items()):
            wrapped = Text(text.strip()).wrap(self._console, width)[-lines:]
            table.add_row(name, self._states[name], Text("\n").join(wrapped))
        return table

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()


class LineDisplay:
    """Whole lines, each with the agent's name before it."""

    def __init__(self, console: Console, names: Sequence[str]) -> None:
        self._console = console
        self._pending = dict.fromkeys(names, "")
        self._width = max(map(len, names))

    def show(self, event: SwarmEvent) -> None:
        """Print the lines that are complete now."""
        match event:
            case AgentDelta(agent=name, text=text):
                self._pending[name] += printable(text)
                self._print_full_lines(name)
            case AgentFinished(agent=name):
                self._print(name, self._pending[name])
            case _:
                pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        return

    def _print_full_lines(self, name: str) -> None:
        while (cut := _line_end(self._pending[name])) > 0:
            line, self._pending[name] = self._pending[name][:cut], self._pending[name][cut:]
            self._print(name, line)

    def _print(self, name: str, line: str) -> None:
        if line.strip():
            self._console.out(f"{name:>{self._width}} | {line.strip()}", highlight=False)


def printable(text: str) -> str:
    """Text without what would steer the terminal: a model can write escape sequences, too."""
    return "".join(
        "\N{REPLACEMENT CHARACTER}" if unicodedata.category(each) == "Cc" and each != "\n" else each
        for each in text.replace("\r", "").replace("\t", " ")
    )


def _line_end(text: str) -> int:
    """Where the first line of `text` ends; 0 if it goes on. Long lines are cut at a space."""
    newline = text.find("\n") + 1
    if newline and newline <= PLAIN_WIDTH:
        return newline
    if len(text) <= PLAIN_WIDTH:
        return 0
    space = text.rfind(" ", 0, PLAIN_WIDTH)
    return space if space > 0 else PLAIN_WIDTH
