"""The demo's agents have distinct names, whatever their number."""

import pytest

from mlx_swarm.agents.demo.texts import TASKS, handbook, tasks_for


@pytest.mark.parametrize("agents", [1, 8, 9, 100])
def test_every_agent_has_a_name_and_a_task(agents: int) -> None:
    tasks = tasks_for(agents)
    assert len({task.name for task in tasks}) == len(tasks) == agents
    assert len({task.text for task in tasks}) == min(agents, len(TASKS))


def test_the_slow_backend_gets_less_to_read() -> None:
    assert len(handbook(short=True)) < len(handbook(short=False)) / 2
