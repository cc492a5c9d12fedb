"""Findings of `bench.swarm` in files: one JSON object a line, appended.

A part that is ended by a time limit leaves what it had found.
"""

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from bench.runner import Machine
from bench.swarm_findings import Bar, Found, Gap
from mlx_swarm.broker.errors import SwarmError


class ResultsUnreadable(SwarmError):
    """A file of records is broken or of another benchmark; the message names file and line."""


class Conditions(Struct, frozen=True, kw_only=True):
    """Of a finding. `attention` is what served the model's layers, and why."""

    date: str
    machine: Machine
    model: str
    dtype: str
    attention: str


class Record(Conditions, frozen=True, kw_only=True):
    """A finding and its conditions."""

    found: Found

    def bars(self) -> Iterable[Bar]:
        """What the finding has to reach; a CPU is not held to the gaps of a GPU."""
        if isinstance(self.found, Gap) and not self.machine.backend.startswith("cuda"):
            return ()
        return self.found.bars()


Kept = TypeVar("Kept", bound=Conditions)


def today() -> str:
    """The date for a record."""
    return time.strftime("%Y-%m-%d")


def append(path: str | os.PathLike[str], record: Conditions) -> None:
    """Add a record to a file."""
    with open(path, "ab") as file:
        file.write(msgspec.json.encode(record) + b"\n")


def read(paths: Iterable[str | os.PathLike[str]]) -> list[Record]:
    """All records of some files. Raises `ResultsUnreadable`, or `OSError`."""
    return read_as(Record, paths)


def read_as(kind: type[Kept], paths: Iterable[str | os.PathLike[str]]) -> list[Kept]:
    """All records of some files that hold another kind. Raises as `read` does."""
    records = []
    for path in paths:
        for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
            try:
                records.append(msgspec.json.decode(line, type=kind))
            except msgspec.DecodeError as error:
                raise ResultsUnreadable(f"{path}, line {number}: {error}") from error
    return records
