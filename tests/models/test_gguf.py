"""GGUF files: values, permutation and logits against the `gguf` package and a stock model; broken
files."""

import contextlib
import random
import resource
from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np
import pytest
import safetensors.numpy
from gguf import GGMLQuantizationType as Kind
from mlx.utils import tree_flatten
from mlx_lm.models import llama

from mlx_swarm.broker.errors import ModelError, ModelUnreadable
from mlx_swarm.broker.models import load
from mlx_swarm.broker.models.gguf import GGUFFile
from mlx_swarm.broker.models.gguf_conversion import unpermute
from mlx_swarm.broker.models.weights import dequantize
from tests.models.tiny_gguf import HEAD_DIM, HEADS, KV_HEADS, in_halves, vocabulary, write_llama

KINDS = [Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q8_0]


def one_line(error: pytest.ExceptionInfo[ModelError]) -> str:
    message = str(error.value)
    assert message
    assert "\n" not in message
    return message


def left_over(folder: Path) -> list[Path]:
    """Everything in a cache folder but the digests."""
    return [path for path in folder.rglob("*") if path.is_file() and "digests" not in path.parts]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_values_are_those_of_the_gguf_package(tmp_path: Path, kind: Kind, tied: bool) -> None:
    expected = write_llama(tmp_path / "tiny.gguf", kind, tied=tied, biased=tied)
    loaded = load(str(tmp_path / "tiny.gguf"), dtype="float32", cache_dir=tmp_path / "cache")
    dequantize(loaded.model)
    found = dict(tree_flatten(loaded.model.parameters()))
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert np.array_equal(np.array(found[name]), values), name


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_logits_are_those_of_the_same_weights_in_a_stock_model(tmp_path: Path, kind: Kind) -> None:
    expected = write_llama(tmp_path / "tiny.gguf", kind, tied=False)
    loaded = load(str(tmp_path / "tiny.gguf"), dtype="float32", cache_dir=tmp_path / "cache")
    stock = llama.Model(llama.ModelArgs.from_dict(loaded.config))
    stock.load_weights([(name, mx.array(values)) for name, values in expected.items()])
    tokens = mx.array([loaded.encode("the theory of the thing")])
    assert mx.allclose(loaded.model(tokens), stock(tokens), atol=1e-4)
    assert loaded.config["rope_theta"] == 5000.0
    assert loaded.context_length == 512


def test_unpermute_is_the_row_by_row_rule() -> None:
    values = np.random.default_rng(1).normal(size=(4 * 16, 8)).astype(np.float32)
    rows = values.view(np.uint8).reshape(len(values), -1)
    assert np.array_equal(unpermute(rows, 4).view(np.float32), in_halves(values, 4))


def test_packed_weights_stay_packed_in_the_converted_directory(tmp_path: Path) -> None:
    write_llama(tmp_path / "tiny.gguf", Kind.Q4_1)
    loaded = load(str(tmp_path / "tiny.gguf"), cache_dir=tmp_path / "cache")
    assert loaded.config["quantization"] == {"group_size": 32, "bits": 4}
    [weights] = (tmp_path / "cache").rglob("*.safetensors")
    arrays = safetensors.numpy.load_file(weights)
    assert arrays["model.layers.0.self_attn.q_proj.weight"].dtype == np.uint32
    assert arrays["model.norm.weight"].dtype == np.float32


def test_a_second_load_converts_and_hashes_nothing(tmp_path: Path) -> None:
    write_llama(tmp_path / "tiny.gguf")
    stages: list[str] = []
    for _ in range(2):
        stages.clear()
        loaded = load(
            str(tmp_path / "tiny.gguf"),
            cache_dir=tmp_path / "cache",
            progress=lambda progress: stages.append(progress.stage),
        )
    assert set(stages) == {"loading"}
    assert loaded.name == "tiny"


def test_another_content_under_the_same_name_is_another_model(tmp_path: Path) -> None:
    digests = set()
    for seed in range(2):
        write_llama(tmp_path / "tiny.gguf", seed=seed)
        loaded = load(str(tmp_path / "tiny.gguf"), cache_dir=tmp_path / "cache")
        digests.add(loaded.identity.digest)
    assert len(digests) == 2


def test_llama3_rope_scaling_is_recovered_from_its_frequencies(tmp_path: Path) -> None:
    write_llama(tmp_path / "plain.gguf")
    scaled = tmp_path / "scaled.gguf"
    wanted = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    _with_frequencies(tmp_path / "plain.gguf", scaled, _llama3_divisors(5000.0, 32.0))
    loaded = load(str(scaled), cache_dir=tmp_path / "cache")
    assert loaded.config["rope_scaling"] == pytest.approx(wanted)
    _with_frequencies(tmp_path / "plain.gguf", scaled, np.linspace(1, 9, HEAD_DIM // 2))
    with pytest.raises(ModelUnreadable, match="rope frequencies") as error:
        load(str(scaled), cache_dir=tmp_path / "cache")
    one_line(error)


def test_every_truncation_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    write_llama(tmp_path / "whole.gguf", Kind.Q4_0)
    content = (tmp_path / "whole.gguf").read_bytes()
    broken = tmp_path / "broken.gguf"
    for length in [0, 3, 4, 10, 23, *range(30, len(content), len(content) // 30), len(content) - 1]:
        broken.write_bytes(content[:length])
        with pytest.raises(ModelUnreadable, match=r"broken\.gguf") as error:
            load(str(broken), cache_dir=tmp_path / "cache")
        one_line(error)
    assert left_over(tmp_path / "cache") == []


def test_no_flipped_byte_of_the_header_gets_past_as_another_error(tmp_path: Path) -> None:
    write_llama(tmp_path / "whole.gguf")
    content = (tmp_path / "whole.gguf").read_bytes()
    with GGUFFile(tmp_path / "whole.gguf") as file:
        header = min(info.offset for info in file.tensors.values())
    broken = tmp_path / "broken.gguf"
    choose = random.Random(7)
    for _ in range(60):
        flipped = bytearray(content)
        for _ in range(3):
            flipped[choose.randrange(header)] ^= 1 << choose.randrange(8)
        broken.write_bytes(flipped)
        with contextlib.suppress(ModelError):
            load(str(broken), cache_dir=tmp_path / "cache")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"general.architecture": "mamba"}, "'mamba'"),
        ({"llama.expert_count": 8}, "experts"),
        ({"llama.embedding_length": 0}, "embedding_length is 0"),
        ({"llama.attention.head_count": 4}, r"attn_k.* shape \(32, 64\) instead of \(16, 64\)"),
        ({"llama.feed_forward_length": 95}, r"ffn_gate.* shape \(96, 64\) instead of \(95, 64\)"),
        ({"llama.block_count": 3}, "incomplete: it has no tensor 'blk.2.attn_norm.weight'"),
        ({"llama.block_count": 2**32 - 1}, "incomplete: it has no tensor 'blk.2.attn_norm.weight'"),
        ({"llama.rope.freq_base": "high"}, "freq_base is 'high'"),
        ({"llama.rope.freq_base": float("nan")}, "freq_base is nan"),
        ({"llama.attention.layer_norm_rms_epsilon": 0.0}, "epsilon is 0.0"),
        ({"llama.rope.dimension_count": 8}, "part of the head"),
        ({"llama.rope.scaling.type": "yarn"}, "'yarn'"),
        ({"llama.block_count": 1}, "'blk.1"),
    ],
)
def test_what_is_not_a_plain_llama_is_named(
    tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    write_llama(tmp_path / "odd.gguf", changes=changes)
    with pytest.raises(ModelUnreadable, match=said) as error:
        load(str(tmp_path / "odd.gguf"), cache_dir=tmp_path / "cache")
    one_line(error)
    assert left_over(tmp_path / "cache") == []


def test_a_k_quant_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "k.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.zeros((8, 144), np.uint8), raw_dtype=Kind.Q4_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        ModelUnreadable, match=r"'token_embd\.weight' is Q4_K; supported are F32"
    ) as error:
        load(str(tmp_path / "k.gguf"), cache_dir=tmp_path / "cache")
    one_line(error)


def test_a_file_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    write_llama(tmp_path / "mute.gguf", tokenizer=False)
    with pytest.raises(ModelUnreadable, match="no tokenizer") as error:
        load(str(tmp_path / "mute.gguf"), cache_dir=tmp_path / "cache")
    one_line(error)


def test_a_cache_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    write_llama(tmp_path / "tiny.gguf")
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="cannot write to the cache folder") as error:
        load(str(tmp_path / "tiny.gguf"), cache_dir=tmp_path / "file" / "cache")
    one_line(error)


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    write_llama(tmp_path / "tiny.gguf")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))
    try:
        with pytest.raises(ModelError, match="File too large") as error:
            load(str(tmp_path / "tiny.gguf"), cache_dir=tmp_path / "cache")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    one_line(error)
    assert left_over(tmp_path / "cache") == []
    assert load(str(tmp_path / "tiny.gguf"), cache_dir=tmp_path / "cache").context_length == 512


def test_the_sizes_of_the_test_file_exercise_grouped_heads() -> None:
    assert HEADS != KV_HEADS
    assert len(vocabulary().names) % 32


def _llama3_divisors(base: float, factor: float) -> np.ndarray:
    """Frequency by frequency, as Llama 3's release describes it."""
    divisors = []
    for index in range(0, HEAD_DIM, 2):
        wavelength = 2 * np.pi * base ** (index / HEAD_DIM)
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors)


def _with_frequencies(source: Path, target: Path, divisors: np.ndarray) -> None:
    """A copy of `source` with a tensor of rotary frequency divisors."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "llama")
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")):
            kinds = field.types
            sub_type = kinds[-1] if len(kinds) > 1 else None
            writer.add_key_value(field.name, field.contents(), kinds[0], sub_type)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
