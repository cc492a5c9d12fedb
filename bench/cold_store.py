"""What the parts of `bench.cold` share: stores in folders of their own, random KV, cold pages."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from mlx_swarm.broker.cache.dtypes import dtype_of
from mlx_swarm.broker.cache.layout import Layout, TokenLeaf
from mlx_swarm.broker.cache.prompt_cache import PromptCache
from mlx_swarm.broker.cache.ssd import SsdStore

UNBOUNDED = 1 << 50
FLUSH_SECONDS = 300.0


@contextmanager
def opened(parent: Path, queue_bytes: int = UNBOUNDED) -> Iterator[tuple[SsdStore, PromptCache]]:
    """A store in a new folder, which is removed at the end, and a cache above it."""
    with (
        tempfile.TemporaryDirectory(dir=parent, ignore_cleanup_errors=True) as folder,
        SsdStore(Path(folder), UNBOUNDED, queue_bytes=queue_bytes) as store,
    ):
        yield store, PromptCache(UNBOUNDED, cold=store)


def random_caches(layout: Layout, tokens: int) -> list[KVCache]:
    """Evaluated stock caches with random KV of so many tokens."""
    caches = []
    for leaf in layout.leaves:
        assert isinstance(leaf, TokenLeaf)
        shapes = [((1, each.heads, tokens, each.dim), each.dtype) for each in leaf.planes]
        planes = [mx.random.normal(shape).astype(dtype_of(dtype)) for shape, dtype in shapes]
        cache = KVCache()
        cache.update_and_fetch(*planes)
        mx.eval(cache.state)
        caches.append(cache)
    return caches


def extended(caches: Sequence[KVCache], more: Sequence[KVCache]) -> list[KVCache]:
    """New caches with the tokens of both."""
    joined = []
    for first, second in zip(caches, more, strict=True):
        cache = KVCache()
        planes = [
            mx.concatenate([a[:, :, : first.offset], b[:, :, : second.offset]], axis=2)
            for a, b in ((first.keys, second.keys), (first.values, second.values))
        ]
        cache.update_and_fetch(*planes)
        joined.append(cache)
    mx.eval([cache.state for cache in joined])
    return joined


def flush(cache: PromptCache) -> None:
    """Write everything; raises `TimeoutError` if that does not end."""
    left = cache.flush(FLUSH_SECONDS)
    if left.writes:
        raise TimeoutError(f"{left.bytes:,} bytes were not written in {FLUSH_SECONDS:g} s")


def forget_pages(paths: Sequence[Path]) -> bool:
    """Have the system read these files from the disk next time; whether it can be asked to.

    What lies below the system, of a virtual machine say, may still hold them.
    """
    if not hasattr(os, "posix_fadvise"):
        return False
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    return True
