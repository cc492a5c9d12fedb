"""A model's chat template, and what it makes of messages: found out by rendering marked ones."""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from typing import Any, NamedTuple

from jinja2 import TemplateError
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import PreTrainedTokenizerBase

from ..errors import InvalidRequest
from .reasons import reason_of

Turn = dict[str, Any]
REFUSALS = (TemplateError, ValueError, TypeError, KeyError, AttributeError, IndexError)
FIRST, SECOND, THIRD, FOURTH = "qfirst1", "qsecond2", "qthird3", "qfourth4"
TOOL_NAME = "qtool5"
ARGUMENTS = {"qkey6": "qvalue7"}
LONG_ID, SHORT_ID = "call_0123456789", "abcDEF123"


class CallForm(NamedTuple):
    """How an assistant's tool calls have to be handed to a template, so that it shows them."""

    content: str | None
    arguments_as_text: bool
    short_ids: bool


class Traits(NamedTuple):
    """What a template knows. `calls` is None where it leaves tool calls out."""

    tools: bool
    system: bool
    late_system: bool
    developer: bool
    tool_role: bool
    calls: CallForm | None
    calls_with_text: bool
    several_calls: bool
    repeated_users: bool
    user_after_result: bool


class ChatTemplate:
    """Renders turns in the form of the OpenAI API. One thread at a time.

    Its `traits` are found out once, on first use.
    """

    def __init__(self, name: str, tokenizer: TokenizerWrapper) -> None:
        self._name = name
        self._tokenizer = tokenizer
        self._traits: Traits | None = None

    @property
    def traits(self) -> Traits:
        if self._traits is None:
            self._traits = _Probe(self).traits()
        return self._traits

    @property
    def source(self) -> str:
        """The template's text, as far as it has any."""
        template = self._tokenizer.chat_template
        if isinstance(template, Mapping):
            return "\n".join(map(str, template.values()))
        return template if isinstance(template, str) else ""

    def text(
        self,
        turns: Sequence[Turn],
        tools: Sequence[dict[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
        thinking: bool | None = None,
    ) -> str:
        """The conversation as text; raises `InvalidRequest` where the template refuses it."""
        settings = {"add_generation_prompt": add_generation_prompt, **self._thinking(thinking)}
        return str(self._apply(turns, tools, tokenize=False, **settings))

    def tokens(
        self,
        text: str,
        turns: Sequence[Turn],
        tools: Sequence[dict[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
        thinking: bool | None = None,
    ) -> list[int]:
        """The tokens of `text`, which is what the same arguments rendered to."""
        if not self._cuts_itself:
            return list(self._tokenizer.encode(text, add_special_tokens=False))
        settings = {"add_generation_prompt": add_generation_prompt, **self._thinking(thinking)}
        return list(self._apply(turns, tools, tokenize=True, **settings))

    def attempt(
        self,
        turns: Sequence[Turn],
        tools: Sequence[dict[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
        thinking: bool | None = None,
    ) -> str | None:
        """The conversation as text, or None where the template refuses it."""
        try:
            return self.text(
                turns, tools, add_generation_prompt=add_generation_prompt, thinking=thinking
            )
        except InvalidRequest:
            return None

    @property
    def _cuts_itself(self) -> bool:
        """Whether the tokenizer has a renderer of its own, which may give tokens that no text
        does."""
        own = getattr(type(self._tokenizer._tokenizer), "apply_chat_template", None)
        return own is not PreTrainedTokenizerBase.apply_chat_template

    def _thinking(self, thinking: bool | None) -> dict[str, bool]:
        if thinking is None:
            return {}
        # Some templates have the switch under another name.
        is_other = "enable_thinking" not in self.source and re.search(r"\bthinking\b", self.source)
        return {"thinking" if is_other else "enable_thinking": thinking}

    def _apply(self, turns: Sequence[Turn], tools: Sequence[Any] | None, **settings: Any) -> Any:
        if not self._tokenizer.has_chat_template:
            raise InvalidRequest(
                f"{self._name} has no chat template: give text or tokens instead of messages"
            )
        if tools:
            settings["tools"] = list(tools)
        try:
            return self._tokenizer.apply_chat_template(list(turns), **settings)
        except REFUSALS as error:
            roles = ", ".join(turn["role"] for turn in turns)
            raise InvalidRequest(
                f"the chat template of {self._name} refuses the roles {roles}: {reason_of(error)}"
            ) from error


def call_turn(
    form: CallForm, content: str, calls: Sequence[tuple[str, str, str, Mapping[str, Any]]]
) -> Turn:
    """An assistant's turn with calls, each an id, a name, and its arguments as text and parsed."""
    listed = [
        {
            "id": identifier,
            "type": "function",
            "function": {
                "name": name,
                "arguments": text if form.arguments_as_text else dict(arguments),
            },
        }
        for identifier, name, text, arguments in calls
    ]
    return {"role": "assistant", "content": content or form.content, "tool_calls": listed}


def function(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A tool in the form of the OpenAI API."""
    body = {"name": name, "description": description, "parameters": dict(parameters)}
    return {"type": "function", "function": body}


class _Probe:
    """Renders conversations that are made of words which no template has."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._source = template.source

    def traits(self) -> Traits:
        calls = self._calls()
        return Traits(
            tools=self._tools(),
            system=self._shows(("system", FIRST), ("user", SECOND)),
            late_system=self._late_system(),
            developer=self._names("developer")
            and self._shows(("developer", FIRST), ("user", SECOND)),
            tool_role=self._names("tool") and self._tool_role(calls),
            calls=calls,
            calls_with_text=calls is not None and self._calls_with_text(calls),
            several_calls=calls is not None and self._several_calls(calls),
            user_after_result=self._tool_role(calls, _turn("user", THIRD)),
            repeated_users=self._shows(("user", FIRST), ("user", SECOND))
            and self._shows(
                ("user", FIRST), ("assistant", SECOND), ("user", THIRD), ("user", FOURTH)
            ),
        )

    def _shows(self, *turns: tuple[str, str]) -> bool:
        """Whether the contents all come out, in this order, and each once."""
        text = self._template.attempt([_turn(role, content) for role, content in turns])
        return text is not None and _in_order(text, [content for _, content in turns])

    def _names(self, role: str) -> bool:
        """Whether the template names a role; one without text may know any."""
        return not self._source or re.search(rf"['\"]{role}['\"]", self._source) is not None

    def _late_system(self) -> bool:
        conversations = (
            (("user", FIRST), ("system", SECOND), ("assistant", THIRD), ("user", FOURTH)),
            (("user", FIRST), ("assistant", SECOND), ("system", THIRD), ("user", FOURTH)),
            (("system", FIRST), ("system", SECOND), ("user", THIRD)),
            (("system", FIRST), ("user", SECOND), ("assistant", THIRD), ("system", FOURTH)),
        )
        return all(self._shows(*turns) for turns in conversations)

    def _tools(self) -> bool:
        tools = [function(TOOL_NAME, SECOND, {"type": "object", "properties": {}})]
        for turns in ([_turn("user", FIRST)], [_turn("system", THIRD), _turn("user", FIRST)]):
            text = self._template.attempt(turns, tools)
            if text is None or TOOL_NAME not in text:
                return False
        return True

    def _calls(self) -> CallForm | None:
        for short_ids, content, as_text in product((False, True), ("", None), (False, True)):
            form = CallForm(content, as_text, short_ids)
            text = self._template.attempt(self._called(form, ""))
            shown = [TOOL_NAME, *ARGUMENTS, *ARGUMENTS.values()]
            if text and all(each in text for each in shown) and not _is_foreign(text):
                return form
        return None

    def _calls_with_text(self, form: CallForm) -> bool:
        text = self._template.attempt(self._called(form, SECOND))
        return text is not None and SECOND in text and TOOL_NAME in text

    def _several_calls(self, form: CallForm) -> bool:
        text = self._template.attempt(self._called(form, "", 2))
        return text is not None and text.count(TOOL_NAME) >= 2

    def _tool_role(self, form: CallForm | None, *following: Turn) -> bool:
        turns = [_turn("user", FIRST), _turn("assistant", SECOND)]
        if form is not None:
            turns = self._called(form, "")
        result = {**_turn("tool", FOURTH), "tool_call_id": _identifier(form, 0), "name": TOOL_NAME}
        text = self._template.attempt([*turns, result, *following])
        return text is not None and FOURTH in text

    def _called(self, form: CallForm, content: str, count: int = 1) -> list[Turn]:
        text = '{"qkey6": "qvalue7"}'
        calls = [(_identifier(form, at), TOOL_NAME, text, ARGUMENTS) for at in range(count)]
        return [_turn("user", FIRST), call_turn(form, content, calls)]


def _identifier(form: CallForm | None, at: int) -> str:
    base = SHORT_ID if form is not None and form.short_ids else LONG_ID
    return f"{base[:-1]}{at}"


def _is_foreign(text: str) -> bool:
    """Whether arguments came out as Python writes them, or as JSON within JSON."""
    return "{'qkey6'" in text or '{\\"qkey6' in text


def _turn(role: str, content: str) -> Turn:
    return {"role": role, "content": content}


def _in_order(text: str, words: Sequence[str]) -> bool:
    places = [text.find(word) for word in words]
    return all(text.count(word) == 1 for word in words) and all(
        before < after for before, after in pairwise(places)
    )
