"""What a simulated run came to: tiers, times, fairness, and the tiers' sizes while it went on."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from msgspec import Struct

from bench.runner import Machine
from bench.simulate_check import Checked
from bench.simulate_costs import Costs
from bench.simulate_run import Outcome, Sample
from bench.simulate_workload import Session
from mlx_swarm.broker.cache.ledger import format_bytes

PERCENTILES = (50, 90, 99)


class Times(Struct, frozen=True, kw_only=True):
    """Percentiles of some seconds, and the worst."""

    p50: float
    p90: float
    p99: float
    worst: float

    def __str__(self) -> str:
        return " / ".join(f"{each:.4g}" for each in (self.p50, self.p90, self.p99, self.worst))


class Fairness(Struct, frozen=True, kw_only=True):
    """How evenly parties were served: tokens computed for each, prompt and answer, for a second in
    which it had a request open. `jain` is Jain's index, 1 where all got the same.
    """

    parties: int
    least: float
    most: float
    jain: float


class Simulated(Struct, frozen=True, kw_only=True, tag=True):
    """One run. Sizes are in bytes, times in seconds; `seconds` were simulated. A prompt token is
    one of `ram`, `cold` and `prefilled` tokens; those of failed turns count as far as they came.
    `preemptions` took rows, after which `recomputed_tokens` were computed once more; `deferred`
    turns had to wait until there was room for their sessions, `displaced` sessions lost their
    place.
    """

    workload: str
    sessions: int
    turns: int
    failed: dict[str, int]
    seconds: float
    ram_tokens: int
    cold_tokens: int
    prefilled_tokens: int
    output_tokens: int
    recomputed_tokens: int
    preemptions: int
    deferred: int
    displaced: int
    first_tokens: Times | None
    gaps: Times | None
    latency: Times | None
    fairness: dict[str, Fairness]
    engine_turns: dict[str, int]
    counts: dict[str, int]
    peak_ram: int
    peak_cold: int
    peak_ledger: int
    bytes_read: int
    bytes_written: int
    samples: list[Sample]

    @property
    def prompt_tokens(self) -> int:
        """All prompt tokens that were reached."""
        return self.ram_tokens + self.cold_tokens + self.prefilled_tokens


class Record(Struct, frozen=True, kw_only=True):
    """A finding, its conditions, and how long it took here."""

    date: str
    machine: Machine
    costs: Costs
    took: float
    found: Simulated | Checked


def simulated(workload: str, outcome: Outcome, costs: Costs) -> Simulated:
    """The figures of a run."""
    turns, engine, unit = outcome.turns, outcome.engine, costs.bytes_per_token
    failed = [turn.error for turn in turns if turn.error]
    total = engine.cache.statistics().total
    cold = engine.store.statistics() if engine.store is not None else None
    first = [turn.first - turn.asked for turn in turns if turn.first is not None]
    latency = [turn.ended - turn.asked for turn in turns if not turn.error]
    return Simulated(
        workload=workload,
        sessions=len(outcome.sessions),
        turns=len(turns),
        failed={name: failed.count(name) for name in sorted(set(failed))},
        seconds=outcome.seconds,
        ram_tokens=sum(turn.ram for turn in turns),
        cold_tokens=sum(turn.cold for turn in turns),
        prefilled_tokens=sum(turn.computed for turn in turns),
        output_tokens=sum(turn.output for turn in turns),
        recomputed_tokens=engine.usage.recomputed_tokens,
        preemptions=engine.scheduler.statistics().preempted,
        deferred=engine.recorder.counts["Deferred"],
        displaced=engine.sessions.statistics().replaced,
        first_tokens=times(first),
        gaps=times([gap for gap, _ in outcome.gaps], [rows for _, rows in outcome.gaps]),
        latency=times(latency),
        fairness=fairness(outcome),
        engine_turns=dict(sorted(engine.turns.items())),
        counts={
            name: getattr(total, name)
            for name in (
                "hits",
                "misses",
                "evictions",
                "demotions",
                "restores",
                "restores_refused",
                "spills",
            )
        },
        peak_ram=unit * max((each.ram for each in outcome.samples), default=0),
        peak_cold=unit * (engine.store.peak_tokens if engine.store is not None else 0),
        peak_ledger=unit * engine.ledger.statistics().peak,
        bytes_read=unit * (cold.restored_bytes if cold is not None else 0),
        bytes_written=unit * (cold.written_bytes if cold is not None else 0),
        samples=[
            each._replace(ram=unit * each.ram, cold=unit * each.cold) for each in outcome.samples
        ],
    )


def times(seconds: Sequence[float], weights: Sequence[int] | None = None) -> Times | None:
    """Percentiles of ascending seconds, or of any without `weights`; None of none."""
    if not seconds:
        return None
    values = np.sort(np.array(seconds))
    ends = np.cumsum(weights if weights is not None else np.ones(len(values)))
    at = [int(np.searchsorted(ends, each / 100 * ends[-1])) for each in PERCENTILES]
    p50, p90, p99 = (float(values[min(each, len(values) - 1)]) for each in at)
    return Times(p50=p50, p90=p90, p99=p99, worst=float(values[-1]))


def fairness(outcome: Outcome) -> dict[str, Fairness]:
    """By agent and by tenant."""
    names: dict[str, Callable[[Session], str]] = {
        "agents": lambda session: session.name,
        "tenants": lambda session: session.tenant,
    }
    found = {}
    for level, name in names.items():
        service: dict[str, float] = {}
        waited: dict[str, float] = {}
        for turn in outcome.turns:
            party = name(outcome.sessions[turn.session])
            service[party] = service.get(party, 0.0) + turn.computed + turn.output
            waited[party] = waited.get(party, 0.0) + turn.ended - turn.asked
        rates = np.array([service[each] / waited[each] for each in service if waited[each]])
        if len(rates):
            found[level] = Fairness(
                parties=len(rates),
                least=float(rates.min()),
                most=float(rates.max()),
                jain=float(rates.sum() ** 2 / (len(rates) * (rates**2).sum() or 1.0)),
            )
    return found


def lines(found: Simulated | Checked) -> Iterable[tuple[str, str]]:
    """What to show of a finding: names and values."""
    return _checked(found) if isinstance(found, Checked) else _simulated(found)


def _simulated(found: Simulated) -> Iterator[tuple[str, str]]:
    total = max(found.prompt_tokens, 1)
    failed = ", ".join(f"{count:,} {name}" for name, count in found.failed.items()) or "none"
    yield "sessions, turns, failed", f"{found.sessions:,}, {found.turns:,}, {failed}"
    yield "simulated", f"{found.seconds:,.1f} s"
    for name in ("ram", "cold", "prefilled"):
        tokens = getattr(found, f"{name}_tokens")
        yield f"prompt tokens, {name}", f"{tokens:,} ({tokens / total:.1%})"
    yield "answered tokens", f"{found.output_tokens:,}"
    yield "preemptions, recomputed tokens", f"{found.preemptions:,}, {found.recomputed_tokens:,}"
    yield "turns deferred, sessions displaced", f"{found.deferred:,}, {found.displaced:,}"
    for name, seconds in (
        ("first token", found.first_tokens),
        ("between tokens", found.gaps),
        ("whole turn", found.latency),
    ):
        if seconds is not None:
            yield f"{name}, s (p50 / p90 / p99 / worst)", str(seconds)
    for level, each in found.fairness.items():
        spread = each.most / each.least if each.least else float("inf")
        yield (
            f"{each.parties:,} {level}, tokens/s served",
            f"{each.least:.3g} to {each.most:.3g} (x {spread:.3g}), Jain {each.jain:.3f}",
        )
    sizes = (found.peak_ram, found.peak_cold, found.peak_ledger)
    yield "peak of RAM tier, cold tier, ledger", ", ".join(map(format_bytes, sizes))
    moved = (found.bytes_written, found.bytes_read)
    yield "written to, read from the cold tier", ", ".join(map(format_bytes, moved))
    yield "cache", ", ".join(f"{name} {count:,}" for name, count in found.counts.items())
    yield "work", ", ".join(f"{name} {count:,}" for name, count in found.engine_turns.items())


def _checked(found: Checked) -> Iterator[tuple[str, str]]:
    real, ours = found.real, found.simulated
    for name in ("prompt", "ram", "cold", "prefilled", "recomputed"):
        a, b = getattr(real, name), getattr(ours, name)
        yield f"tokens, {name}", f"real {a:,}, simulated {b:,}{_off(a, b)}"
    yield "sessions displaced", f"real {real.displaced:,}, simulated {ours.displaced:,}"
    for name in ("ttft_p50", "ttft_p99", "seconds"):
        a, b = getattr(real, name), getattr(ours, name)
        yield name, f"real {a:.3g} s, simulated {b:.3g} s (x {b / a:.2f})"


def _off(real: int, ours: int) -> str:
    return f" ({ours / real - 1:+.1%})" if real else ""
