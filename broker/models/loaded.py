"""A model in memory with its tokenizer: what the engine runs and what prompts are rendered with."""

import threading
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from typing import Any, NamedTuple, Self

import mlx.nn as nn
import msgspec
from jinja2 import TemplateError
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import InvalidRequest
from ..request import Message
from .identity import ModelIdentity
from .reasons import reason_of

# What may follow instructions: a token that merges with any of these is not shared by all
# conversations.
PROBES = ("A", "b", "0", " ", "\n", "\n\n", ".", "é", "")
KEPT_PREFIXES = 256


class Rendered(NamedTuple):
    """A conversation as tokens. `boundaries` holds the length up to which every conversation with
    the same leading system message agrees; it is empty if there is no system message."""

    tokens: list[int]
    boundaries: tuple[int, ...]


class LoadedModel:
    """A stock mlx-lm model, its tokenizer, its configuration and its identity.

    `context_length` is in tokens; `dtype` is what it computes in. `adapter` is the name of the
    adapter that the model carries, empty without one. `encode` and `render` may be
    called from any thread; the model and its caches belong to the thread that loaded it.
    """

    def __init__(
        self,
        *,
        name: str,
        model: nn.Module,
        tokenizer: TokenizerWrapper,
        config: dict[str, Any],
        identity: ModelIdentity,
        context_length: int,
    ) -> None:
        self.name = name
        self.model = model
        self.tokenizer = tokenizer
        self.config = config
        self.identity = identity
        self.context_length = context_length
        self.adapter = ""
        # The tokenizers of transformers change their own settings while they encode.
        self._tokenizing = threading.Lock()
        self._shared_prefixes: dict[str, list[int]] = {}

    @property
    def dtype(self) -> str:
        """The dtype of activations and KV, as MLX names it."""
        return self.identity.dtype

    def adapted(self, model: nn.Module, *, adapter: str, digest: str) -> Self:
        """The same with another `model`, which carries the adapter of that name and content digest.

        Both share the tokenizer, and take turns at it.
        """
        other = copy(self)
        other.model = model
        other.adapter = adapter
        other.identity = msgspec.structs.replace(self.identity, adapter=digest)
        return other

    def encode(self, text: str) -> list[int]:
        """Raw text as tokens, with the model's first token if it wants one and the text lacks
        it."""
        bos = self.tokenizer.bos_token
        add_special = bos is None or not text.startswith(bos)
        with self._tokenizing:
            return list(self.tokenizer.encode(text, add_special_tokens=add_special))

    def tokenizer_json(self) -> str:
        """The tokenizer as the `tokenizers` library writes it, without padding and truncation.

        Raises `AttributeError` for one that is not of that library.
        """
        with self._tokenizing:
            backend = copy(self.tokenizer.backend_tokenizer)
            backend.no_padding()
            backend.no_truncation()
            return str(backend.to_str())

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> Rendered:
        """Messages as tokens, by the model's chat template.

        Raises `InvalidRequest` if the model has no template or the template refuses the messages.
        """
        with self._tokenizing:
            tokens = self._apply(messages, add_generation_prompt)
            if not messages or messages[0].role != "system":
                return Rendered(tokens, ())
            shared = common_prefix([tokens, self._shared_prefix(messages[0])])
        return Rendered(tokens, (len(shared),) if shared else ())

    def release(self) -> None:
        """Let go of the weights. Text can be encoded and rendered as before, nothing else."""
        self.model = nn.Module()

    def make_caches(self) -> list[Any]:
        """One empty cache object a layer, as mlx-lm makes them."""
        return list(make_prompt_cache(self.model))

    def new_detokenizer(self) -> Any:
        """A streaming detokenizer of mlx-lm for one sequence."""
        return self.tokenizer.detokenizer

    def _shared_prefix(self, system: Message) -> list[int]:
        """The tokens that every conversation after this system message starts with."""
        found = self._shared_prefixes.pop(system.content, None)
        if found is None:
            found = self._measured_prefix(system)
        self._shared_prefixes[system.content] = found
        if len(self._shared_prefixes) > KEPT_PREFIXES:
            self._shared_prefixes.pop(next(iter(self._shared_prefixes)))
        return found

    def _measured_prefix(self, system: Message) -> list[int]:
        rendered = []
        for probe in PROBES:
            # A template may refuse an empty turn, say; no conversation then has one.
            with suppress(InvalidRequest):
                rendered.append(self._apply([system, Message("user", probe)], True))
        return common_prefix(rendered) if len(rendered) > 1 else []

    def _apply(self, messages: Sequence[Message], add_generation_prompt: bool) -> list[int]:
        if not self.tokenizer.has_chat_template:
            raise InvalidRequest(
                f"{self.name} has no chat template: give text or tokens instead of messages"
            )
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            tokens = self.tokenizer.apply_chat_template(
                turns, add_generation_prompt=add_generation_prompt
            )
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            roles = ", ".join(message.role for message in messages)
            raise InvalidRequest(
                f"the chat template of {self.name} refuses the roles {roles}: {reason_of(error)}"
            ) from error
        return list(tokens)


def common_prefix(sequences: Sequence[Sequence[int]]) -> list[int]:
    """The longest list of tokens that all sequences start with."""
    shared: list[int] = []
    for column in zip(*sequences, strict=False):
        if len(set(column)) > 1:
            break
        shared.append(column[0])
    return shared
