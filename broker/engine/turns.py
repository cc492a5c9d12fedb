"""What is computed next: parts of prompts and rounds of decode steps. No MLX.

Prompts are computed in turn, short rests of several of one lane together. After every chunk of
prompt tokens at the latest comes a round of decode steps, one for each lane that has running rows.
"""

from collections.abc import Iterable

from .entry import Entry
from .fairness import FairQueue
from .work import Decode, LanePolicy, Part, Prefill, Work

ROUNDING = 1e-9


class Turns:
    """Whose turn to compute it is, of those who prefill and those who decode. A put serves stops
    within `reach` tokens of each other, but in lanes with exact stops.
    """

    def __init__(self, prefilling: FairQueue[Entry], decoding: Iterable[Entry], reach: int) -> None:
        self._prefilling = prefilling
        self._decoding = decoding
        self._reach = reach
        # All lanes of this round of decode steps, those whose turn is still to come, the next one
        # last, and how much of a chunk was computed since the last round.
        self._lanes: dict[LanePolicy, None] = {}
        self._round: list[LanePolicy] = []
        self._spent = 0.0

    def next(self) -> Work | None:
        """A step of a lane in this round, else parts of prompts, else the first of a new round."""
        if work := self._step():
            return work
        if parts := self._parts():
            return Prefill(tuple(parts))
        self._spent = 0.0
        # Whoever comes or goes, a lane is never later in a round than in the one before: else it
        # would wait for two steps of each other one.
        decoding = {entry.lane: None for entry in self._decoding}
        self._lanes = {lane: None for lane in self._lanes if lane in decoding} | decoding
        self._round = list(reversed(self._lanes))
        return self._step()

    def computed(self, entry: Entry, tokens: int) -> None:
        """So many tokens of a prompt were computed."""
        self._spent += tokens / entry.lane.chunk(self._is_decoding)

    def next_stop(self, entry: Entry) -> int:
        """The next position at which a prompt is to be stored."""
        return entry.next_stop(0 if entry.lane.exact_stops else self._reach)

    def _step(self) -> Work | None:
        while self._round:
            lane = self._round.pop()
            if rows := [entry for entry in self._decoding if entry.lane is lane]:
                for entry in rows:
                    entry.compute(1)
                    entry.fresh += 1
                return Decode(lane)
        return None

    def _parts(self) -> list[Part]:
        """Parts of prompts of one lane that may be computed before the next round."""
        is_decoding = self._is_decoding
        spent = self._spent if is_decoding else 0.0
        parts: list[Part] = []
        lane: LanePolicy | None = None
        chunk = 0
        for entry in self._prefilling.in_turn():
            if lane is None:
                lane, chunk = entry.lane, entry.lane.chunk(is_decoding)
            elif entry.lane is not lane:
                continue
            stop = self.next_stop(entry)
            if stop - entry.position > chunk:
                # At multiples of the chunk, and not for what is left over of another: every length
                # that was not seen before is dear on GPUs.
                stop = (entry.position // chunk + 1) * chunk
            cost = (stop - entry.position) / chunk
            if spent and spent + cost > 1 + ROUNDING:
                break
            parts.append(Part(entry.request, entry.position, stop))
            spent += cost
        return parts

    @property
    def _is_decoding(self) -> bool:
        return any(True for _ in self._decoding)
