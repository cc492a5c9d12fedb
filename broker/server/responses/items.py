"""Input items: checked, given ids, and references among them resolved."""

import secrets
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from msgspec import Struct

from ..bodies import convert
from ..errors import ApiError, invalid
from .objects import Item

Kind = TypeVar("Kind")
FindItem = Callable[[str], Item | None]

TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")


class MessageItem(Struct, frozen=True):
    """A message, of the client or of the model."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[dict[str, Any]]


class CallItem(Struct, frozen=True):
    """A call that the model made."""

    call_id: str
    name: str
    arguments: str


class ResultItem(Struct, frozen=True):
    """What came of a call."""

    output: str | list[dict[str, Any]]
    call_id: str | None = None
    name: str | None = None


class ReasoningItem(Struct, frozen=True):
    """What the model thought; the summary counts only where the content is missing."""

    content: list[dict[str, Any]] | None = None
    summary: list[dict[str, Any]] | None = None


ParsedItem = MessageItem | CallItem | ResultItem | ReasoningItem

KINDS: dict[str, tuple[type[ParsedItem], str]] = {
    "message": (MessageItem, "msg"),
    "function_call": (CallItem, "fc"),
    "function_call_output": (ResultItem, "fco"),
    "reasoning": (ReasoningItem, "rs"),
}
"""The kinds of items, and how their ids begin."""


def new_id(prefix: str) -> str:
    """An id that nothing else has."""
    return f"{prefix}_{secrets.token_hex(20)}"


def input_items(given: str | list[Item] | None, find: FindItem) -> tuple[Item, ...]:
    """The items of a request's input, each with a type and an id; `find` looks up a reference.

    Raises `ApiError` naming the place of what is wrong.
    """
    if given is None:
        return ()
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return tuple(_item(f"input[{at}]", item, find) for at, item in enumerate(given))


def parse(item: Item, where: str = "") -> ParsedItem:
    """An item as its kind."""
    kind, _ = KINDS[item["type"]]
    return _convert(kind, item, where)


def text_of(content: str | list[dict[str, Any]] | None, where: str = "") -> str:
    """The text of an item's content, its parts one after the other."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(_part(part, f"{where}[{at}]") for at, part in enumerate(content))


def _item(where: str, item: Item, find: FindItem) -> Item:
    kind = item.get("type") or ("message" if "role" in item else "item_reference")
    if kind == "item_reference":
        return _referred(where, item, find)
    if not isinstance(kind, str) or kind not in KINDS:
        known = ", ".join((*KINDS, "item_reference"))
        raise invalid(f"{where}.type is {kind!r}; it must be one of {known}", f"{where}.type")
    id = item.get("id")
    known_id = id if isinstance(id, str) and id else new_id(KINDS[kind][1])
    whole = {**item, "type": kind, "id": known_id}
    _check(whole, where)
    if kind == "message" and isinstance(whole["content"], str):
        whole["content"] = [_text_part(whole["role"], whole["content"])]
    return whole


def _text_part(role: str, text: str) -> dict[str, Any]:
    if role == "assistant":
        return {"type": "output_text", "text": text, "annotations": []}
    return {"type": "input_text", "text": text}


def _referred(where: str, item: Item, find: FindItem) -> Item:
    id = item.get("id")
    if not isinstance(id, str):
        raise invalid(f"{where} has neither a type nor a role, nor the id of an item", where)
    found = find(id)
    if found is None:
        raise invalid(f"{where} refers to the item {id!r}, which is not here", f"{where}.id")
    return found


def _check(item: Item, where: str) -> None:
    match parse(item, where):
        case MessageItem(content=content):
            text_of(content, f"{where}.content")
        case ResultItem(output=output):
            text_of(output, f"{where}.output")
        case ReasoningItem(content=content, summary=summary):
            text_of(content, f"{where}.content")
            text_of(summary, f"{where}.summary")


def _convert(kind: type[Kind], item: Item, where: str) -> Kind:
    try:
        return convert(kind, item)
    except ApiError as error:
        place = f"{where}.{error.param}" if error.param else where
        raise invalid(f"{where}: {error.message}", place) from error


def _part(part: dict[str, Any], where: str) -> str:
    kind = part.get("type")
    if kind not in TEXT_PARTS:
        raise invalid(f"{where} is of the type {kind!r}; only text is taken here", where)
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise invalid(f"{where} has no text", where)
    return text
