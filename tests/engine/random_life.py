"""A random mix of arrivals, turns, preemptions and ends, for property tests of the engine."""

from collections.abc import Callable

from hypothesis import strategies as st

from mlx_swarm.broker import Request
from tests.engine.driver import Driver


def live(
    data: st.DataObject,
    driver: Driver,
    make: Callable[[int], Request],
    check: Callable[[list[Request]], None],
) -> list[Request]:
    """Let a driver live, then everything run to its end and nothing be left of it.

    `make` draws the request of a number; `check` is called with all so far after every action. The
    requests that come back are those of the driver's boxes.
    """
    asked: list[Request] = []
    for _ in range(data.draw(st.integers(1, 12))):
        action = data.draw(st.sampled_from(["submit", "submit", "run", "run", "preempt", "cancel"]))
        if action == "submit":
            asked.append(make(len(asked)))
            driver.submit(asked[-1])
        elif action == "run":
            driver.run(data.draw(st.integers(1, 12)))
        elif asked:
            index = data.draw(st.integers(0, len(asked) - 1))
            driver.preempt(index) if action == "preempt" else driver.cancel(index)
        check(asked)
    driver.run()
    driver.check_idle()
    return asked
