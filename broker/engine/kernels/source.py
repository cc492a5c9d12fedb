"""The CUDA programs, put together from the .cuh files beside this one.

MLX copies the whole source of a kernel at every call, so that what it gets is a few lines that
include these files by their paths. Sizes that change from step to step are read at run time; what
is compiled in is the model's: dtype, head size, query heads for each KV head, windows, sinks.
"""

from pathlib import Path
from typing import NamedTuple

ELEMENTS = {"bfloat16": ("__nv_bfloat16", "bf16"), "float16": ("__half", "f16")}
HERE = Path(__file__).parent

TAIL_THREADS = 128
TAIL_STAGES = 2


class Program(NamedTuple):
    """What `mx.fast.cuda_kernel` takes, less the shapes of a call."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    header: str
    body: str
    threads: int
    shared_memory: int


class SpanVariant(NamedTuple):
    """One compiled form of a span kernel. `kind` is mma or wgmma, `warps` its warps in a block,
    `keys` the keys of a tile, `stages` the tiles in flight, `blocks` its blocks on a processor."""

    kind: str
    head_size: int
    warps: int
    keys: int
    stages: int
    blocks: int

    @property
    def rows(self) -> int:
        """Folded query rows of a block."""
        return self.warps * 16

    @property
    def shared_memory(self) -> int:
        """Bytes: the ring of key and value tiles, and wgmma's queries."""
        queries = _tile_bytes(self.rows, self.head_size) if self.kind == "wgmma" else 0
        return queries + self.stages * 2 * _tile_bytes(self.keys, self.head_size)


def span_program(
    variant: SpanVariant, dtype: str, ratio: int, spans: int, *, window: bool
) -> Program:
    """Rows of up to `spans` groups against their spans. With more than one the slab of the tails
    is a segment too, for the long parts of long tails."""
    size, threads = variant.head_size, variant.warps * 32
    name = f"span_{variant.kind}_{variant.warps}_{dtype}_{size}_{ratio}_{spans}_{int(window)}"
    if variant.kind == "wgmma":
        call = f"span_wgmma<{size}, {ratio}, {variant.warps // 4}, {variant.stages}"
    else:
        call = f"span_mma<{size}, {ratio}, {variant.warps}, {variant.keys}, {variant.stages}"
    choice = f"segment = {_span(0)};"
    if spans > 1:
        cases = [f"case {i + 1}: segment = {_span(i)}; break;" for i in range(spans)]
        choice = f"switch (item.segment) {{ {' '.join(cases)} default: segment = {_SLAB}; }}"
    body = f"""
extern __shared__ __align__(1024) unsigned char buffer[];
const auto* items = (const shared_attention::Work*)table;
const auto* members = (const shared_attention::Member*)(items + gridDim.x);
const shared_attention::Work item = items[blockIdx.x];
shared_attention::Segment segment;
{choice}
shared_attention::{call}, {str(window).lower()}>(queries, queries_strides[0], queries_strides[1],
segment, item, members, {"lengths" if window else "nullptr"}, *scale, out, log_sum, buffer);
"""
    inputs = ["queries", "table", "scale"] + ["lengths"] * window
    inputs += ["keys", "values"] * (spans > 1)
    inputs += [f"{part}{i}" for i in range(spans) for part in ("keys", "values")]
    return Program(
        name,
        tuple(inputs),
        ("out", "log_sum"),
        _header(name, dtype, threads, variant.blocks, f"span_{variant.kind}"),
        f"\n#undef custom_kernel_{name}{body}",
        threads,
        variant.shared_memory,
    )


def tail_program(head_size: int, dtype: str, ratio: int, *, sinks: bool) -> Program:
    """Every row's tail, merged with the partials of its spans and with the sinks."""
    name = f"tail_{dtype}_{head_size}_{ratio}_{int(sinks)}"
    ring = TAIL_STAGES * 2 * _tile_bytes(16, head_size)
    body = f"""
extern __shared__ __align__(1024) unsigned char buffer[];
const shared_attention::Tail tail = {{queries, queries_strides[0], queries_strides[1], {_SLAB},
(const shared_attention::Row*)rows, lengths, partial_out, partial_log_sum,
{"sinks" if sinks else "nullptr"}, *scale}};
shared_attention::tail_and_merge<{head_size}, {ratio}, {TAIL_STAGES}, {str(sinks).lower()}>
(tail, out, buffer);
"""
    inputs = ["queries", "keys", "values", "rows", "lengths", "partial_out", "partial_log_sum"]
    return Program(
        name,
        (*inputs, "scale", *["sinks"] * sinks),
        ("out",),
        _header(name, dtype, TAIL_THREADS, 3 if head_size <= 128 else 1, "tail"),
        f"\n#undef custom_kernel_{name}{body}",
        TAIL_THREADS,
        4 * ring + min(ratio, 16) * head_size * 4,
    )


_SLAB = (
    "{keys, values, keys_strides[0], keys_strides[1], keys_strides[2],"
    " values_strides[0], values_strides[1], values_strides[2]}"
)


def _span(index: int) -> str:
    keys, values = f"keys{index}", f"values{index}"
    return (
        f"{{{keys}, {values}, 0, {keys}_strides[0], {keys}_strides[1],"
        f" 0, {values}_strides[0], {values}_strides[1]}}"
    )


def _header(name: str, dtype: str, threads: int, blocks: int, file: str) -> str:
    """The text above a kernel. MLX writes the signature, so that launch bounds can only come from
    a macro of the kernel's own name, which the first line of the body takes away again."""
    element, ptx = ELEMENTS[dtype]
    bounds = f"__launch_bounds__({threads}, {blocks}) custom_kernel_{name}"
    return f"""#define custom_kernel_{name} {bounds}
using Element = {element};
#define ELEMENT "{ptx}"
#include "{HERE / "common.cuh"}"
#include "{HERE / f"{file}.cuh"}"
"""


def _tile_bytes(rows: int, dims: int) -> int:
    return rows * -(-dims // 64) * 128
