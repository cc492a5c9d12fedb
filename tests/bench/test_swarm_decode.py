"""Decode loops: whose attention serves while plain operations are asked for, and afterwards."""

import pytest

from bench.swarm_decode import plain_steps, prefix_path, tail_lengths
from bench.swarm_findings import Steps, step_name
from bench.swarm_setup import Setup, prepare
from bench.swarm_steps import steps
from mlx_swarm.broker.engine import shared_attention
from mlx_swarm.broker.engine.shared_attention import Geometry, Implementation
from tests.bench.tiny_swarm import TINY


@pytest.fixture(scope="module")
def setup() -> Setup:
    return prepare(TINY.model, TINY.dtype, ram=TINY.ram, copies=0)


def test_plain_operations_serve_only_while_they_are_measured(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(geometry: Geometry, spans: int = 1) -> Implementation:
        raise AssertionError("the usual implementation was asked for")

    monkeypatch.setattr(shared_attention, "implementation", never)
    assert plain_steps(setup, [prefix_path(setup, 32)] * 2, [3, 4], 2)() > 0
    assert shared_attention.implementation is never


def test_plain_operations_stand_beside_kernels_where_asked(setup: Setup) -> None:
    sizes = TINY.steps._replace(rows=(2,), plain=((2, 64),))
    found = list(steps(setup._replace(attention="kernel"), sizes))[-1]
    assert isinstance(found, Steps)
    assert found.figure("plain", 64)
    assert not found.figure("plain", 0)
    assert step_name("plain", 2048) == "plain, 2,048 shared"


def test_tails_are_ragged_around_their_mean() -> None:
    lengths = tail_lengths(500, 128)
    assert (min(lengths), max(lengths)) == (64, 192)
    assert sum(lengths) / 500 == pytest.approx(128, abs=1)
