"""Many conversations whose working sets exceed memory: who is let in, against everybody at once.

All come at the same moment and ask their next question once they have thought about the reply. The
same conversations, with the same pauses, run under every policy: everybody at once (the turns in
the order of fairness, which among equals is round-robin), sessions by working set, and the same
where the broker is told how long each pause will be and which turn is the last.
"""

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import anyio
from anyio.from_thread import start_blocking_portal

from bench.load_findings import Policy, Sessions
from bench.runner import compare
from bench.swarm_clients import LoadedBroker, spread
from bench.swarm_setup import Setup, Tokens, distinct_tokens, settle, supply
from mlx_swarm.broker.broker import Broker
from mlx_swarm.broker.engine.loop import EngineLoop
from mlx_swarm.broker.engine.thread import EngineThread
from mlx_swarm.broker.request import Request, Usage

EVERYBODY = "everybody at once"
ADMITTED = "by working set"
HINTED = "by working set, with hints"
POLICIES = (HINTED, ADMITTED, EVERYBODY)


class SessionSizes(NamedTuple):
    """Sessions and turns of each, tokens that all share, that every question adds and that every
    reply has, the rows of a batch, the pause before a question on average, in seconds, and how many
    times memory the working sets are.
    """

    sessions: int
    turns: int
    shared: int
    own: int
    reply: int
    rows: int
    think: float
    over: float = 3.0
    repeats: int = 3
    seed: int = 1


class _Conversation(NamedTuple):
    """What one session asks, and how long it thinks before each further question."""

    opening: Tokens
    questions: list[Tokens]
    pauses: list[float]


class _Outcome(NamedTuple):
    """Of one run: seconds, each session's turns in seconds, and the engine's statistics."""

    seconds: float
    turns: list[list[float]]
    usage: Usage
    replaced: int
    spoken: list[Tokens]


class _Unbounded(LoadedBroker):
    """A broker that lets every session in."""

    def _open(self, thread: EngineThread[EngineLoop]) -> EngineLoop:
        engine = super()._open(thread)
        engine.sessions.policy.budget = math.inf
        return engine


def sessions(setup: Setup, sizes: SessionSizes) -> Iterator[Sessions]:
    """All policies in turns, each in a broker of its own."""
    small = sizes._replace(sessions=2, turns=2)
    _run(setup, small, EVERYBODY)  # compiles, and allocates
    outcomes: dict[str, list[_Outcome]] = {name: [] for name in POLICIES}

    def contender(name: str) -> float:
        outcomes[name].append(_run(setup, sizes, name))
        return outcomes[name][-1].seconds

    comparison = compare(
        f"{sizes.sessions} sessions, {sizes.over:g} x RAM",
        {name: lambda name=name: contender(name) for name in POLICIES},  # type: ignore[misc]
        warmup=0,
        repeats=sizes.repeats,
    )
    yield Sessions(
        sessions=sizes.sessions,
        turns=sizes.turns,
        over=sizes.over,
        rows=sizes.rows,
        distinct=distinct_tokens(outcomes[EVERYBODY][0].spoken),
        comparison=comparison,
        policies=tuple(_policy(name, outcomes[name]) for name in POLICIES),
    )


def ram_bytes(setup: Setup, sizes: SessionSizes) -> int:
    """What the cache gets: all conversations at their ends, over `over`."""
    own = sizes.sessions * sizes.turns * (sizes.own + sizes.reply)
    return int(setup.kv_bytes(sizes.shared + own) / sizes.over)


def _run(setup: Setup, sizes: SessionSizes, policy: str) -> _Outcome:
    settle()
    kind = _Unbounded if policy == EVERYBODY else LoadedBroker
    broker = kind(setup.loaded.name, ram=ram_bytes(setup, sizes), max_rows=sizes.rows)
    broker.given = setup.loaded
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(broker):
        return portal.call(_converse, broker, _conversations(setup, sizes), sizes, policy == HINTED)


def _conversations(setup: Setup, sizes: SessionSizes) -> list[_Conversation]:
    tokens = supply(setup, sizes.seed)
    shared = tokens.take(sizes.shared)
    return [
        _Conversation(
            [*shared, *tokens.take(sizes.own)],
            [tokens.take(sizes.own) for _ in range(sizes.turns - 1)],
            tokens.random.exponential(sizes.think, sizes.turns - 1).tolist(),
        )
        for _ in range(sizes.sessions)
    ]


async def _converse(
    broker: Broker, conversations: Sequence[_Conversation], sizes: SessionSizes, hints: bool
) -> _Outcome:
    turns: list[list[float]] = [[] for _ in conversations]
    spoken: list[Tokens] = [[] for _ in conversations]

    async def session(number: int, plan: _Conversation) -> None:
        prompt = list(plan.opening)
        for question, pause in zip([*plan.questions, None], [*plan.pauses, math.inf], strict=True):
            asked = time.perf_counter()
            request = Request(
                tokens=prompt,
                max_tokens=sizes.reply,
                agent=f"agent-{number}",
                next_use=pause if hints else None,
            )
            prompt += (await broker.complete(request)).tokens
            turns[number].append(time.perf_counter() - asked)
            if question is not None:
                await anyio.sleep(pause)
                prompt += question
        spoken[number] = prompt[: -sizes.reply]

    start = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for number, plan in enumerate(conversations):
            tasks.start_soon(session, number, plan)
    seconds = time.perf_counter() - start
    engine = (await broker.statistics()).engine
    return _Outcome(seconds, turns, engine.usage, engine.sessions.replaced, spoken)


def _policy(name: str, outcomes: Sequence[_Outcome]) -> Policy:
    ordered = sorted(outcomes, key=lambda each: each.seconds)
    outcome = ordered[(len(ordered) - 1) // 2]
    means = [statistics.mean(turns) for turns in outcome.turns]
    return Policy(
        name=name,
        seconds=outcome.seconds,
        prefilled=outcome.usage.prefilled_tokens,
        ram=outcome.usage.ram_tokens,
        turns=spread([seconds for turns in outcome.turns for seconds in turns]),
        fairness=sum(means) ** 2 / (len(means) * sum(mean**2 for mean in means)),
        replaced=outcome.replaced,
    )
