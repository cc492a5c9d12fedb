"""The JSON schemas of tools, as a grammar of calls needs them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..messages import Tool
from .lark import json_rule

JSON_TYPES = ("integer", "number", "boolean", "array", "object")
SHARED = ("$defs", "definitions")


class Property(NamedTuple):
    """One argument. `rule` is its value as JSON; `is_json` says that a value of its type is written
    so where strings are not quoted, `options` are the strings that it may be."""

    name: str
    rule: str
    is_required: bool
    is_json: bool
    options: tuple[str, ...]


def arguments_rule(tool: Tool) -> str:
    """The arguments of a tool as a JSON object."""
    return json_rule({"type": "object", **(tool.parameters or {})})


def properties(tool: Tool) -> list[Property]:
    """The arguments that a tool's schema names, in its order."""
    schema = tool.parameters or {}
    found = schema.get("properties")
    if not isinstance(found, Mapping):
        return []
    shared = {key: schema[key] for key in SHARED if key in schema}
    required = schema.get("required") or ()
    return [_property(name, each, name in required, shared) for name, each in found.items()]


def has_any_arguments(tool: Tool) -> bool:
    """Whether a tool takes arguments that its schema does not name."""
    schema = tool.parameters or {}
    return schema.get("additionalProperties", True) is not False


def _property(name: str, schema: Any, is_required: bool, shared: Mapping[str, Any]) -> Property:
    schema = schema if isinstance(schema, Mapping) else {}
    kind, enum = schema.get("type"), schema.get("enum")
    is_enum = isinstance(enum, list) and bool(enum) and all(isinstance(each, str) for each in enum)
    return Property(
        name=name,
        rule=json_rule({**shared, **schema}),
        is_required=is_required,
        is_json=isinstance(kind, str) and kind in JSON_TYPES,
        options=tuple(enum) if is_enum and enum else (),
    )
