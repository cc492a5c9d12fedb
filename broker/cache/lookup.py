"""Looking a prompt up without touching anything: RAM, the cold tier's index, the reason."""

from typing import NamedTuple

from .cold import ColdMatch
from .plan import Plan
from .prefix_hash import Tokens
from .reasons import Forgotten, explain
from .restores import Restores
from .space import Match, Space

CHECKPOINT_EVERY = 2048
"""Tokens between the checkpoints of a long prefill."""


class Look(NamedTuple):
    """What was found: the match in RAM, the plan, and what the plan would restore."""

    match: Match
    plan: Plan
    cold: ColdMatch | None


class Lookup:
    """Plans prompts over the namespaces of a cache."""

    def __init__(
        self,
        spaces: dict[str, Space],
        forgotten: Forgotten,
        restores: Restores | None,
        max_bytes: int,
    ) -> None:
        self._spaces = spaces
        self._forgotten = forgotten
        self._restores = restores
        self._max_bytes = max_bytes

    def look(
        self,
        wanted: Tokens,
        space: Space,
        restored: int | None = None,
        alternatives: int | None = None,
    ) -> Look:
        """The plan of a prompt, whose log-probabilities are needed too if `alternatives` is given.

        Once so many tokens were `restored` for it, the cold tier is not asked again.
        """
        limit = len(wanted) - 1
        match = space.match(wanted, limit, alternatives)
        reason, divergence = explain(wanted, match, space, self._spaces, self._forgotten)
        cold = None if restored is not None else self._candidate(wanted, space, match.length)
        if cold is not None and alternatives is not None:
            # They are not stored there, so all that it has would be computed again.
            cold, reason = None, "no_logprobs"
        gained = cold.length - match.length if cold is not None else 0
        if restored is not None and match.length < min(restored, limit):
            reason = "restore_failed"
        elif cold is not None and self._restores is not None:
            if not self._restores.gate.opens_for(cold.bytes, gained, space.name):
                cold, gained, reason = None, 0, "cost_gate"
            elif cold.length == limit:
                reason = None
        plan = Plan(
            prompt_tokens=len(wanted),
            ram_tokens=match.length,
            cold_tokens=gained,
            donor=_donor(space, match),
            reason=reason,
            divergence=divergence if reason is not None else None,
        )
        return Look(match, plan, cold)

    def _candidate(self, wanted: Tokens, space: Space, ram_tokens: int) -> ColdMatch | None:
        """What the cold tier has, if it is strictly longer than RAM and RAM can hold it."""
        if self._restores is None or len(wanted) - 1 <= ram_tokens:
            return None
        found = self._restores.find(wanted[:-1], space.name, ram_tokens)
        if found is None or found.bytes > self._max_bytes:
            return None
        return found if ram_tokens < found.length < len(wanted) else None


def put_points(wanted: Tokens, space: Space, boundaries: set[int]) -> tuple[int, ...]:
    """Where a prefill should pause and put; see `PromptCache.put_points`."""
    match = space.match(wanted, len(wanted) - 1)
    points = set(boundaries)
    layout = space.layout
    if layout is None or layout.has_state or layout.has_windows:
        points.add(match.walk.length)
        points.update(range(CHECKPOINT_EVERY, len(wanted), CHECKPOINT_EVERY))
    return tuple(sorted(at for at in points if match.length < at < len(wanted)))


def _donor(space: Space, match: Match) -> str | None:
    if not match.length:
        return None
    node = match.walk.node_at(match.length)
    return str(space.tree.name(space.tree.entry_below(node)))
