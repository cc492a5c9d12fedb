"""A model with an adapter in the batch lane: the tests at load pass, tokens are mlx-lm's own."""

from pathlib import Path

import pytest
from mlx_lm.tuner.utils import load_adapters

from mlx_swarm.broker import Request
from mlx_swarm.broker.engine.batch_test import batch_test
from mlx_swarm.broker.engine.self_test import self_test
from mlx_swarm.broker.models import LoadedModel, load, load_adapter
from tests.engine.driver import Box, Driver
from tests.models.tiny_adapter import write_adapter
from tests.tiny_broker import SHARED, prompt, reference

SIZES = "layers=2&hidden=64&heads=4&kv_heads=2&intermediate=64&context=256&seed=3"
KINDS = {
    "lora": ("llama", "lora", ""),
    "dora": ("llama", "dora", ""),
    "experts": ("qwen3_moe", "lora", ""),
    "windows with sinks": ("gpt_oss", "lora", "&window=16"),
}
ASKED = [
    *(Request(tokens=prompt(agent, own=2 + 5 * agent), max_tokens=8) for agent in range(4)),
    Request(tokens=[9, 8, 7, 6], max_tokens=8, cache=False),
]


def adapter_for(model: LoadedModel, folder: Path, kind: str = "lora", seed: int = 0) -> Path:
    return write_adapter(folder, model.model, kind=kind, seed=seed)


def mlx_lms_own(spec: str, folder: Path) -> LoadedModel:
    """The model as mlx-lm adapts it, in weights of its own."""
    model = load(spec)
    load_adapters(model.model, str(folder)).eval()
    return model


def expected(model: LoadedModel) -> list[list[int]]:
    return [list(reference(model, request.tokens, 8)) for request in ASKED]


@pytest.mark.parametrize("name", KINDS)
def test_rows_that_share_a_prefix_get_the_tokens_of_mlx_lms_own_adapted_model(
    name: str, tmp_path: Path
) -> None:
    architecture, kind, more = KINDS[name]
    spec = f"synthetic:{architecture}?{SIZES}{more}"
    base = load(spec)
    folder = adapter_for(base, tmp_path / "adapter", kind)
    adapted = load_adapter(base, folder)
    assert self_test(adapted.model).passed
    verdict = batch_test(adapted.model, adapted.make_caches)
    assert verdict.test.passed, verdict.test.reason
    assert verdict.attention

    solo = expected(mlx_lms_own(spec, folder))
    driver = Driver(adapted)
    for _ in range(2):
        assert [box.tokens for box in driver.stagger(ASKED, lambda: 2)] == solo
    ends = [box.end for box in driver.boxes[len(ASKED) :]]
    assert all(end is not None and end.usage.ram_tokens >= len(SHARED) for end in ends[:4])
    assert solo != expected(base)
    driver.check_idle()


def test_lanes_of_a_base_and_two_adapters_alternate_turn_by_turn(tmp_path: Path) -> None:
    spec = f"synthetic:llama?{SIZES}"
    base = load(spec)
    folders = [adapter_for(base, tmp_path / str(seed), seed=seed) for seed in range(2)]
    cold = [expected(each) for each in (load(spec), *(mlx_lms_own(spec, at) for at in folders))]
    assert len({str(tokens) for tokens in cold}) == 3

    drivers = [Driver(each) for each in (base, *(load_adapter(base, at) for at in folders))]
    boxes: list[list[Box]] = [[driver.submit(request) for request in ASKED] for driver in drivers]
    while not all(box.over for lane in boxes for box in lane):
        for driver in drivers:
            driver.run(1)
    assert [[box.tokens for box in lane] for lane in boxes] == cold
    for driver in drivers:
        driver.run()
        driver.check_idle()
