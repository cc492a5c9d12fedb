"""A grammar in llguidance's dialect of Lark, put together rule by rule."""

import json
from collections.abc import Mapping
from typing import Any

from ..grammar import GUIDANCE, SPACE
from .marker import Marker, quoted

TEXT = "TEXT"
TERMINALS = (
    "TEXT: /(?s:.*)/",
    r"WS: /[ \t\r\n]{1,8}/",
    "NUMBER: /[0-9]{1,3}/",
    r"KEY: /[A-Za-z_][A-Za-z0-9_.\-]{0,63}/",
)


class Lark:
    """Rules by name; marks of a model in them are tokens where its tokenizer says so."""

    def __init__(self, marker: Marker) -> None:
        self._marker = marker
        self._rules: dict[str, str] = {}

    def rule(self, name: str, body: str) -> str:
        """Add a rule; returns its name."""
        self._rules[name] = body
        return name

    def new_rule(self, body: str, suffix: str = "") -> str:
        """Add a rule under a name of its own."""
        name = f"part{len(self._rules)}"
        self._rules[name + suffix] = body
        return name

    def mark(self, mark: str) -> str:
        """A mark, or text with marks in it."""
        return " ".join(self._marker.pieces(mark))

    def is_token(self, mark: str) -> bool:
        """Whether a mark begins with a token of its own."""
        return self.mark(mark).startswith("<")

    def until(self, mark: str) -> str:
        """Any text that ends with a mark, the first one in it."""
        first, *rest = self._marker.pieces(mark)
        if rest and not first.startswith("<") and not json.loads(first).strip():
            first, *rest = rest  # the text takes the white space before a token
        if first.startswith("<"):
            return " ".join([TEXT, first, *rest])
        return " ".join([self._lazy(first), *rest])

    def until_spelt(self, mark: str) -> str:
        """The same for a mark that is spelt, in tokens of text."""
        return self._lazy(quoted(mark))

    def text(self) -> str:
        """The whole grammar."""
        rules = [f"{name}: {body}" for name, body in self._rules.items()]
        return "\n".join([*rules, *TERMINALS]) + "\n"

    def _lazy(self, literal: str) -> str:
        return self.new_rule(f"{TEXT} {literal}", "[lazy]")


def json_rule(schema: Mapping[str, Any], *, lenient: bool = True) -> str:
    """JSON of a schema. If `lenient`, keywords that llguidance does not know are passed over."""
    options = {**SPACE, "lenient": True, "coerce_one_of": True} if lenient else SPACE
    return f"%json {json.dumps({GUIDANCE: options, **schema})}"
