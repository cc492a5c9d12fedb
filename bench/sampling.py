"""`python -m bench.sampling`: what penalties and grammars add to a decode step.

The step of a batch without any is the baseline. The rows' grammar is a JSON schema of records
without an end, so that masks of many kinds are made, one for each row and token.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.sample_utils import greedy_sampler
from rich.console import Console

from bench.runner import Comparison, Report, compare, machine, positive, run, table
from bench.swarm_setup import Setup, prepare, supply
from mlx_swarm.broker.cache.prefix_hash import as_tokens
from mlx_swarm.broker.engine.admission import vocabulary_of
from mlx_swarm.broker.engine.decode_batch import DecodeBatch
from mlx_swarm.broker.engine.grammar import Grammars, GrammarState
from mlx_swarm.broker.engine.sampling import SeedSource, sampler_for
from mlx_swarm.broker.engine.seat import Seat, zero_states
from mlx_swarm.broker.grammar import Grammar
from mlx_swarm.broker.request import Sampling

MODEL = (
    "synthetic:llama?layers=8&hidden=512&heads=8&kv_heads=4&intermediate=1024"
    "&tokenizer=smollm2-135m"
)
RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "kind": {"enum": ["lighthouse", "harbour"]},
    },
    "required": ["name", "age", "kind"],
}
RECORDS = Grammar(json_schema={"type": "array", "items": RECORD, "minItems": 1000})
PENALTIES = Sampling(repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.1)
PROMPT = 32
WARM_STEPS = 4


class Sizes(NamedTuple):
    """Rows of a batch, and the steps that are timed."""

    rows: int
    steps: int
    repeats: int


def main(arguments: Sequence[str] | None = None) -> Report:
    """Measure as the command line asks for and print one table."""
    options = _options(arguments)
    setup = prepare(options.model, options.dtype, ram="1GiB", copies=0)
    sizes = Sizes(options.rows, options.steps, options.repeats)
    comparison = sampling(setup, sizes)
    Console().print(table(comparison))
    report = Report(
        benchmark="sampling",
        machine=machine(),
        settings={"model": options.model, "dtype": setup.loaded.dtype, **sizes._asdict()},
        comparisons=(comparison,),
    )
    if options.json:
        report.write(options.json)
    return report


def sampling(setup: Setup, sizes: Sizes) -> Comparison:
    """Milliseconds of a step, by what the rows ask for."""
    model, rows = setup.loaded, sizes.rows
    grammars = Grammars(model, vocabulary_of(model), sorted(model.tokenizer.eos_token_ids))
    prompts = supply(setup, 1).prompts(rows, 0, PROMPT)
    length = sizes.steps + 2 * WARM_STEPS

    def started(count: int) -> list[GrammarState | None]:
        return [grammars.start(RECORDS) if row < count else None for row in range(rows)]

    def samplers() -> list[Any]:
        return [
            sampler_for(PENALTIES, SeedSource(0), prompt=as_tokens(each), max_tokens=length)
            for each in prompts
        ]

    def measure(with_grammar: int = 0, *, penalised: bool = False) -> Callable[[], float]:
        def measured() -> float:
            chosen = samplers() if penalised else [greedy_sampler] * rows
            batch = _batch(setup, prompts, chosen, started(with_grammar), length)
            return _timed(batch, sizes.steps)

        return measured

    return compare(
        f"a decode step of {rows} rows",
        {
            "grammar in all rows": measure(rows),
            "grammar in one row": measure(1),
            "penalties in all rows": measure(penalised=True),
            "none": measure(),
        },
        unit="ms",
        repeats=sizes.repeats,
    )


def _batch(
    setup: Setup,
    prompts: Sequence[Sequence[int]],
    samplers: Sequence[Any],
    grammars: Sequence[GrammarState | None],
    max_tokens: int,
) -> DecodeBatch:
    batch = DecodeBatch(setup.loaded.model, setup.layout)
    for prompt, sampler, grammar in zip(prompts, samplers, grammars, strict=True):
        seat = Seat(
            (),
            [() for _ in setup.layout.leaves],
            zero_states(setup.layout),
            length=0,
            ahead=prompt[:-1],
            token=prompt[-1],
            max_tokens=max_tokens,
            sampler=sampler,
            grammar=grammar,
        )
        batch.prefill([(seat, len(prompt) - 1)])
        batch.add(seat)
    return batch


def _timed(batch: DecodeBatch, steps: int) -> float:
    """Milliseconds of a step, after some that are not counted."""
    for _ in range(WARM_STEPS):
        batch.step()
    start = time.perf_counter()
    for _ in range(steps):
        batch.step()
    milliseconds = 1e3 * (time.perf_counter() - start) / steps
    # One step is still on its way: it must not run into what is measured next.
    mx.synchronize()
    return milliseconds


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.sampling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--dtype")
    parser.add_argument("--rows", type=positive, default=32)
    parser.add_argument("--steps", type=positive, default=48)
    parser.add_argument("--repeats", type=positive, default=5)
    parser.add_argument("--json", help="write the report to this file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run(main)
