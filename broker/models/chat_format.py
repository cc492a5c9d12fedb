"""Between messages and tokens, and between a reply's text and what it says."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import ContextOverflow
from ..grammar import Grammar
from ..messages import Message, Tool, ToolChoice, check_tool_choice, check_tools
from .boundaries import Boundaries, Conversation
from .marker import Marker
from .reply_reader import ReplyReader, State, marks_of
from .template import ChatTemplate
from .token_bytes import token_bytes
from .tool_grammar import tool_grammar
from .tool_syntax import GENERIC, ToolSyntax, think_tags, tool_syntax
from .turns import Turns, template_tools


class Rendered(NamedTuple):
    """A conversation as tokens, and as the `text` that they are of.

    `boundaries` holds the lengths in tokens up to which other conversations are likely to agree:
    those with the same tools and leading system messages, and those with the same messages up to
    one with `is_boundary`. It is empty if there is nothing of that.
    """

    tokens: list[int]
    boundaries: tuple[int, ...]
    text: str = ""


class ChatFormat:
    """How one model takes part in conversations. May be used in any thread; no MLX arrays.

    `tokenizing` is held while the tokenizer works.
    """

    def __init__(self, name: str, tokenizer: TokenizerWrapper, tokenizing: threading.Lock) -> None:
        self._tokenizer = tokenizer
        self._tokenizing = tokenizing
        self._template = ChatTemplate(name, tokenizer)
        self._marker = Marker(tokenizer)
        self._boundaries = Boundaries(self._template, tokenizer)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        add_generation_prompt: bool = True,
        thinking: bool | None = None,
        most_tokens: int | None = None,
    ) -> Rendered:
        """Messages as tokens, by the model's chat template, which also says what tools there are.

        What a template would refuse, drop or move it gets in another form at the same place: later
        instructions and results of tools as a user's turn, tools and calls as text. `thinking`
        turns reasoning on or off where the template can; None leaves it as mlx-lm has it.

        Raises `InvalidRequest` if the model has no template or the template refuses the messages,
        and `ContextOverflow` for what is certain to be more than `most_tokens`.
        """
        with self._tokenizing:
            conversation = self._conversation(tools, thinking)
            turns = conversation.turns.of(messages, conversation.described)
            text = self._template.text(
                turns,
                conversation.native,
                add_generation_prompt=add_generation_prompt,
                thinking=thinking,
            )
            self._check_length(text, most_tokens)
            tokens = self._template.tokens(
                text,
                turns,
                conversation.native,
                add_generation_prompt=add_generation_prompt,
                thinking=thinking,
            )
            boundaries = self._boundaries.of(messages, conversation, text, tokens)
        return Rendered(tokens, boundaries, text)

    def check_length(self, text: str, most_tokens: int) -> None:
        """Raise `ContextOverflow` for a text that is certain to be more than so many tokens.

        That is seen at once; to cut a text of megabytes into tokens takes long.
        """
        with self._tokenizing:
            self._check_length(text, most_tokens)

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens, special ones included, with nothing tidied up. What is no token of
        the vocabulary has no text.
        """
        ids = [int(token) for token in tokens]
        with self._tokenizing:
            text = self._tokenizer.decode(
                ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        return str(text)

    @cached_property
    def special(self) -> frozenset[int]:
        """The tokens that stand for themselves, whatever text is around them."""
        with self._tokenizing:
            added = getattr(self._tokenizer, "added_tokens_decoder", {})
            return frozenset([*added, *self._tokenizer.all_special_ids])

    def reader(self, tools: Sequence[Tool] = (), prompt_text: str = "") -> ReplyReader:
        """A reader of one reply to a prompt of that text (`Rendered.text`).

        Without `tools` the marks of calls are text like any other.
        """
        think = think_tags(self._tokenizer)
        syntax = self.syntax if tools else None
        marks = marks_of(
            syntax,
            think,
            start=self._start_state(prompt_text),
            extra=self._tokenizer.response_transitions,
            dropped=self._tokenizer.structural_markers,
        )
        return ReplyReader(marks, syntax, template_tools(tools))

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: ToolChoice = "auto",
        *,
        parallel: bool = True,
        schema: Mapping[str, Any] | None = None,
        prompt_text: str = "",
    ) -> Grammar | None:
        """What a reply must look like, so that it calls tools as `choice` says; None if free.

        With `required` or a `NamedTool` it is calls and nothing else, with `auto` text in which
        calls may stand. Whatever is called is one of `tools`, with arguments of its schema where
        the syntax lets a grammar say that (see `tool_grammar`). Without `parallel` the reply ends
        with the first call. What is not a call keeps to `schema`, if there is one. Reasoning stays
        free; `prompt_text` (`Rendered.text`) says whether the reply begins within it.

        Raises `InvalidRequest` for a choice that the tools do not allow.
        """
        check_tools(tools)
        check_tool_choice(choice, tools)
        return tool_grammar(
            self.syntax,
            self._marker,
            tools,
            choice,
            parallel=parallel,
            schema=schema,
            think=think_tags(self._tokenizer),
            in_reasoning=self._start_state(prompt_text) == "reasoning",
        )

    def banned_tokens(self) -> tuple[int, ...]:
        """The token that begins a call, if it is one: without it there is none."""
        token = self._marker.token(self.syntax.start)
        return () if token is None else (token,)

    def token_bytes(self, tokens: Sequence[int]) -> list[bytes]:
        """The bytes of each token, a piece of a character included; none for no token at all."""
        with self._tokenizing:
            return token_bytes(self._tokenizer, tokens)

    @property
    def syntax(self) -> ToolSyntax:
        """How calls are written: as the model was trained to, or as our own text tells it to."""
        with self._tokenizing:
            return self._known_syntax()

    def _check_length(self, text: str, most_tokens: int | None) -> None:
        if most_tokens is None or len(text) <= most_tokens * self._longest_token:
            return
        raise ContextOverflow(
            f"the prompt has {len(text):,} characters; the model's context is {most_tokens:,} "
            f"tokens, which are {most_tokens * self._longest_token:,} characters at most"
        )

    @cached_property
    def _longest_token(self) -> int:
        """In characters, as the vocabulary writes it: in some, a character for each byte."""
        return max(map(len, self._tokenizer.get_vocab()), default=1)

    def _known_syntax(self) -> ToolSyntax:
        known = tool_syntax(self._tokenizer)
        if known is None or not self._template.traits.tools:
            return GENERIC
        if known.family == "mistral" and "[ARGS]" not in self._template.source:
            return known._replace(family="mistral_list")
        return known

    def _conversation(self, tools: Sequence[Tool], thinking: bool | None) -> Conversation:
        native = self._known_syntax() is not GENERIC
        turns = Turns(self._template.traits, native)
        if native:
            return Conversation(turns, template_tools(tools) or None, (), thinking)
        return Conversation(turns, None, tools, thinking)

    def _start_state(self, prompt_text: str) -> State:
        think = think_tags(self._tokenizer)
        if think is not None and self._marker.is_open(think, prompt_text):
            return "reasoning"
        initial = self._tokenizer.response_initial_state
        return "header" if initial == "header" else "normal"
