"""Where settings come from: a TOML file, then the environment, then the command line.

What comes later wins; API keys add up. In the environment the names are those of `ServerSettings`
in capitals after `MLX_SWARM_`, in the file as they are, on the command line what `option` says. In
text a list is separated by commas, a table is a list of `NAME=VALUE`. Names nobody knows are
refused, in the environment only if they are close to one that is known: others may be another
program's. Keys are never on the command line, which everybody on the machine can read.
"""

import tomllib
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import msgspec

from ..errors import InvalidSetting
from ..sizes import parse_size
from .entrance.keys import checked, distinct, keys_of_file, parse_key
from .settings import SIZES, ApiKey, ServerSettings

PREFIX = "MLX_SWARM_"
CONFIG = "MLX_SWARM_CONFIG"
OWN = {CONFIG, "MLX_SWARM_CACHE", "MLX_SWARM_BLAS"}
LONGEST_QUOTE = 60
CLOSE = 0.7
CLOSE_IN_ENVIRONMENT = 0.8

TYPES: dict[str, Any] = get_type_hints(ServerSettings, include_extras=True)
LISTS = frozenset(("allowed_hosts", "allowed_origins"))
TABLES = frozenset(("models", "adapters", "aliases"))

REPEATED = {
    "allowed_hosts": "--allowed-host",
    "allowed_origins": "--allowed-origin",
    "models": "--add-model",
    "adapters": "--adapter",
    "aliases": "--alias",
}
"""Options of which each gives one of several."""


class Source(NamedTuple):
    """Settings of one place. `name` says how that place calls a field, for errors; values of a
    source that `is_text` are converted."""

    values: Mapping[str, Any]
    name: Callable[[str], str]
    is_text: bool


def load_settings(
    command_line: Mapping[str, Any], environment: Mapping[str, str], file: str | None = None
) -> ServerSettings:
    """The settings of all places. Raises `InvalidSetting` naming the place of what is wrong."""
    path = file or environment.get(CONFIG) or None
    sources = [
        *([_file(path)] if path else []),
        _environment(environment),
        Source(command_line, option, True),
    ]
    values: dict[str, Any] = {}
    keys: list[ApiKey] = []
    for source in sources:
        for field, value in source.values.items():
            found = _value(source, field, value)
            if field == "api_keys":
                keys.extend(found)
            else:
                values[field] = found
    if values.get("api_key_file"):
        keys.extend(keys_of_file(values["api_key_file"]))
    return ServerSettings(**values, api_keys=distinct(keys))


def option(field: str) -> str:
    """What a setting is called on the command line."""
    return REPEATED.get(field, f"--{field.replace('_', '-')}")


def _file(path: str) -> Source:
    try:
        with Path(path).expanduser().open("rb") as file:
            values = tomllib.load(file)
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidSetting(f"the settings in {path} cannot be read: {reason}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidSetting(f"{path} is no TOML: {_place(error)}") from None
    for field in values:
        if field not in TYPES:
            raise InvalidSetting(f"{path} sets {field!r}, which is no setting{_hint(field)}")
    return Source(values, lambda field: f"{field} in {path}", False)


def _environment(environment: Mapping[str, str]) -> Source:
    values: dict[str, Any] = {}
    for name, text in environment.items():
        field = name.removeprefix(PREFIX).lower()
        if not name.startswith(PREFIX) or name in OWN or not text.strip():
            continue
        if field == "api_key":
            key = checked(ApiKey(text.strip()), name)
            values["api_keys"] = [*values.get("api_keys", []), key]
        elif field == "api_keys":
            keys = [parse_key(each, f"one of {name}") for each in _listed(text)]
            values["api_keys"] = [*values.get("api_keys", []), *keys]
        elif field in TYPES:
            values[field] = text
        elif hint := _hint(field, CLOSE_IN_ENVIRONMENT, lambda known: PREFIX + known.upper()):
            raise InvalidSetting(f"{name} is no setting{hint}")
    return Source(values, lambda field: PREFIX + field.upper(), True)


def _value(source: Source, field: str, value: Any) -> Any:
    """One setting in its type."""
    name = source.name(field)
    if field == "api_keys":
        return value if source.is_text else _keys(name, value)
    try:
        if source.is_text and field in LISTS:
            value = _listed(value)
        elif source.is_text and field in TABLES:
            value = _table(name, value)
        elif field in SIZES:
            value = parse_size(value)
        return msgspec.convert(value, TYPES[field], strict=not source.is_text)
    except msgspec.ValidationError as error:
        expected = str(error).partition(" - at ")[0].replace("`", "")
        raise InvalidSetting(f"{name} is {_quoted(value)}: {expected}") from None
    except InvalidSetting as error:
        raise InvalidSetting(f"{name}: {error}") from None


def _keys(name: str, value: Any) -> list[ApiKey]:
    try:
        keys = msgspec.convert(value, list[ApiKey])
    except msgspec.ValidationError:
        raise InvalidSetting(f"{name} must be tables with a secret and, maybe, a tenant") from None
    return [checked(key, f"number {at} of {name}") for at, key in enumerate(keys, 1)]


def _listed(value: str | list[str]) -> list[str]:
    texts = value.split(",") if isinstance(value, str) else value
    return [text.strip() for text in texts if text.strip()]


def _table(name: str, value: str | list[str]) -> dict[str, str]:
    table = {}
    for each in _listed(value):
        key, sign, text = each.partition("=")
        if not key.strip() or not sign or not text.strip():
            raise InvalidSetting(f"{_quoted(each)} must be NAME=VALUE")
        table[key.strip()] = text.strip()
    return table


def _hint(field: str, close_to: float = CLOSE, told: Callable[[str], str] = repr) -> str:
    """Which setting may have been meant."""
    close = get_close_matches(field.replace("-", "_").lower(), TYPES, 1, close_to)
    return f"; is {told(close[0])} meant?" if close else ""


def _place(error: Exception) -> str:
    """Where a file cannot be read on, without what stands there: it may be a key."""
    text = str(error)
    return text[text.rfind("(at ") :].strip("()") if "(at " in text else "its text is no UTF-8"


def _quoted(value: object) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST_QUOTE else f"{text[:LONGEST_QUOTE]}…"
