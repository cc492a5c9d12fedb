"""Launches of the CUDA kernels, and the rule that says where they apply."""

import ctypes
from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx

from .schedule import Tables, Tiling
from .source import ELEMENTS, Program, SpanVariant, span_program, tail_program

MAX_SPANS = 8
"""Spans of one step that the kernels take; each slot costs kernel arguments, not launches."""

NO_WINDOW = 1 << 30

_PROCESSORS, _SHARED_MEMORY = 16, 97  # CUdevice_attribute numbers


class Geometry(NamedTuple):
    """The shapes that a kernel is compiled for. `dtype` is a name such as "bfloat16"."""

    query_heads: int
    kv_heads: int
    head_size: int
    dtype: str

    @property
    def ratio(self) -> int:
        """Query heads for each KV head."""
        return self.query_heads // self.kv_heads


class Gpu(NamedTuple):
    """The facts about the GPU that choose a variant. `shared_memory` is in bytes, for one block."""

    capability: tuple[int, int]
    processors: int
    shared_memory: int


class SpanLaunch(NamedTuple):
    """The tables of one step on the device, and the variant that they were cut for."""

    variant: SpanVariant
    members: mx.array
    work: mx.array
    partials: int


@cache
def gpu() -> Gpu | None:
    """The GPU that MLX's CUDA build runs on, or None."""
    if not mx.cuda.is_available() or mx.default_device() != mx.Device(mx.gpu, 0):
        return None
    facts = mx.device_info()
    capability = int(facts["compute_capability_major"]), int(facts["compute_capability_minor"])
    return Gpu(capability, _driver_attribute(_PROCESSORS), _driver_attribute(_SHARED_MEMORY))


def unsupported(geometry: Geometry) -> str:
    """Why no kernel applies to these shapes on this machine; "" if one does."""
    device = gpu()
    if device is None:
        return "MLX runs without CUDA"
    if geometry.dtype not in ELEMENTS:
        return f"the kernels compute in bfloat16 or float16, not in {geometry.dtype}"
    if geometry.head_size % 16 or not 16 <= geometry.head_size <= 256:
        return f"head size {geometry.head_size} is not a multiple of 16 up to 256"
    if device.capability < (8, 0):
        return f"compute capability {device.capability} is below 8.0"
    need = max(p.shared_memory for p in _programs(geometry, device))
    if need > device.shared_memory:
        return (
            f"a block needs {need:,} bytes of shared memory, the GPU has {device.shared_memory:,}"
        )
    return ""


def span_variant(geometry: Geometry, device: Gpu, folded_rows: int) -> SpanVariant:
    """The variant for a step whose largest group has this many rows x ratio."""
    size = geometry.head_size
    if device.capability == (9, 0) and size in (64, 128):
        small = folded_rows <= 64
        return SpanVariant("wgmma", size, 4 if small else 8, 128, 3, 2 if size == 64 else 1)
    return SpanVariant("mma", size, 4, 64 if size <= 128 else 32, 2, 3 if size <= 128 else 2)


def tiling(variant: SpanVariant, geometry: Geometry, device: Gpu) -> Tiling:
    """How a step's spans are to be cut for a variant."""
    blocks = max(1, device.processors * variant.blocks // geometry.kv_heads)
    return Tiling(variant.rows, variant.keys, blocks, geometry.ratio)


def span_launch(variant: SpanVariant, tables: Tables) -> SpanLaunch:
    """Puts the tables on the device."""
    members, work = mx.array(tables.members), mx.array(tables.work)
    return SpanLaunch(variant, members, work, tables.partials)


def attend_spans(
    queries: mx.array,
    slab: tuple[mx.array, mx.array],
    spans: list[mx.array],
    lengths: mx.array,
    launch: SpanLaunch,
    geometry: Geometry,
    scale: float,
    *,
    window: bool,
) -> list[mx.array]:
    """Partial outputs [partials, Hq, D], normalised in their chunk, and log2 sums [partials, Hq].

    `spans` holds keys and values in turn, each [Hkv, P, D]; `slab` each [slots, Hkv, capacity, D].
    """
    slots = 1 if len(spans) <= 2 else MAX_SPANS
    spare = spans[:2] or [slab[0][0], slab[1][0]]
    inputs = [queries, *slab, lengths, launch.members, launch.work, _scalar(scale), *spans]
    inputs += spare * (slots - len(spans) // 2)
    program, kernel = _span_kernel(launch.variant, geometry.dtype, geometry.ratio, slots, window)
    shape = launch.partials, geometry.query_heads
    results: list[mx.array] = kernel(
        inputs=inputs,
        grid=(launch.work.shape[0] * program.threads, geometry.kv_heads, 1),
        threadgroup=(program.threads, 1, 1),
        output_shapes=[(*shape, geometry.head_size), shape],
        output_dtypes=[mx.float32, mx.float32],
    )
    return results


def finish(
    queries: mx.array,
    slab: tuple[mx.array, mx.array],
    rows: tuple[mx.array, mx.array, mx.array, mx.array],
    partials: list[mx.array],
    geometry: Geometry,
    scale: float,
    window: int,
    sinks: mx.array | None,
) -> mx.array:
    """The step's output [N, Hq, 1, D]: tails, merged with partials and sinks.

    `rows` are int32 arrays: slots [N], begins [N], lengths [N], partial_begins [N + 1].
    """
    inputs = [queries, *slab, *rows, *partials, _scalar(window or NO_WINDOW), _scalar(scale)]
    if sinks is not None:
        inputs.append(sinks.astype(queries.dtype))
    program, kernel = _tail_kernel(geometry, sinks is not None)
    head_blocks = geometry.kv_heads * -(-geometry.ratio // 16)
    results: list[mx.array] = kernel(
        inputs=inputs,
        grid=(head_blocks * program.threads, queries.shape[0], 1),
        threadgroup=(program.threads, 1, 1),
        output_shapes=[queries.shape],
        output_dtypes=[queries.dtype],
    )
    return results[0]


@cache
def no_partials(query_heads: int, head_size: int) -> list[mx.array]:
    """Stands for the partials of a step without spans."""
    return [mx.zeros((1, query_heads, head_size)), mx.zeros((1, query_heads))]


@cache
def _scalar(value: float) -> mx.array:
    return mx.array(value, mx.float32 if isinstance(value, float) else mx.int32)


@cache
def _span_kernel(
    variant: SpanVariant, dtype: str, ratio: int, spans: int, window: bool
) -> tuple[Program, Any]:
    program = span_program(variant, dtype, ratio, spans, window=window)
    return program, _kernel(program)


@cache
def _tail_kernel(geometry: Geometry, sinks: bool) -> tuple[Program, Any]:
    program = tail_program(geometry.head_size, geometry.dtype, geometry.ratio, sinks=sinks)
    return program, _kernel(program)


def _kernel(program: Program) -> Any:
    return mx.fast.cuda_kernel(
        name=program.name,
        input_names=list(program.inputs),
        output_names=list(program.outputs),
        header=program.header,
        source=program.body,
        ensure_row_contiguous=False,
        shared_memory=program.shared_memory,
    )


def _programs(geometry: Geometry, device: Gpu) -> list[Program]:
    size, dtype, ratio = geometry.head_size, geometry.dtype, geometry.ratio
    variants = {span_variant(geometry, device, rows) for rows in (1, 1024)}
    programs = [span_program(v, dtype, ratio, 1, window=False) for v in variants]
    return [*programs, tail_program(size, dtype, ratio, sinks=False)]


def _driver_attribute(number: int) -> int:
    """An attribute of the first device, read from the driver: MLX does not report it."""
    value = ctypes.c_int()
    status = ctypes.CDLL("libcuda.so.1").cuDeviceGetAttribute(ctypes.byref(value), number, 0)
    assert status == 0, f"cuDeviceGetAttribute({number}) failed with {status}"
    return value.value
