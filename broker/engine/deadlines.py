"""When requests have to be over. No MLX, no clock."""

import heapq
from itertools import count

from ..request import RequestId

FEW = 16


class Deadlines:
    """The deadlines of open requests, the next one first."""

    def __init__(self) -> None:
        self._times: dict[RequestId, float] = {}
        # Those that were discarded stay in here for a while.
        self._heap: list[tuple[float, int, RequestId]] = []
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._times)

    def add(self, request: RequestId, time: float) -> None:
        """A request has to be over by then."""
        self._times[request] = time
        heapq.heappush(self._heap, (time, next(self._numbers), request))

    def discard(self, request: RequestId) -> None:
        """A request is over, whether or not it had a deadline."""
        self._times.pop(request, None)
        if len(self._heap) > 2 * len(self._times) + FEW:
            self._heap = [item for item in self._heap if self._is_open(item)]
            heapq.heapify(self._heap)

    def next(self) -> tuple[float, RequestId] | None:
        """The next deadline and whose it is."""
        while self._heap and not self._is_open(self._heap[0]):
            heapq.heappop(self._heap)
        return (self._heap[0][0], self._heap[0][2]) if self._heap else None

    def _is_open(self, item: tuple[float, int, RequestId]) -> bool:
        time, _, request = item
        return self._times.get(request) == time
