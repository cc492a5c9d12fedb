"""What the parts of `bench.swarm` find. `bars` says what a finding has to reach by DESIGN section
7, and what it came to.
"""

from collections.abc import Iterable

from msgspec import Struct

from bench.runner import Comparison, Figure

STOCK = "stock, no prefix"
STEP_BARS = {(64, 8192): 1.1, (256, 8192): 1.1, (64, 32768): 1.25}
"""Rows and shared tokens, and the most that a step may cost, in stock steps without a prefix."""
PLAIN_BARS = {(64, 8192): 2.5}
FASTER_BARS = {(64, 8192): 15.0}
"""How many times faster than mlx-lm's batch cache."""
ACCURACY_BAR, OVERHEAD_BAR, GAP_BAR, PREFIX_BAR, TAIL_BAR = 2.0, 0.97, 4.0, 1.05, 1.25
ARRIVAL_BAR, ONCE_BAR = 1.3, 1.001
"""Of two random prompts' own tokens, a first one may be the same."""


class Bar(Struct, frozen=True):
    """A figure and its limit: the most it may be, or the least where `least`."""

    what: str
    value: float
    limit: float
    least: bool = False

    @property
    def met(self) -> bool:
        return self.value >= self.limit if self.least else self.value <= self.limit

    def __str__(self) -> str:
        sign = "at least" if self.least else "at most"
        verdict = "met" if self.met else "MISSED"
        return f"{self.what}: {self.value:.3f} ({sign} {self.limit:g}): {verdict}"


class Memory(Struct, frozen=True, kw_only=True):
    """Bytes above those before the requests came: at the peak, and when all rows decoded.

    Of the latter, `extents` are what the prompt cache took in, `tails` the slabs, of which tokens
    fill `used_tails`, `workspace` what the ledger knows of, and `transients` all the rest: what a
    step in flight takes, and layouts that were not yet given back.
    """

    peak: int
    running: int
    extents: int = 0
    tails: int = 0
    used_tails: int = 0
    workspace: int = 0
    ledger: dict[str, int] = {}

    @property
    def transients(self) -> int:
        return max(0, self.running - self.extents - self.tails - self.workspace)


class Shares(Struct, frozen=True, kw_only=True):
    """Seconds until the last first token: in prefill chunks, in decode steps, and all the rest
    (admission, storing, joining, text).
    """

    chunks: int
    prefill: float
    steps: int
    decode: float
    rest: float


class Accuracy(Struct, frozen=True, kw_only=True, tag=True):
    """The worst row's error against float32 attention, by standard deviation of the logits."""

    served: str
    deviations: tuple[float, ...]
    ours: tuple[float, ...]
    stock: tuple[float, ...]
    floor: float

    def bars(self) -> Iterable[Bar]:
        for deviation, ours, stock in zip(self.deviations, self.ours, self.stock, strict=True):
            value = ours / max(stock, self.floor)
            counted = "" if stock >= self.floor else f", counted as {self.floor:g}"
            what = f"error over stock attention's{counted}, deviation {deviation:g}"
            yield Bar(what, value, ACCURACY_BAR)


class Steps(Struct, frozen=True, kw_only=True, tag=True):
    """Milliseconds of a decode step of `rows` rows, by contender, `STOCK` among them."""

    rows: int
    tail: int
    prefixes: tuple[int, ...]
    comparison: Comparison

    def figure(self, way: str, shared: int) -> Figure | None:
        """What a way of attending took over so many shared tokens."""
        return find_figure(self.comparison, step_name(way, shared))

    def ratio(self, way: str, shared: int) -> float | None:
        """The same over the stock step."""
        found, stock = self.figure(way, shared), find_figure(self.comparison, STOCK)
        return found.median / stock.median if found and stock else None

    def bars(self) -> Iterable[Bar]:
        for shared in self.prefixes:
            cell, name = (self.rows, shared), f"step, {self.rows} rows x {shared:,}"
            for way, limits in (("shared", STEP_BARS), ("plain", PLAIN_BARS)):
                ratio = self.ratio(way, shared)
                if ratio is not None and cell in limits:
                    yield Bar(f"{name}, {way}, over stock", ratio, limits[cell])
            ours, theirs = self.figure("shared", shared), self.figure("mlx-lm", shared)
            if ours and theirs and cell in FASTER_BARS:
                faster = theirs.median / ours.median
                yield Bar(f"{name}, times faster than mlx-lm", faster, FASTER_BARS[cell], True)


class Arrival(Struct, frozen=True, kw_only=True, tag=True):
    """N agents at once. Seconds from their arrival; `bar_seconds` is what is to be computed of
    prefix and suffixes at the measured prefill rate.
    """

    system: str
    variant: str
    agents: int
    shared: int
    own: int
    generated: int
    first: float
    median: float
    last: float
    total: float
    decode_rate: float
    computed: int
    distinct: int
    prefill_rate: float
    bar_seconds: float
    memory: Memory
    shares: Shares | None = None

    @property
    def rate(self) -> float:
        """Output tokens a second of all."""
        return self.agents * self.generated / self.total

    def bars(self) -> Iterable[Bar]:
        if self.system == "mlx-swarm" and self.variant == "cold":
            name = f"arrival, {self.agents} x {self.shared:,}"
            yield Bar(
                f"{name}, last first token over its computing",
                self.last / self.bar_seconds,
                ARRIVAL_BAR,
            )
            computed = self.computed / self.distinct
            yield Bar(f"{name}, prompt tokens computed over distinct", computed, ONCE_BAR)


class Spread(Struct, frozen=True):
    """Percentiles, in seconds."""

    p50: float
    p95: float
    p99: float
    worst: float


class Load(Struct, frozen=True, kw_only=True, tag=True):
    """Agents that come one after the other; tokens of all prompts, distinct and computed ones.

    `peak_bytes` are above those before the agents came.
    """

    system: str
    agents: int
    sets: int
    arrivals_a_second: float
    first_tokens: Spread
    gaps: Spread
    total: float
    generated: int
    prompt_tokens: int
    distinct: int
    computed: int
    peak_bytes: int

    def bars(self) -> Iterable[Bar]:
        return ()


class Overhead(Struct, frozen=True, kw_only=True, tag=True):
    """Tokens a second of all rows, while all decode: `broker` and `bare loop`."""

    rows: int
    shared: int
    own: int
    generated: int
    comparison: Comparison

    def bars(self) -> Iterable[Bar]:
        ratio = self.comparison.ratios[0].value
        yield Bar(f"throughput over a bare loop, {self.rows} rows", ratio, OVERHEAD_BAR, True)


class Gap(Struct, frozen=True, kw_only=True, tag=True):
    """Milliseconds between tokens of running agents: the median step with nothing else there, and
    the longest gap while a prompt prefilled, of each repeat; `prefill_seconds` to its first token.
    """

    agents: int
    prompt: int
    steps: tuple[float, ...]
    gaps: tuple[float, ...]
    prefill_seconds: tuple[float, ...]

    def bars(self) -> Iterable[Bar]:
        worst = max(gap / step for gap, step in zip(self.gaps, self.steps, strict=True))
        yield Bar(f"longest gap while {self.prompt:,} tokens prefill, in steps", worst, GAP_BAR)


class Clones(Struct, frozen=True, kw_only=True, tag=True):
    """KV bytes of N running clones; `prefix_copy` and `own_copy` are exact sizes of one copy of the
    prefix and of all prompts' own tokens; `at_rest` is what the cache holds of the prefix before
    they come.
    """

    agents: int
    shared: int
    own: int
    prefix_copy: int
    own_copy: int
    at_rest: int
    memory: Memory

    @property
    def prefix(self) -> int:
        """What extents hold while all run, without the prompts' own tokens."""
        return self.at_rest + max(0, self.memory.extents - self.own_copy)

    def bars(self) -> Iterable[Bar]:
        name = f"{self.agents} clones"
        yield Bar(
            f"{name}, prefix at rest over one copy", self.prefix / self.prefix_copy, PREFIX_BAR
        )
        tails = self.memory.tails / max(1, self.memory.used_tails)
        yield Bar(f"{name}, tails over their tokens", tails, TAIL_BAR)
        workspace = self.memory.workspace / self.prefix_copy
        yield Bar(f"{name}, workspace over the active prefixes", workspace, 1.0)


class Sharing(Struct, frozen=True, kw_only=True, tag=True):
    """Milliseconds of a step of rows in equal groups, each with a span of its own: `shared`, and
    `copied` into the rows' tails.
    """

    rows: int
    groups: int
    span: int
    comparison: Comparison

    def bars(self) -> Iterable[Bar]:
        return ()


Found = Accuracy | Steps | Arrival | Load | Overhead | Gap | Clones | Sharing


def step_name(way: str, shared: int) -> str:
    """The name of a contender of `Steps`."""
    return f"{way}, {shared:,} shared"


def find_figure(comparison: Comparison, contender: str) -> Figure | None:
    """A contender's figure."""
    return next((f for f in comparison.figures if f.contender == contender), None)
