"""What an output must look like: the grammar of a request, no MLX."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from msgspec import Struct

from .checks import check_kind, check_sized, check_text
from .errors import InvalidRequest

MAX_SOURCE = 1 << 20
FORMS = ("json_schema", "regex", "choice", "lark")
GUIDANCE = "x-guidance"
SPACE = {"whitespace_pattern": r"(\r?\n)?[ \t]{0,40}"}
"""White space between the parts of JSON: a line break and its indentation. A small model that may
write any finds no end."""


class Source(NamedTuple):
    """A grammar as text. `choice` is a JSON list of strings."""

    form: Literal["json_schema", "regex", "choice", "lark"]
    text: str


class Grammar(Struct, frozen=True, kw_only=True):
    """What the whole output must look like, in exactly one of four forms.

    `json_schema` is a schema as a mapping or as JSON text; `regex` has no look-around; `choice`
    lists strings, one of which comes out; `lark` is a grammar in llguidance's dialect of Lark, in
    which `<|name|>` is a special token and `%json {...}` a schema: the form for tool calls. An
    output ends as soon as nothing more can follow.

    JSON has at most a line break and 40 spaces or tabs between its parts. A schema that has
    llguidance's options in `x-guidance` has the say: `{"whitespace_flexible": False}` leaves none.
    """

    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    lark: str | None = None

    def validate(self) -> None:
        """Raise `InvalidRequest` for anything that can be seen to be wrong without a tokenizer."""
        given = [form for form in FORMS if getattr(self, form) is not None]
        if len(given) != 1:
            found = " and ".join(given) if given else "none of them"
            raise InvalidRequest(f"a grammar is one of {', '.join(FORMS)}; got {found}")
        text = self.source().text
        if len(text) > MAX_SOURCE:
            raise InvalidRequest(
                f"the grammar has {len(text):,} characters; up to {MAX_SOURCE:,} are taken"
            )

    def source(self) -> Source:
        """The one that is given, as text; raises `InvalidRequest` for what cannot be written so."""
        if self.json_schema is not None:
            return Source("json_schema", _schema(self.json_schema))
        if self.choice is not None:
            return Source("choice", _choice(self.choice))
        if self.regex is not None:
            check_text("regex", self.regex)
            return Source("regex", self.regex)
        check_text("lark", self.lark)
        assert self.lark is not None
        return Source("lark", self.lark)


def _schema(schema: Any) -> str:
    if isinstance(schema, str):
        check_text("json_schema", schema)
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"json_schema is not JSON: {error}") from error
    else:
        check_kind("json_schema", schema, Mapping, "a mapping or JSON text")
    if isinstance(schema, Mapping):
        schema = {GUIDANCE: SPACE, **schema}
    try:
        return json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"json_schema is not JSON: {error}") from error


def _choice(choice: Any) -> str:
    if isinstance(choice, str):
        raise InvalidRequest(f"choice is the text {choice!r}; it must be a list of strings")
    check_sized("choice", choice)
    for each in choice:
        check_text("a choice", each)
    if not len(choice) or "" in choice:
        raise InvalidRequest(
            f"choice has {len(choice)} strings; give at least one, none of them empty"
        )
    return json.dumps(list(choice))
