"""Threads that a call which hangs cannot make wait for."""

import subprocess
import sys
import threading
import time
import weakref

import pytest

from mlx_swarm.broker.threads import Threads

SECONDS = 30.0


class Thing:
    """Something that can be referred to weakly."""


def test_calls_end_with_what_they_return_or_raise() -> None:
    threads = Threads(2, "test")
    outcomes = [threads.submit(divmod, 7, by) for by in (2, 0)]
    assert outcomes[0].result(SECONDS) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        outcomes[1].result(SECONDS)
    assert threads.close(SECONDS)
    with pytest.raises(RuntimeError, match="ended"):
        threads.submit(divmod, 1, 1)


def test_closing_waits_for_what_was_submitted_and_no_longer_than_it_may() -> None:
    threads, may_end = Threads(1, "test"), threading.Event()
    outcomes = [threads.submit(may_end.wait, SECONDS) for _ in range(3)]
    assert not threads.close(0.01)
    may_end.set()
    assert threads.close(SECONDS)
    assert all(outcome.result(0) for outcome in outcomes)


def test_what_was_returned_is_not_kept_alive() -> None:
    threads = Threads(1, "test")
    outcome = threads.submit(Thing)
    thing = weakref.ref(outcome.result(SECONDS))
    del outcome
    # The thread may not be back from the call yet.
    end = time.monotonic() + SECONDS
    while thing() is not None and time.monotonic() < end:
        time.sleep(0.001)
    assert thing() is None
    assert threads.close(SECONDS)


HANG = """
import threading
from mlx_swarm.broker.threads import Threads
Threads(1, "test").submit(threading.Event().wait)
"""


def test_a_process_ends_although_a_call_hangs() -> None:
    subprocess.run([sys.executable, "-c", HANG], check=True, timeout=60)
