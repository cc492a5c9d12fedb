"""Digests: what they depend on, and that content is read once."""

import os
from hashlib import sha256
from pathlib import Path

import pytest

from mlx_swarm.broker.models.identity import (
    ModelIdentity,
    digest_of,
    file_digests,
    identity_of,
    namespace_digest,
)
from mlx_swarm.broker.models.progress import Progress

IDENTITY = ModelIdentity("config", "tokenizer", "weights", "float32")


class Reads:
    """Counts the reports of hashing."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, progress: Progress) -> None:
        self.count += progress.stage == "hashing"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors", "README.md"):
        (folder / name).write_text(f"content of {name}")
    return folder


def test_a_second_look_reads_nothing(model: Path, tmp_path: Path) -> None:
    reads = Reads()
    first = identity_of(model, "float32", tmp_path / "cache", reads)
    assert reads.count == 3
    assert identity_of(model, "float32", tmp_path / "cache", reads) == first
    assert reads.count == 3


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_each_file_of_the_model_counts(model: Path, tmp_path: Path, name: str) -> None:
    before = identity_of(model, "float32", tmp_path / "cache", Reads())
    (model / name).write_text(f"CONTENT OF {name}")
    assert identity_of(model, "float32", tmp_path / "cache", Reads()).digest != before.digest


def test_other_files_and_the_folder_do_not_count(model: Path, tmp_path: Path) -> None:
    before = identity_of(model, "float32", tmp_path / "cache", Reads())
    (model / "README.md").write_text("other")
    moved = model.rename(tmp_path / "elsewhere")
    assert identity_of(moved, "float32", tmp_path / "cache", Reads()).digest == before.digest


def test_without_a_writable_cache_folder_digests_are_only_not_kept(
    model: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    reads = Reads()
    first = identity_of(model, "float32", tmp_path / "file" / "cache", reads)
    assert identity_of(model, "float32", tmp_path / "file" / "cache", reads) == first
    assert reads.count == 6


def test_a_broken_digest_file_is_made_anew(model: Path, tmp_path: Path) -> None:
    path = model / "config.json"
    first = file_digests([path], tmp_path / "cache", Reads())
    [kept] = (tmp_path / "cache" / "digests").iterdir()
    kept.write_text('{"half')
    assert file_digests([path], tmp_path / "cache", Reads()) == first


def test_a_hub_blob_is_known_by_its_name(tmp_path: Path) -> None:
    blob = tmp_path / "blobs" / ("ab" * 32)
    blob.parent.mkdir()
    blob.write_text("weights")
    link = tmp_path / "snapshots" / "model.safetensors"
    link.parent.mkdir()
    link.symlink_to(blob)
    reads = Reads()
    assert file_digests([link], tmp_path / "cache", reads) == {link: "ab" * 32}
    assert reads.count == 0


def test_namespaces_differ_in_each_of_their_parts() -> None:
    others = [
        ModelIdentity("other", "tokenizer", "weights", "float32"),
        ModelIdentity("config", "other", "weights", "float32"),
        ModelIdentity("config", "tokenizer", "other", "float32"),
        ModelIdentity("config", "tokenizer", "weights", "bfloat16"),
        ModelIdentity("config", "tokenizer", "weights", "float32", "adapter"),
    ]
    digests = [
        namespace_digest(IDENTITY),
        *(namespace_digest(identity) for identity in others),
        namespace_digest(IDENTITY, kv_format="x"),
        namespace_digest(IDENTITY, tenant="x"),
    ]
    assert len(set(digests)) == len(digests)
    assert namespace_digest(IDENTITY) == digests[0]


def test_a_model_without_an_adapter_keeps_the_namespace_of_its_cold_files() -> None:
    """The digests below are those of the files that exist."""
    base = sha256(b'["config","tokenizer","weights","float32"]').hexdigest()
    assert IDENTITY.digest == base
    expected = sha256(f'["{base}","","","tenant"]'.encode()).hexdigest()
    assert namespace_digest(IDENTITY, tenant="tenant") == expected


def test_parts_do_not_run_into_each_other() -> None:
    assert digest_of(["ab", "c"]) != digest_of(["a", "bc"])


def test_a_time_that_was_set_back_hides_no_change(model: Path, tmp_path: Path) -> None:
    weights = model / "model.safetensors"
    before, facts = file_digests([weights], tmp_path, Reads()), weights.stat()
    with weights.open("r+") as file:
        file.write("CONTENT")
    os.utime(weights, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert weights.stat().st_mtime_ns == facts.st_mtime_ns
    assert file_digests([weights], tmp_path, Reads()) != before
