"""The names of files, and of the places around them. No MLX."""

import re
from pathlib import Path

from ..prefix_hash import Tokens, entry_name, namespace_digest

VERSION = "v1"
SUFFIX = ".safetensors"
UNFINISHED = ".unfinished"
SIDECAR = "index"
LOCK = "lock"
QUARANTINE = "quarantine"

_KEY = re.compile(r"[0-9a-f]{32}-\d+(-[0-9a-f]{32})?\.\d+")


def namespace_key(namespace: str) -> str:
    """What stands for a namespace in files: its digest, hex."""
    return namespace_digest(namespace).hex()


def file_key(namespace: str, tokens: Tokens, start: int) -> str:
    """The name of the file that holds tokens [start, len(tokens)) of a sequence."""
    return f"{entry_name(tokens, namespace_digest(namespace))}.{start}"


def key_of(name: str) -> str | None:
    """The key in a file's name; None if it is no name of ours."""
    key = name.removesuffix(SUFFIX)
    return key if key != name and _KEY.fullmatch(key) else None


def path_of(folder: Path, key: str) -> Path:
    """Where the file of that name is."""
    return folder / f"{key}{SUFFIX}"
