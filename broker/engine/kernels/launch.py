"""Launches of the CUDA kernels, and the rule that says where they apply."""

import ctypes
from collections.abc import Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from .schedule import Tables, Tiling
from .source import ELEMENTS, Program, SpanVariant, span_program, tail_program

MAX_SPANS = 8
"""Spans of one step that the kernels take: each is arguments of a launch, not a launch."""

_NO_WINDOW = 1 << 30
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


class Launches(NamedTuple):
    """The launches of one plan for one geometry: everything that is the same in all layers.

    `table` and `attend` are None where no row has a span or a long tail; `spare` is how many span
    slots of the compiled kernel are left over, `many` whether it takes the slab as well.
    """

    attend: Any
    table: mx.array | None
    partials: list[mx.array]
    spare: int
    many: bool
    window: bool
    finish: Any
    rows: mx.array
    scale: mx.array

    def layer(
        self,
        queries: mx.array,
        spans: Sequence[tuple[mx.array, mx.array]],
        slab: tuple[mx.array, mx.array],
        lengths: mx.array,
        sinks: mx.array | None,
    ) -> mx.array:
        """One layer: queries and output [N, Hq, 1, D], spans [Hkv, P, D], slab [slots, Hkv,
        capacity, D], lengths int32 [N]."""
        partials = self.partials
        if self.attend is not None:
            inputs = [queries, self.table, self.scale]
            if self.window:
                inputs.append(lengths)
            if self.many:
                inputs += slab
            for span in spans:
                inputs += span
            inputs += [*slab] * self.spare  # never read
            partials = self.attend(inputs=inputs)
        inputs = [queries, *slab, self.rows, lengths, *partials, self.scale]
        if sinks is not None:
            inputs.append(sinks.astype(queries.dtype))
        out: list[mx.array] = self.finish(inputs=inputs)
        return out[0]


def make_launches(
    geometry: Geometry,
    tables: Tables,
    variant: SpanVariant,
    slots: Sequence[int],
    begins: Sequence[int],
    *,
    spans: int,
    tail_segments: bool,
    window: int,
    scale: float,
    sinks: bool,
) -> Launches:
    """Puts a plan's tables on the device and finds its kernels; `slots` and `begins` say where
    each row's tail lies and where what the tail kernel does of it begins."""
    many = spans > 1 or tail_segments
    capacity = MAX_SPANS if many else 1
    attend, table = None, None
    if len(tables.work):
        attend = _bind_spans(geometry, tables, variant, capacity, window=bool(window))
        table = mx.array(np.concatenate([tables.work.ravel(), tables.members.ravel()]))
    columns = np.zeros((len(slots) + 1, 4), np.int32)
    columns[:, 0], columns[:, 3] = tables.partial_begins, window or _NO_WINDOW
    columns[:-1, 1], columns[:-1, 2] = slots, begins
    heads, size = geometry.query_heads, geometry.head_size
    return Launches(
        attend,
        table,
        [mx.zeros((1, heads, size)), mx.zeros((1, heads))],
        capacity - spans,
        many,
        bool(window),
        _bind_tail(geometry, len(slots), sinks=sinks),
        mx.array(columns),
        mx.array(scale, mx.float32),
    )


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


def _bind_spans(
    geometry: Geometry, tables: Tables, variant: SpanVariant, spans: int, *, window: bool
) -> Any:
    program, kernel = _span_kernel(variant, geometry.dtype, geometry.ratio, spans, window)
    shape = tables.partials, geometry.query_heads
    return partial(
        kernel,
        grid=(len(tables.work) * program.threads, geometry.kv_heads, 1),
        threadgroup=(program.threads, 1, 1),
        output_shapes=[(*shape, geometry.head_size), shape],
        output_dtypes=[mx.float32, mx.float32],
    )


def _bind_tail(geometry: Geometry, rows: int, *, sinks: bool) -> Any:
    program, kernel = _tail_kernel(geometry, sinks)
    head_blocks = geometry.kv_heads * -(-geometry.ratio // 16)
    return partial(
        kernel,
        grid=(head_blocks * program.threads, rows, 1),
        threadgroup=(program.threads, 1, 1),
        output_shapes=[(rows, geometry.query_heads, 1, geometry.head_size)],
        output_dtypes=[getattr(mx, geometry.dtype)],
    )


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
