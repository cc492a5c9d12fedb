"""What tests of the engine leave behind ends in the thread that it belongs to."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def _collected() -> Iterator[None]:
    """A generator of mlx-lm that is dropped must not be closed in another thread: MLX's streams are
    those of one.
    """
    yield
    gc.collect()
