"""Agents with conversations of several turns and time to think, over the engine without MLX."""

import math
from typing import NamedTuple

from mlx_swarm.broker.engine.fairness import Party
from mlx_swarm.broker.engine.work import Admit
from mlx_swarm.broker.request import RequestId
from tests.engine.scheduling import FakeEngine


class Plan(NamedTuple):
    """One agent: when it comes, the tokens that it adds in each turn, what it waits before the next
    one, and whether it says so. The last turn of one that vanishes is not said to be the last.
    """

    at: float = 0.0
    turns: tuple[int, ...] = (10, 10)
    think: float = 1.0
    hints: bool = False
    vanishes: bool = False
    priority: int = 0
    output: int = 2


class Conversations:
    """Lets every agent ask its turns, each when it has the reply before and has thought."""

    def __init__(self, engine: FakeEngine, plans: list[Plan], shared: int = 0) -> None:
        self.engine = engine
        self.plans = plans
        self.asked: dict[RequestId, float] = {}
        self.waited: dict[RequestId, float] = {}
        self._prompts = [[7] * shared for _ in plans]
        self._next = [0] * len(plans)
        self._due = {number: plan.at for number, plan in enumerate(plans)}
        self._open: dict[RequestId, int] = {}

    def run(self) -> None:
        """Until every turn of every agent is over."""
        while self._due or self._open:
            self.turn()

    def turn(self) -> None:
        """Ask what is due, and one piece of work, or on to when there is some."""
        engine = self.engine
        for number in [each for each, at in self._due.items() if at <= engine.now]:
            self._ask(number)
        work = engine.turn()
        if isinstance(work, Admit):
            self.waited[work.request] = engine.now - self.asked[work.request]
        for request in [each for each in self._open if each not in engine.prompts]:
            self._answered(request)
        if work is None and (self._due or self._open):
            soonest = min([*self._due.values(), engine.sessions.next_change()])
            assert soonest < math.inf, "nothing will ever happen"
            engine.now = max(engine.now, soonest)

    def _ask(self, number: int) -> None:
        plan, turn = self.plans[number], self._next[number]
        del self._due[number]
        prompt = self._prompts[number]
        prompt += [1000 * (number + 1) + turn] * plan.turns[turn]
        is_last = turn + 1 == len(plan.turns)
        hint = math.inf if is_last and not plan.vanishes else plan.think if plan.hints else None
        request = self.engine.submit(
            f"{number}/{turn}",
            prompt,
            party=Party("", "swarm", f"agent-{number}"),
            output=plan.output,
            priority=plan.priority,
            hint=hint,
        )
        self._open[request] = number
        self.asked[request] = self.engine.now

    def _answered(self, request: RequestId) -> None:
        number = self._open.pop(request)
        self._next[number] += 1
        if self._next[number] < len(self.plans[number].turns):
            self._due[number] = self.engine.now + self.plans[number].think
