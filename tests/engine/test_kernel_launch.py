"""What reaches the CUDA kernels, seen without a GPU: a stand-in is in place of MLX's kernels."""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest

from mlx_swarm.broker.engine import shared_attention
from mlx_swarm.broker.engine.kernels import launch
from mlx_swarm.broker.engine.kernels.source import Program, span_program, tail_program
from mlx_swarm.broker.engine.shared_attention import (
    DecodePlan,
    Geometry,
    Group,
    Span,
    Tails,
    decode_attention,
    implementation,
)

HOPPER = launch.Gpu((9, 0), 132, 232_448)
AMPERE = launch.Gpu((8, 0), 108, 167_936)
ROWS, GEOMETRY = 6, Geometry(8, 2, 64, "bfloat16")


class Calls(list[tuple[Program, dict[str, Any]]]):
    """Every launch: the program and the arguments of the call."""

    def kernel(self, program: Program) -> Any:
        def call(**arguments: Any) -> list[mx.array]:
            self.append((program, arguments))
            shapes = zip(arguments["output_shapes"], arguments["output_dtypes"], strict=True)
            return [mx.zeros(shape, dtype) for shape, dtype in shapes]

        return call


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    made = Calls()
    caches = launch._span_kernel, launch._tail_kernel
    for cached in caches:
        cached.cache_clear()
    monkeypatch.setattr(launch, "gpu", lambda: HOPPER)
    monkeypatch.setattr(launch, "_kernel", made.kernel)
    monkeypatch.setattr(shared_attention, "_kernel_refusal", lambda geometry: "")
    yield made
    for cached in caches:
        cached.cache_clear()


def _attend(groups: list[Group], *, longest: int = 5, window: int = 0, sinks: bool = False) -> None:
    keys = mx.zeros((ROWS, 2, longest, 64), mx.bfloat16)
    spans = [Span(*mx.zeros((2, 2, group.length, 64), mx.bfloat16)) for group in groups]
    plan = DecodePlan(groups, [longest] * ROWS, window=window, positions=[0] * ROWS)
    decode_attention(
        mx.zeros((ROWS, 8, 1, 64), mx.bfloat16),
        spans,
        Tails(keys, keys),
        plan,
        scale=0.125,
        sinks=mx.zeros((8,)) if sinks else None,
    )


def _group(length: int = 300) -> Group:
    return Group(range(ROWS), length)


@pytest.mark.parametrize("window", [0, 200])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("longest", [5, 3000])
@pytest.mark.parametrize("groups", [0, 1, 2, 8])
def test_every_input_of_a_program_is_passed(
    calls: Calls, groups: int, longest: int, sinks: bool, window: int
) -> None:
    _attend([_group()] * groups, longest=longest, window=window, sinks=sinks)
    assert calls[-1][0].name.startswith("tail")
    for program, arguments in calls:
        assert len(arguments["inputs"]) == len(program.inputs)
        assert len(arguments["output_shapes"]) == len(program.outputs)


def test_a_layer_is_two_launches_and_one_without_spans(calls: Calls) -> None:
    _attend([_group(), _group()])
    assert len(calls) == 2
    calls.clear()
    _attend([])
    assert len(calls) == 1


def test_lengths_change_nothing_that_is_compiled(calls: Calls) -> None:
    for length in (300, 700, 9000):
        _attend([_group(length)])
    assert len({program for program, _ in calls}) == 2


def test_long_tails_are_attended_to_in_chunks(calls: Calls) -> None:
    _attend([], longest=3000)
    (span, arguments), _ = calls
    blocks = arguments["grid"][0] // span.threads
    assert blocks > ROWS
    assert arguments["output_shapes"][0][0] == blocks


def test_more_groups_than_the_kernels_take_are_refused_with_the_numbers(calls: Calls) -> None:
    assert implementation(GEOMETRY, 8).name == "kernel"
    refused = implementation(GEOMETRY, 9)
    assert (refused.name, refused.reason) == ("fused", "9 groups in one step, the kernels take 8")


@pytest.mark.parametrize(
    ("geometry", "device", "reason"),
    [
        (Geometry(8, 2, 64, "bfloat16"), HOPPER, ""),
        (Geometry(8, 1, 256, "float16"), HOPPER, ""),
        (Geometry(8, 2, 128, "bfloat16"), AMPERE, ""),
        (Geometry(8, 2, 64, "float32"), HOPPER, "not in float32"),
        (Geometry(8, 2, 72, "bfloat16"), HOPPER, "head size 72"),
        (Geometry(8, 2, 64, "bfloat16"), launch.Gpu((7, 5), 68, 65_536), "capability"),
        (Geometry(8, 2, 256, "bfloat16"), launch.Gpu((8, 6), 84, 101_376), "101,376"),
        (Geometry(8, 2, 64, "bfloat16"), None, "without CUDA"),
    ],
)
def test_says_where_the_kernels_apply(
    monkeypatch: pytest.MonkeyPatch, geometry: Geometry, device: launch.Gpu | None, reason: str
) -> None:
    monkeypatch.setattr(launch, "gpu", lambda: device)
    found = launch.unsupported(geometry)
    assert reason in found
    assert bool(found) == bool(reason)


def test_programs_of_different_shapes_have_different_names() -> None:
    variants = [
        launch.span_variant(Geometry(8, 2, size, "bfloat16"), HOPPER, rows)
        for size in (64, 80, 128, 256)
        for rows in (1, 1024)
    ]
    programs = [
        span_program(variant, dtype, ratio, spans, window=window)
        for variant in dict.fromkeys(variants)
        for dtype in ("bfloat16", "float16")
        for ratio in (1, 4)
        for spans in (1, 8)
        for window in (False, True)
    ]
    programs += [
        tail_program(size, "float16", ratio, sinks=sinks)
        for size in (64, 128)
        for ratio in (1, 4)
        for sinks in (False, True)
    ]
    assert len({program.name for program in programs}) == len(programs)
