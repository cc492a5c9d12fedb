"""Whom a request waits for: who will store most of its prompt. No MLX."""

from collections.abc import Callable, Iterable
from itertools import count

from ..cache.prefix_hash import Tokens, common_prefix_length
from ..request import RequestId
from .entry import Entry, State

MINIMUM_SHARED_TOKENS = 16
"""A request does not wait for fewer tokens than this."""

Known = Callable[[Tokens, str, int | None], int]
"""How many tokens of a prompt memory has now, in a namespace, where so many alternatives come with
its log-probabilities; None where these are not needed.
"""


class Leaders:
    """Those who compute, and what they could store for those who wait. `computed(request)` are the
    tokens that a decoding row could store.
    """

    def __init__(
        self, known: Known, computed: Callable[[RequestId], Tokens], minimum_shared: int, kept: int
    ) -> None:
        self._known = known
        self._computed = computed
        self._minimum_shared = minimum_shared
        self._kept = kept
        # Who computes, numbered in order of admission.
        self._leaders: dict[Entry, int] = {}
        self._numbers = count(1)
        self._memory_version = 0

    def add(self, entry: Entry) -> None:
        """A request computes from now on."""
        self._leaders.pop(entry, None)
        self._leaders[entry] = next(self._numbers)

    def discard(self, entry: Entry) -> None:
        """It is over, if it did."""
        self._leaders.pop(entry, None)

    def memory_changed(self) -> None:
        """Memory may have more now."""
        self._memory_version += 1

    def tokens_changed(self, entry: Entry, others: Iterable[Entry]) -> None:
        """The tokens of one who computes no more are others now; all others forget them."""
        self.discard(entry)
        entry.common.clear()
        entry.hopes.clear()
        entry.met = 0
        for other in others:
            other.common.pop(entry.request, None)
            other.hopes.pop(entry, None)

    def best_for(
        self, entry: Entry, prefilling: Iterable[Entry], decoding: Iterable[Entry]
    ) -> tuple[Entry | None, int, bool]:
        """Who will store most of this prompt, how much, and whether that is worth waiting for."""
        hope = self._hope(entry)
        # Most have nobody to hope for: memory need not be asked about each at every change.
        if not hope:
            return None, 0, False
        best, longest = None, self._in_memory(entry)
        floor = longest
        if hope <= floor:
            return None, floor, False
        donors = (each for each in decoding if each.lane.donates)
        for leader in (*prefilling, *donors):
            if entry.hopes.get(leader, 0) <= longest:
                continue
            shared = self._shared(entry, leader)
            if shared > max(longest, leader.stored):
                best, longest = leader, shared
        return best, longest, longest - floor >= self._minimum_shared

    def _hope(self, entry: Entry) -> int:
        """No leader can ever store more of a prompt than so many tokens.

        With a full queue many prompts are looked at for every change, and hardly one has a leader:
        so each is compared with a leader once, when that is new.
        """
        hopes = entry.hopes
        for leader, number in reversed(self._leaders.items()):
            if number <= entry.met:
                break
            common = self._common(entry, leader)
            hopes[leader] = entry.end if common == len(leader.tokens) else min(common, entry.end)
        entry.met = next(reversed(self._leaders.values()), 0)
        most = max(hopes.values(), default=0)
        if most > entry.in_memory or len(hopes) > self._kept:
            for ended in hopes.keys() - self._leaders.keys():
                del hopes[ended]
            most = max(hopes.values(), default=0)
        return most

    def _common(self, entry: Entry, leader: Entry) -> int:
        """Tokens with which both prompts begin; 0 also where they are stored already."""
        if entry.namespace is None or entry.namespace != leader.namespace:
            return 0
        if entry.alternatives is not None and (entry.alternatives or leader.alternatives is None):
            return 0
        common = entry.common.get(leader.request)
        if common is None:
            # Most part right where the stored prefix ends: one token tells.
            at = leader.stored
            if at < len(leader.tokens) and entry.tokens[min(at, entry.end)] != leader.tokens[at]:
                return 0
            common = common_prefix_length(entry.tokens, leader.tokens)
            entry.common[leader.request] = common
        return common

    def _shared(self, entry: Entry, leader: Entry) -> int:
        """Tokens of the prompt that the leader can store for it."""
        common = self._common(entry, leader)
        if leader.state is not State.DECODING:
            return min(common, entry.end, leader.end)
        if common == len(leader.tokens) and entry.alternatives is None:
            common = common_prefix_length(entry.tokens, self._computed(leader.request))
        return min(common, entry.end)

    def _in_memory(self, entry: Entry) -> int:
        if entry.namespace is None:
            return 0
        if entry.looked_up_at != self._memory_version:
            found = self._known(entry.tokens, entry.namespace, entry.alternatives)
            # One token of what a leader stores with log-probabilities is computed again.
            is_more = found and entry.alternatives is not None
            entry.in_memory = found + 1 if is_more else found
            entry.looked_up_at = self._memory_version
        return entry.in_memory
