"""A model in memory with its tokenizer: what the engine runs and what prompts are rendered with."""

import threading
from collections.abc import Sequence
from copy import copy
from typing import Any, Self

import mlx.nn as nn
import msgspec
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..checks import check_kind
from ..errors import InvalidRequest
from ..messages import Message
from .chat_format import ChatFormat, Rendered
from .identity import ModelIdentity


class LoadedModel:
    """A stock mlx-lm model, its tokenizer, its configuration and its identity.

    `context_length` is in tokens; `dtype` is what it computes in. `adapter` is the name of the
    adapter that the model carries, empty without one. `encode`, `decode`, `render` and `chat` may
    be used from any thread; the model and its caches belong to the thread that loaded it.
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
        self.chat = ChatFormat(name, tokenizer, self._tokenizing)

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

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones included. Raises `InvalidRequest` for what is no token
        of the vocabulary."""
        size = len(self.tokenizer)
        for token in tokens:
            check_kind("a token", token, int, "a token id")
            if not 0 <= token < size:
                raise InvalidRequest(
                    f"token {token} is outside the vocabulary of {self.name}, 0 to {size - 1}"
                )
        with self._tokenizing:
            return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False))

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
        return self.chat.render(messages, add_generation_prompt=add_generation_prompt)

    def release(self) -> None:
        """Let go of the weights. Text can be encoded and rendered as before, nothing else."""
        self.model = nn.Module()

    def make_caches(self) -> list[Any]:
        """One empty cache object a layer, as mlx-lm makes them."""
        return list(make_prompt_cache(self.model))

    def new_detokenizer(self) -> Any:
        """A streaming detokenizer of mlx-lm for one sequence."""
        return self.tokenizer.detokenizer
