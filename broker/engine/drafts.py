"""Which models may propose tokens for which, and how far: what mlx-lm's speculation takes."""

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from mlx_lm.models.cache import (
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from ..errors import ContextOverflow, InvalidRequest
from ..models import LoadedModel
from .vocabulary import vocabulary_of

NO_DRAFTS: Mapping[str, LoadedModel] = MappingProxyType({})

TRIMMED = (KVCache, QuantizedKVCache, ChunkedKVCache)
"""Caches from whose end any number of tokens can be taken that were just appended. Not so
`ConcatenateKVCache`, which appends behind what was taken off.
"""


def require_draft(
    model: LoadedModel,
    name: str,
    drafts: Mapping[str, LoadedModel],
    prompt_tokens: int,
    max_tokens: int,
) -> None:
    """Raise `InvalidRequest` unless the draft of that name can serve a request to `model`."""
    draft = drafts.get(name)
    if draft is None:
        known = ", ".join(map(repr, drafts)) or "none"
        raise InvalidRequest(
            f"no draft model {name!r} is loaded for {model.name}; there are: {known}"
        )
    _require_same_tokens(model, draft)
    total = prompt_tokens + max_tokens
    if total > draft.context_length:
        raise ContextOverflow(
            f"{prompt_tokens:,} prompt tokens and up to {max_tokens:,} new ones do not fit the "
            f"context of the draft {draft.name}, {draft.context_length:,}"
        )
    for each in (model, draft):
        _require_trimmable(each, total)


def _require_same_tokens(model: LoadedModel, draft: LoadedModel) -> None:
    ours, theirs = vocabulary_of(model), vocabulary_of(draft)
    if ours == theirs and model.identity.tokenizer == draft.identity.tokenizer:
        return
    difference = "another tokenizer" if ours == theirs else "another vocabulary"
    raise InvalidRequest(
        f"the draft {draft.name} ({theirs:,} tokens) has {difference} than {model.name} "
        f"({ours:,} tokens)"
    )


def _require_trimmable(model: LoadedModel, tokens: int) -> None:
    caches = model.make_caches()
    layers = len(model.model.layers)
    if len(caches) != layers:
        raise InvalidRequest(
            f"{model.name} has {layers} layers and {len(caches)} caches: mlx-lm's speculation "
            "needs one for each"
        )
    for cache in _flat(caches):
        if type(cache) is RotatingKVCache:
            if tokens >= cache.max_size:
                raise InvalidRequest(
                    f"{model.name} keeps the last {cache.max_size:,} tokens in some layers, from "
                    f"which refused drafts cannot be taken back; prompt and output may come to "
                    f"{tokens:,}"
                )
        elif type(cache) not in TRIMMED:
            raise InvalidRequest(
                f"refused drafts cannot be taken back from the {type(cache).__name__} of "
                f"{model.name}"
            )


def _flat(caches: Iterable[Any]) -> Iterator[Any]:
    for cache in caches:
        if type(cache) is CacheList:
            yield from _flat(cache.caches)
        else:
            yield cache
