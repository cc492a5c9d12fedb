"""The JSON schemas of tools, as a grammar of calls needs them.

A schema that llguidance cannot follow, say for a pattern that looks ahead, holds nobody up: what it
describes may be anything of its kind then, and it is the tool that refuses it.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from llguidance import LLMatcher, grammar_from

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
    return _rule({"type": "object", **(tool.parameters or {})}, {"type": "object"})


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
        rule=_rule({**shared, **schema}, {}),
        is_required=is_required,
        is_json=isinstance(kind, str) and kind in JSON_TYPES,
        options=tuple(enum) if is_enum and enum else (),
    )


def _rule(schema: Mapping[str, Any], otherwise: Mapping[str, Any]) -> str:
    """JSON of a schema, or of another one where that cannot be followed."""
    rule = json_rule(schema)
    return rule if _can_be_followed(rule.removeprefix("%json ")) else json_rule(otherwise)


@lru_cache(maxsize=1024)
def _can_be_followed(schema: str) -> bool:
    return not LLMatcher.validate_grammar(grammar_from("json_schema", schema))
