"""The files themselves: safetensors that anybody can read, and no flipped bit goes unnoticed."""

import logging
import os
import stat
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from safetensors import safe_open

from mlx_swarm.broker.cache.layout import Layout, LayoutNode, TokenLeaf
from mlx_swarm.broker.cache.prompt_cache import PromptCache
from mlx_swarm.broker.cache.ssd import SsdStore
from mlx_swarm.broker.cache.ssd import header as headers_module
from mlx_swarm.broker.cache.ssd.disk import Disk
from mlx_swarm.broker.cache.ssd.files import read_header, verify_file
from mlx_swarm.broker.cache.ssd.header import decode, encode
from mlx_swarm.broker.cache.ssd.names import SUFFIX, UNFINISHED, VERSION, key_of
from mlx_swarm.broker.errors import CorruptFile, ForeignFile
from tests.cache.helpers import taken
from tests.cache.ssd.folders import CAP, RAM, files, headers, quarantined, store_all


@pytest.fixture(autouse=True)
def _logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)


def test_a_file_is_plain_safetensors(tmp_path: Path) -> None:
    store_all(tmp_path, [range(40)], "state")
    (path,) = files(tmp_path)
    with safe_open(path, "np") as file:
        assert file.metadata()["mlx-swarm.format"] == "1"
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}
        assert {tuple(s) for n, s in shapes.items() if n.startswith("kv")} == {
            (40, 1, 2, 8),
            (40, 1, 2, 4),
        }
        assert any(name.startswith("state") for name in shapes)
        assert file.get_tensor("kv.0").dtype == np.float32


def test_files_and_folders_are_private(tmp_path: Path) -> None:
    store_all(tmp_path, [range(40)])
    folder = tmp_path / VERSION
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_a_link_where_a_file_is_to_be_is_replaced_and_not_followed(tmp_path: Path) -> None:
    store_all(tmp_path, [range(40)])
    (path,) = files(tmp_path)
    path.unlink()
    other = tmp_path / "other"
    other.write_text("of somebody else")
    for link in (path, path.with_name(path.name + UNFINISHED)):
        link.symlink_to(other)
    store_all(tmp_path, [range(40)])
    assert other.read_text() == "of somebody else"
    assert files(tmp_path) == [path]
    assert not path.is_symlink()


def test_a_header_survives_its_encoding(tmp_path: Path) -> None:
    store_all(tmp_path, [range(70), [*range(70), 9], [5]], "nested_twice")
    for header in headers(tmp_path):
        checksums = list(range(header.block_count))
        described = decode(encode(header, checksums))
        assert described.header == header
        assert list(described.checksums) == checksums


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_flipped_bit_is_found_or_changes_nothing(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("flip")
    store_all(folder, [range(30)], "state")
    (path,) = files(folder)
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    with SsdStore(folder, CAP) as store:
        cache = PromptCache(RAM, cold=store)
        # `taken` compares every byte with a computation from nothing.
        served = taken(cache, [*range(30), 7], "state")
        store.check_integrity()
        counts = store.statistics()
    assert served in (0, 30)
    assert served or counts.quarantined or counts.foreign
    assert len(quarantined(folder)) == counts.quarantined
    if not served:
        assert cache.plan([*range(30), 7]).cold_tokens == 0


@pytest.mark.parametrize("is_sidecar_fresh", [True, False])
@pytest.mark.parametrize("size", [0, 5, 300, -700, -1])
def test_a_truncated_file_is_put_aside(
    tmp_path: Path, size: int, is_sidecar_fresh: bool, caplog: pytest.LogCaptureFixture
) -> None:
    store_all(tmp_path, [range(30)])
    (path,) = files(tmp_path)
    facts = path.stat()
    os.truncate(path, size % facts.st_size)
    if is_sidecar_fresh:
        # As a disk does that lost a block: the folder still says what it said.
        path.write_bytes(path.read_bytes() + bytes(facts.st_size - size % facts.st_size))
        os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    with SsdStore(tmp_path, CAP) as store:
        cache = PromptCache(RAM, cold=store)
        assert taken(cache, [*range(30), 7]) == 0
        assert store.statistics().quarantined == 1
        assert store.statistics().files == 0
    assert len(quarantined(tmp_path)) == 1
    assert caplog.text.count("put into quarantine") == 1


def test_the_rest_of_a_chain_is_served_without_its_corrupt_end(tmp_path: Path) -> None:
    store_all(tmp_path, [range(30), range(60)])
    last = max(headers(tmp_path), key=lambda header: header.stop)
    longest = tmp_path / VERSION / f"{last.key}.safetensors"
    content = bytearray(longest.read_bytes())
    content[-1] ^= 1
    longest.write_bytes(content)
    with SsdStore(tmp_path, CAP) as store:
        cache = PromptCache(RAM, cold=store)
        prompt = [*range(60), 7]
        assert cache.plan(prompt).cold_tokens == 60
        lease = cache.take(prompt)
        assert lease is None
        assert cache.plan(prompt).cold_tokens == 30
        assert taken(cache, prompt) == 30
        assert cache.statistics().total.restore_failures == 1


def test_a_file_from_the_future_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(headers_module, "FORMAT", 2)
        store_all(tmp_path, [range(30)])
    (path,) = files(tmp_path)
    (tmp_path / VERSION / "index").unlink()
    with SsdStore(tmp_path, CAP) as store:
        assert PromptCache(RAM, cold=store).plan([*range(30), 7]).usable_tokens == 0
        assert store.statistics().foreign == 1
    assert path.exists()


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    store_all(tmp_path, [range(30)])
    folder = tmp_path / VERSION
    (path,) = files(tmp_path)
    other = folder / f"{'0' * 32}-64.0.safetensors"
    other.write_bytes((34).to_bytes(8, "little") + b'{"__metadata__":{"format":"pt"}}  ')
    note = folder / "notes.safetensors"
    note.write_text("not ours")
    with SsdStore(tmp_path, 1) as store:
        # Nothing may stay within such a cap; only what is ours goes.
        assert store.statistics().foreign == 1
        assert not path.exists()
    assert {other, note} <= {*folder.iterdir()}


def test_a_file_under_another_ones_name_is_never_served(tmp_path: Path) -> None:
    store_all(tmp_path / "a", [range(30)], namespace="one")
    store_all(tmp_path / "b", [range(30)], namespace="two")
    (mine,), (theirs,) = files(tmp_path / "a"), files(tmp_path / "b")
    facts = mine.stat()
    mine.write_bytes(theirs.read_bytes())
    os.utime(mine, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    with SsdStore(tmp_path / "a", CAP) as store:
        cache = PromptCache(RAM, cold=store)
        assert taken(cache, [*range(30), 7], namespace="one") == 0
        assert store.statistics().files == 0


def test_verifying_reads_every_byte(tmp_path: Path) -> None:
    store_all(tmp_path, [range(30)])
    (path,) = files(tmp_path)
    key = key_of(path.name)
    assert key is not None
    assert verify_file(Disk(), path, key).header.stop == 30
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptFile, match="checksum"):
        verify_file(Disk(), path, key)


def test_what_is_no_header_is_told_from_a_broken_one() -> None:
    with pytest.raises(ForeignFile, match="not a file"):
        decode(bytes(8) + b'{"__metadata__": {"format": "pt"}}')
    with pytest.raises(CorruptFile, match="cannot be read"):
        decode(bytes(8) + b"{")


def test_a_file_of_another_layout_under_its_own_name_is_never_served(tmp_path: Path) -> None:
    store_all(tmp_path, [range(30)])
    (path,) = files(tmp_path)
    facts, content = path.stat(), path.read_bytes()
    with closing(Disk().open(path)) as file:
        described = read_header(Disk(), file, path.name.removesuffix(SUFFIX), facts.st_size)
    nodes = tuple(_transposed(node) for node in described.header.layout.nodes)
    other = replace(described.header, layout=Layout(nodes))
    start = encode(other, described.checksums)
    assert len(start) == described.payload
    path.write_bytes(start + content[len(start) :])
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    with SsdStore(tmp_path, CAP) as store:
        assert taken(PromptCache(RAM, cold=store), [*range(30), 7]) == 0
        assert store.statistics().foreign == 1
    assert files(tmp_path) == [path]


def _transposed(node: LayoutNode) -> LayoutNode:
    """The same bytes a token, other shapes."""
    assert isinstance(node, TokenLeaf)
    planes = (replace(plane, heads=plane.dim, dim=plane.heads) for plane in node.planes)
    return replace(node, planes=tuple(planes))
