"""The one seam into mlx-lm's models: their `scaled_dot_product_attention` learns to read our
caches.

`install` puts one dispatcher in place of the function, in `mlx_lm.models.base` and in every
loaded module that holds it. The dispatcher looks at the keys: a `KVHandle` is attended to segment
by segment, a `BatchHandle` as a decode step of many rows, arrays go to mlx-lm's own function,
untouched.
"""

import sys
from types import ModuleType
from typing import Any

import mlx.core as mx
from mlx_lm.models import base

from ..cache.segments import KVHandle
from .batch_caches import BatchHandle
from .partials import merge_partials, partial_attention

__all__ = ["attend", "install", "installed", "merge_partials", "partial_attention", "uninstall"]

NAME = "scaled_dot_product_attention"
PREFIX = "mlx_lm.models."


def dispatch(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """What models call instead of mlx-lm's function; same arguments, same result."""
    if isinstance(keys, BatchHandle) and isinstance(values, BatchHandle):
        return keys.attend(queries, scale, mask, sinks)
    if not isinstance(keys, KVHandle):
        result: mx.array = STOCK(
            queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks
        )
        return result
    if not isinstance(values, KVHandle):
        raise TypeError("the model computes on the values of its cache: it needs stock caches")
    return attend(queries, keys, scale, mask, sinks)


def attend(
    queries: mx.array,
    handle: KVHandle,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attention of `[rows, heads, L, dim]` queries over a handle's segments, in their dtype.

    One query: the segments are attended to where they lie and merged by log-sum-exp; nothing of
    the prefix is copied. Otherwise mlx-lm's own function, over the segments joined for this layer
    only: several queries, quantised KV, a single segment, and float32 on a GPU, whose matrix
    products round to TF32. `mask` covers the handle's tokens, in order; "causal" aligns the last
    query with the last token.
    """
    rounds = queries.dtype == mx.float32 and mx.default_device().type == mx.DeviceType.gpu
    if rounds or handle.bits or queries.shape[2] > 1 or len(handle.segments) == 1:
        return _attend_joined(queries, handle, scale, mask, sinks)
    partials = []
    first = 0
    for segment in handle.segments:
        keys, values = segment.planes
        part = _mask_part(mask, first, first + len(segment), handle.length)
        partials.append(partial_attention(queries, keys, values, scale, part))
        first += len(segment)
    return merge_partials(partials, sinks).astype(queries.dtype)


def install(model: Any = None) -> int:
    """Put the dispatcher in place of mlx-lm's function wherever it is held; return in how many
    modules.

    Looks at mlx-lm's loaded modules and at those that define the parts of `model`. Installing
    again is harmless and finds modules loaded since.
    """
    return _replace(STOCK, dispatch, _modules(model))


def uninstall(model: Any = None) -> int:
    """Give mlx-lm's function back everywhere; return in how many modules."""
    return _replace(dispatch, STOCK, _modules(model))


def installed() -> bool:
    """Whether models loaded now would find the dispatcher."""
    return getattr(base, NAME) is dispatch


def _attend_joined(
    queries: mx.array,
    handle: KVHandle,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None,
) -> mx.array:
    planes = handle.join()
    half = len(planes) // 2
    keys, values = planes[:half], planes[half:]
    # Quantised planes travel as tuples; mlx-lm reads `bits` and `group_size` off the cache.
    result: mx.array = STOCK(
        queries,
        keys if handle.bits else keys[0],
        values if handle.bits else values[0],
        cache=handle if handle.bits else None,
        scale=scale,
        mask=mask,
        sinks=sinks,
    )
    return result


def _mask_part(mask: mx.array | str | None, start: int, stop: int, length: int) -> mx.array | None:
    if not isinstance(mask, mx.array):
        # A single query sees every token under "causal" as under None.
        return None
    return mask[..., start:stop] if mask.shape[-1] == length else mask


def _modules(model: Any) -> list[ModuleType]:
    names = {name for name in sys.modules if name.startswith(PREFIX)}
    if model is not None:
        names |= {type(part).__module__ for part in model.modules()}
    return [sys.modules[name] for name in sorted(names) if name in sys.modules]


def _replace(old: Any, new: Any, modules: list[ModuleType]) -> int:
    changed = 0
    for module in modules:
        held = [name for name, value in vars(module).items() if value is old]
        for name in held:
            setattr(module, name, new)
        changed += bool(held)
    return changed


STOCK: Any = getattr(base, NAME)
