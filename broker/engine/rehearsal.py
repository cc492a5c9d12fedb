"""A short life of a batch at load, so that no request waits for MLX to compile what it needs."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import greedy_sampler

from ..cache.layout import Layout
from ..request import Sampling
from .decode_batch import DecodeBatch, PrefillLimits
from .logprobs import step_logprobs
from .sampling import RowSampler, sample
from .seat import Seat, zero_states
from .sharing import Piece

TOKEN = 7
LONG = 300
"""Tokens of a prompt that makes the tails before it move."""

SETTINGS = (
    Sampling(temperature=1.0),
    Sampling(temperature=1.0, top_p=0.9),
    Sampling(temperature=1.0, top_k=40),
    Sampling(temperature=1.0, min_p=0.05),
)


def rehearse(
    model: Any, layout: Layout, limits: PrefillLimits, path: Sequence[Piece], vocabulary: int
) -> None:
    """Let rows with and without a prefix be prefilled, join, move, leave and be stored, and tokens
    be chosen in every way. `layout` must have no state.
    """
    batch = DecodeBatch(model, layout, limits)
    first, second = (_join(batch, layout, path, [3, 40][row]) for row in range(2))
    batch.step()
    _join(batch, layout, (), LONG)
    batch.step()
    batch.row(first).cut(0, first.length)
    batch.remove(second)
    batch.step()
    logits = mx.zeros((2, vocabulary), mx.float32)
    for settings in SETTINGS:
        for rows in (1, 2):
            samplers = [RowSampler(settings, row) for row in range(rows)]
            mx.eval(sample(logits[:rows], samplers))
    mx.eval(step_logprobs(logits, mx.zeros((2,), mx.uint32), [0, 5]).arrays)
    mx.synchronize()


def _join(batch: DecodeBatch, layout: Layout, path: Sequence[Piece], own: int) -> Seat:
    seat = Seat(
        path,
        () if path else [() for _ in layout.leaves],
        zero_states(layout),
        length=path[-1].stop if path else 0,
        ahead=[TOKEN] * own,
        token=TOKEN,
        max_tokens=16,
        sampler=greedy_sampler,
    )
    batch.prefill([(seat, own)])
    batch.add(seat)
    return seat
