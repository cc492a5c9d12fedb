"""Reading `synthetic:<architecture>?name=value&...`. No MLX."""

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from ..errors import ModelNotFound, ModelUnreadable
from .synthetic_config import FAMILIES

PREFIX = "synthetic:"
RAW = "config."
SIZES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "context")
NUMBERS = (*SIZES, "window", "seed")
WORDS = ("dtype", "tokenizer")
MAX_NUMBER = 2**40
MAX_LAYERS = 4096


class SyntheticSpec(NamedTuple):
    """What was asked for: numbers and words by name, and raw entries of config.json."""

    architecture: str
    numbers: Mapping[str, int]
    words: Mapping[str, str]
    raw: Mapping[str, Any]


def parse_spec(spec: str) -> SyntheticSpec:
    """Raises `ModelNotFound` for a name that no architecture has, `ModelUnreadable` for a bad
    parameter."""
    architecture, _, query = spec.removeprefix(PREFIX).partition("?")
    if not re.fullmatch("[A-Za-z0-9_]+", architecture):
        raise ModelNotFound(
            f"{spec!r} names no architecture; write {PREFIX}llama, or one of {', '.join(FAMILIES)}"
        )
    numbers: dict[str, int] = {}
    words: dict[str, str] = {}
    raw: dict[str, Any] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name in {*numbers, *words} or name.removeprefix(RAW) in raw:
            raise ModelUnreadable(f"{spec!r}: {name} is given twice")
        if name in NUMBERS:
            numbers[name] = _number(spec, name, value)
        elif name in WORDS:
            words[name] = value
        elif name.startswith(RAW):
            raw[name.removeprefix(RAW)] = _json(value)
        else:
            known = ", ".join((*NUMBERS, *WORDS))
            raise ModelUnreadable(f"{spec!r}: no parameter {name!r}; there are {known}, config.*")
    return SyntheticSpec(architecture, numbers, words, raw)


def _number(spec: str, name: str, value: str) -> int:
    lowest = 0 if name in {"seed", "window"} else 1
    highest = MAX_LAYERS if name == "layers" else MAX_NUMBER
    if not re.fullmatch("[0-9]{1,15}", value) or not lowest <= int(value) <= highest:
        raise ModelUnreadable(
            f"{spec!r}: {name} is {value!r}; it must be a whole number from {lowest} to {highest}"
        )
    return int(value)


def _json(value: str) -> Any:
    """JSON where it is JSON, text otherwise: `config.rope_theta=5e5`, `config.mode=plain`."""
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value
