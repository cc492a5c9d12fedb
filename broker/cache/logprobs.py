"""Log-probabilities of stored tokens, beside the KV of those tokens. No MLX.

What is kept of a token is its own log-probability given all tokens before it. A prompt that needs
them too can use no more of what is stored than `usable_length` says.
"""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from .walk import Walk

Logprobs: TypeAlias = npt.NDArray[np.float32]
"""One a token, NaN where it is not known; 0 for a sequence's first, which nothing precedes."""

LOGPROB_BYTES = 4


def unknown(tokens: int) -> Logprobs:
    """So many that are not known."""
    return np.full(tokens, np.nan, np.float32)


def known_logprobs(walk: Walk) -> Logprobs:
    """Those of the walked tokens, up to the first that is not known."""
    parts: list[Logprobs] = []
    for node in walk.path:
        held = getattr(node.span, "logprobs", None)
        if held is None:
            break
        held = held[: walk.length - node.start]
        gaps = np.flatnonzero(np.isnan(held))
        parts.append(held[: gaps[0]] if len(gaps) else held)
        if len(gaps):
            break
    return np.concatenate(parts) if parts else unknown(0)


def usable_length(walk: Walk, alternatives: int | None) -> int:
    """How much of a walked path serves a prompt whose log-probabilities are needed with so many
    alternatives (which are never stored); all of it if that is None.

    One token less than are known: the last of them is forwarded again, because only its logits tell
    the next one's.
    """
    if alternatives is None:
        return walk.length
    return 0 if alternatives else max(len(known_logprobs(walk)) - 1, 0)


def lacks_logprobs(walk: Walk, alternatives: int | None) -> bool:
    """Whether those of some walked token are not known."""
    if alternatives is None:
        return False
    return walk.length > (0 if alternatives else len(known_logprobs(walk)))
