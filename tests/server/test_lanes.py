"""Lanes: first come first served inside one, together between them, and bounds on all of it."""

from collections.abc import Callable

import anyio
import pytest

from mlx_swarm.broker.server.errors import ApiError
from mlx_swarm.broker.server.responses.lanes import MAX_QUEUED, Lanes

pytestmark = pytest.mark.anyio


class Job:
    """Says when it begins, and ends when it is let."""

    def __init__(self, name: str, told: list[str], size: int = 1) -> None:
        self.name = name
        self.size = size
        self.let = anyio.Event()
        self._told = told

    async def run(self) -> None:
        self._told.append(self.name)
        await self.let.wait()

    def cancel(self) -> None:
        self.let.set()


async def test_one_lane_does_one_job_after_another_and_lanes_go_side_by_side() -> None:
    told: list[str] = []
    async with anyio.create_task_group() as tasks:
        lanes = Lanes(tasks, 4, 1000)
        first, second, other = (Job(name, told) for name in ("first", "second", "other"))
        lanes.put("a", first)
        assert lanes.current("a") is first
        lanes.put("a", second)
        lanes.put(None, other)
        await anyio.wait_all_tasks_blocked()
        assert sorted(told) == ["first", "other"]
        assert (len(lanes), lanes.queued) == (2, 1)
        assert lanes.current("a") is first
        first.let.set()
        await anyio.wait_all_tasks_blocked()
        assert told[2:] == ["second"]
        assert lanes.current("a") is second
        second.let.set()
        other.let.set()
        await lanes.wait_idle()
        assert len(lanes) == 0
        assert lanes.current("a") is None


async def test_any_number_of_lanes_can_follow_one_another() -> None:
    told: list[str] = []
    async with anyio.create_task_group() as tasks:
        lanes = Lanes(tasks, 2, 1000)
        for number in range(500):
            job = Job(str(number), told)
            job.let.set()
            lanes.put(number, job)
            await lanes.wait_idle()
    assert len(told) == 500


def _all_lanes(lanes: Lanes, told: list[str]) -> None:
    for number in range(4):
        lanes.put(number, Job(str(number), told))


def _one_lane(lanes: Lanes, told: list[str]) -> None:
    for number in range(MAX_QUEUED + 1):
        lanes.put("a", Job(str(number), told))


def _bytes(lanes: Lanes, told: list[str]) -> None:
    for number in range(3):
        lanes.put(number, Job(str(number), told, 400))


@pytest.mark.parametrize("fill", [_all_lanes, _one_lane, _bytes])
async def test_what_is_too_much_is_refused_and_the_rest_goes_on(
    fill: Callable[[Lanes, list[str]], None],
) -> None:
    told: list[str] = []
    async with anyio.create_task_group() as tasks:
        lanes = Lanes(tasks, 3, 1000)
        with pytest.raises(ApiError) as raised:
            fill(lanes, told)
        assert raised.value.status == 429
        assert raised.value.code == "rate_limit_exceeded"
        await anyio.wait_all_tasks_blocked()
        assert told
        tasks.cancel_scope.cancel()


async def test_a_job_larger_than_the_bound_is_done_where_nothing_else_waits() -> None:
    told: list[str] = []
    async with anyio.create_task_group() as tasks:
        lanes = Lanes(tasks, 3, 10)
        job = Job("large", told, 100)
        lanes.put("a", job)
        job.let.set()
        await lanes.wait_idle()
    assert told == ["large"]
