"""Shared-prefix decode attention: is it accurate enough, and what does a step cost with it?

    python -m bench.attention [shapes] [accuracy] [layer] [step] [--json FILE]

`shapes` holds the kernels (or plain operations, where no kernel serves) against float32 attention
on odd shapes; `accuracy` prints the gate: the worst row's error against float32 attention, at most
twice that of stock attention in the same dtype; `layer` times one layer's attention, `step` whole
decode steps of a model with random weights against the stock step without any prefix and against
mlx-lm's batch cache.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx

from bench import decode_model
from bench.attention_cases import Case, Layer, attend, error_floor, errors, make
from bench.runner import compare, machine
from mlx_swarm.broker.engine.kernels import launch
from mlx_swarm.broker.engine.kernels.source import SpanVariant
from mlx_swarm.broker.engine.shared_attention import Geometry, Group, implementation, warm_up

DEVIATIONS = (1, 4, 8, 16)
BARS = {(64, 8192): 1.1, (256, 8192): 1.1, (64, 32768): 1.25}
ON_GPU = launch.gpu() is not None


def shapes() -> Iterator[dict[str, Any]]:
    """Odd shapes, several and nested groups, windows, sinks, empty tails, one long tail."""
    ragged = [3, 0, 17, 64, 200, 1, 129, 40, 33, 2500 if ON_GPU else 250]
    groups = [Group(range(9), 700), Group((0, 2, 5), 333, 700), Group((3, 4), 64, 700)]
    many = [
        Group(range(100), 1000),
        *[Group(range(20 * i, 20 * i + 20), 150, 1000) for i in range(5)],
    ]
    sizes = [(32, 8, 128), (32, 8, 64), (28, 4, 128), (8, 1, 256), (12, 4, 80), (71, 1, 64)]
    sizes = [*sizes, (10, 2, 192), (16, 16, 96), (64, 4, 128)] if ON_GPU else sizes[:2]
    cases = []
    for number, size in enumerate(sizes):
        dtype = ("bfloat16", "float16")[number % 2]
        cases.append(Case(Geometry(*size, dtype), groups, ragged))
        if number < 2:
            cases.append(Case(Geometry(*size, dtype), groups, ragged, window=500, sinks=True))
            cases.append(Case(Geometry(*size, dtype), many, [(7 * n) % 90 for n in range(100)]))
    llama = Geometry(32, 8, 128, "bfloat16")
    cases.append(Case(llama, [], [max(1, n) for n in ragged]))
    cases.append(Case(llama, [Group(range(70), 513)], [n % 30 for n in range(70)], sinks=True))
    cases.append(Case(Geometry(8, 2, 64, "float32"), groups, ragged, window=500, sinks=True))
    for case in cases:
        layer = make(case)
        served = implementation(case.geometry, len(case.groups))
        rows = sorted({*range(0, len(case.lengths), max(1, len(case.lengths) // 10))})
        ours, stock = errors(layer, attend(layer, served.name), rows)
        gate = 2 * max(stock, 1e-3 if case.geometry.dtype == "bfloat16" else 1.5e-4)
        if case.geometry.dtype == "float32":
            gate = 2e-3
        again = attend(layer, served.name)
        same = all(mx.array_equal(attend(layer, served.name), again).item() for _ in range(5))
        yield {
            "geometry": list(case.geometry),
            "groups": len(case.groups),
            "window": case.window,
            "sinks": case.sinks,
            "served": served.name,
            "reason": served.reason,
            "error": ours,
            "stock": stock,
            "ok": ours <= gate and same,
        }


def accuracy() -> Iterator[dict[str, Any]]:
    """The gate, for every implementation and every variant of the kernel."""
    scale = 1 if ON_GPU else 8
    lengths = [130, 5, 77, 200, 1, 64, 150, 128]
    groups = [Group(range(7), 8192 // scale), Group((0, 1, 2), 1024 // scale, 8192 // scale)]
    for dtype in ("bfloat16", "float16") if ON_GPU else ("float32",):
        geometry = Geometry(32, 8, 128, dtype)
        for deviation in DEVIATIONS:
            layer = make(Case(geometry, groups, lengths, deviation=float(deviation)))
            row: dict[str, Any] = {"dtype": dtype, "deviation": deviation}
            for name in _implementations(geometry):
                ours, stock = errors(layer, attend(layer, name), list(range(8)))
                layer.plan.made.clear()
                row |= {name: ours, "stock": stock}
            worst = max(value for key, value in row.items() if key not in ("dtype", "deviation"))
            yield row | {"ok": worst <= 2 * max(row["stock"], error_floor(dtype))}


def _implementations(geometry: Geometry) -> Iterator[str]:
    """Names for `attend`; a kernel variant is forced while its name is out."""
    if geometry.dtype != "float16":  # it is never chosen there: its log-sum-exp is too coarse
        yield "fused"
    yield "scores"
    if implementation(geometry).name != "kernel":
        return
    usual = launch.span_variant
    for kind, warps, keys, stages, blocks in (
        ("wgmma", 4, 128, 3, 1),
        ("wgmma", 8, 128, 3, 1),
        ("mma", 4, 64, 2, 3),
    ):
        forced = SpanVariant(kind, 128, warps, keys, stages, blocks)
        launch.span_variant = lambda *_, forced=forced: forced
        yield f"{kind} {warps}"
    launch.span_variant = usual


def layer() -> Iterator[dict[str, Any]]:
    """Microseconds of one layer's attention in a chain of them, by implementation."""
    geometry = Geometry(32, 8, 128, "bfloat16" if ON_GPU else "float32")
    scale = 1 if ON_GPU else 32
    counts = ((8, 8192), (64, 8192), (256, 8192), (64, 32768)) if ON_GPU else ((8, 8192),)
    for rows, tokens in counts:
        lengths = decode_model.tail_lengths(rows)
        case = Case(geometry, [Group(range(rows), tokens // scale)], lengths)
        parts = [
            Group(range(i * rows // 4, (i + 1) * rows // 4), tokens // scale) for i in range(4)
        ]
        found: dict[str, Any] = {"rows": rows, "tokens": tokens // scale}
        for name in _implementations(geometry):
            if ON_GPU or name == "scores":
                found[name] = _chain(make(case), name)
        if ON_GPU:
            found["no spans"] = _chain(make(Case(geometry, [], lengths)), "kernel")
            found["4 groups, each its own span"] = _chain(
                make(Case(geometry, parts, lengths)), "kernel"
            )
        yield found


def _chain(made: Layer, name: str, length: int = 24) -> float:
    def run() -> None:
        layer = made
        for _ in range(length):
            out = attend(layer, name)
            layer = layer._replace(queries=layer.queries + out * 1e-3)
        mx.eval(out)

    run()
    taken = []
    for _ in range(5):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return round(min(taken) / length * 1e6, 1)


def step(full: bool = True) -> Iterator[dict[str, Any]]:
    """Whole decode steps; every row of the table is one run of all its contenders in turns."""
    shape = decode_model.LLAMA_8B if ON_GPU else decode_model.SMALL
    model = decode_model.build(shape)
    served = implementation(Geometry(shape.heads, shape.kv_heads, shape.head_size, _dtype(shape)))
    best = served.name
    prefixes: tuple[int, ...] = (0, 2048, 8192, 32768) if ON_GPU else (0, 256, 1024)
    counts: tuple[int, ...] = (1, 8, 32, 64, 128, 256) if ON_GPU else (1, 4, 16)
    for tokens in prefixes:
        spans = decode_model.random_spans(shape, tokens) if tokens else None
        for rows in counts:
            if not full and (rows, tokens) not in BARS:
                continue
            contenders = {
                "stock": decode_model.stock_step(model, shape, rows),
                best: decode_model.shared_step(model, shape, rows, spans, best),
            }
            if ON_GPU and (rows, tokens) in BARS:
                for name in ("fused", "scores")[: 2 if rows * tokens == 64 * 8192 else 1]:
                    contenders[name] = decode_model.shared_step(model, shape, rows, spans, name)
            size = rows * (tokens + 192) * shape.kv_heads * shape.head_size * 4 * shape.layers
            if tokens and (not ON_GPU or (size < 75e9 and rows in (1, 8, 64))):
                contenders["mlx-lm"] = decode_model.replicated_step(model, shape, rows, tokens)
            found: dict[str, Any] = {"rows": rows, "tokens": tokens, "served": best}
            for way in decode_model.Steps._fields:
                result = compare(
                    f"{rows} rows, {tokens} shared tokens, {way}",
                    {name: getattr(steps, way) for name, steps in contenders.items()},
                    unit="ms",
                    baseline="stock",
                    repeats=4,
                )
                found[way] = {f.contender: round(f.median, 2) for f in result.figures}
                found[f"{way}, ratio"] = {r.contender: round(r.value, 3) for r in result.ratios}
            if ON_GPU and (rows, tokens) in BARS:
                found["ok"] = found["each, ratio"][best] <= BARS[rows, tokens]
            yield found
            del contenders
            gc.collect()
            mx.clear_cache()


def _dtype(shape: decode_model.Shape) -> str:
    return str(shape.dtype).rpartition(".")[2]


SECTIONS: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
    "shapes": shapes,
    "accuracy": accuracy,
    "layer": layer,
    "bars": lambda: step(full=False),
    "step": step,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("sections", nargs="*", choices=list(SECTIONS), default=["accuracy", "step"])
    parser.add_argument("--json", help="write everything to this file")
    chosen = parser.parse_args()
    print(machine())
    start = time.perf_counter()
    llama = Geometry(32, 8, 128, "bfloat16")
    print(f"{llama}: {warm_up(llama)}, after {time.perf_counter() - start:.1f} s")
    results: dict[str, list[dict[str, Any]]] = {}
    for name in chosen.sections:
        print(f"\n{name}")
        for found in SECTIONS[name]():
            results.setdefault(name, []).append(found)
            print(f"[{time.perf_counter() - start:6.1f} s]", _line(found), flush=True)
            if chosen.json:
                with open(chosen.json, "w") as file:
                    json.dump({"machine": str(machine()), **results}, file, indent=1)
    return 0 if all(row.get("ok", True) for rows in results.values() for row in rows) else 1


def _line(found: dict[str, Any]) -> str:
    return ", ".join(
        f"{key} {value:.5f}" if isinstance(value, float) and value < 1 else f"{key} {value}"
        for key, value in found.items()
        if value != ""
    )


if __name__ == "__main__":
    sys.exit(main())
