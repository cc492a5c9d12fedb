"""Several models and adapters in one engine: one ledger, one cache, rounds of steps over all."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.utils import save_config, save_model
from msgspec.structs import replace

from mlx_swarm.broker import Request
from mlx_swarm.broker.cache.ledger import Purpose
from mlx_swarm.broker.cache.ssd.inspection import namespaces
from mlx_swarm.broker.engine.memory import weight_bytes
from mlx_swarm.broker.engine.roster import ModelSource
from mlx_swarm.broker.errors import (
    EngineFailed,
    InvalidRequest,
    ModelBusy,
    ModelNotFound,
    ModelUnreadable,
    OutOfMemory,
)
from mlx_swarm.broker.models import load
from mlx_swarm.broker.trace import events
from tests.engine.driver import Box, Driver, assert_greedy
from tests.models.tiny_adapter import write_adapter
from tests.tiny_broker import TINY, prompt

OTHER = "synthetic:qwen3?layers=2&hidden=64&heads=4&kv_heads=2&intermediate=128&context=256&seed=5"


class Clock:
    """Stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def driver_of(**settings: Any) -> Driver:
    return Driver(load(TINY), **settings)


def asked(agent: int = 0, model: str = "", max_tokens: int = 8) -> Request:
    return Request(tokens=prompt(agent), max_tokens=max_tokens, model=model)


def run(driver: Driver, *requests: Request) -> list[Box]:
    boxes = [driver.submit(request) for request in requests]
    driver.run()
    return boxes


def check_served(driver: Driver, request: Request, box: Box) -> None:
    """Assert that a box has what the model that it asked for says."""
    assert box.error is None
    assert box.end is not None
    assert_greedy(driver.engine.roster.serving(request.model).model, request.tokens, box.tokens)


def ram_tokens(box: Box) -> int:
    assert box.end is not None
    return box.end.usage.ram_tokens


def with_adapters(driver: Driver, folder: Path, *names: str) -> None:
    for seed, name in enumerate(names, start=1):
        where = write_adapter(folder / name, driver.engine.model.model, seed=seed)
        driver.engine.load(name, ModelSource(str(where), base=driver.engine.model.name))


def test_models_side_by_side_answer_as_alone_and_share_no_prefix() -> None:
    driver = driver_of()
    driver.engine.load("other", ModelSource(OTHER))
    requests = [asked(agent, model) for agent in range(3) for model in ("", "other")]
    boxes = driver.stagger(requests, lambda: 3)
    for request, box in zip(requests, boxes, strict=True):
        check_served(driver, request, box)
    assert [ram_tokens(box) > 0 for box in boxes] == [False, False, True, True, True, True]
    driver.check_idle()


def test_rows_of_all_models_decode_in_turn() -> None:
    driver = driver_of()
    driver.engine.load("other", ModelSource(OTHER))
    boxes = [driver.submit(asked(0, model, max_tokens=40)) for model in ("", "other")]
    driver.decode_all(boxes, 2)
    ahead = len(boxes[0].tokens) - len(boxes[1].tokens)
    while not any(box.over for box in boxes):
        driver.run(1)
        assert abs(len(boxes[0].tokens) - len(boxes[1].tokens) - ahead) <= 1
    driver.run()
    driver.check_idle()


@pytest.mark.parametrize("chunk", [8, 64])
def test_adapters_that_alternate_every_step_answer_as_when_they_are_cold(
    tmp_path: Path, chunk: int
) -> None:
    driver = driver_of(chunk=chunk)
    with_adapters(driver, tmp_path, "one", "two")
    requests = [asked(agent, model) for agent in range(3) for model in ("", "one", "two")]
    boxes = driver.stagger(requests, lambda: 2)
    for request, box in zip(requests, boxes, strict=True):
        check_served(driver, request, box)
    firsts = {tuple(box.tokens) for box in boxes[:3]}
    assert len(firsts) == 3
    driver.check_idle()


def test_adapters_cost_their_own_weights_only(tmp_path: Path) -> None:
    driver = driver_of()
    before = driver.engine.statistics().memory.committed["weights"]
    with_adapters(driver, tmp_path, "one", "two")
    models = driver.engine.statistics().models
    own = sum(models[name].weights for name in ("one", "two"))
    assert 0 < own < before / 2
    assert driver.engine.statistics().memory.committed["weights"] == before + own
    driver.engine.unload("one")
    driver.engine.unload("two")
    assert driver.engine.statistics().memory.committed["weights"] == before


def test_an_adapter_reloaded_under_its_name_reuses_only_what_its_content_computed(
    tmp_path: Path,
) -> None:
    driver = driver_of()
    base = driver.engine.model
    first = write_adapter(tmp_path / "first", base.model, seed=1)
    second = write_adapter(tmp_path / "second", base.model, seed=2)
    answers = []
    for name, folder, hits in (
        ("legal", first, False),
        ("legal", second, False),
        ("again", first, True),
    ):
        driver.engine.load(name, ModelSource(str(folder), base=base.name))
        (box,) = run(driver, asked(0, name))
        check_served(driver, asked(0, name), box)
        assert (ram_tokens(box) > 0) is hits
        answers.append(box.tokens)
        driver.engine.unload(name)
    assert answers[0] == answers[2] != answers[1]
    driver.check_idle()


def test_what_an_unloaded_model_computed_serves_it_when_it_is_back() -> None:
    driver = driver_of()
    driver.engine.load("other", ModelSource(OTHER))
    run(driver, asked(0, "other"))
    assert driver.engine.unload("other") == ["other"]
    with pytest.raises(ModelNotFound, match="'other'"):
        driver.engine.roster.serving("other")
    (box,) = run(driver, asked(0, "other"))
    assert isinstance(box.error, ModelNotFound)
    driver.engine.load("back", ModelSource(OTHER))
    (box,) = run(driver, asked(0, "back"))
    assert ram_tokens(box) == len(prompt(0)) - 1
    check_served(driver, asked(0, "back"), box)
    driver.check_idle()


def test_a_model_that_nobody_uses_leaves_memory_and_comes_back_when_asked_for() -> None:
    clock = Clock()
    driver = driver_of(clock=clock, idle_unload=60.0)
    engine = driver.engine
    engine.load("other", ModelSource(OTHER))
    engine.alias("second", "other")
    run(driver, asked(0, "second"))
    weights = engine.statistics().memory.committed["weights"]
    clock.now += 59.0
    run(driver, asked(0))
    assert [info.loaded for info in engine.models()] == [True, True]
    clock.now += 30.0
    run(driver, asked(1))
    assert [info.loaded for info in engine.models()] == [True, False]
    assert engine.statistics().memory.committed["weights"] < weights
    assert engine.patience() <= 60.0
    (box,) = run(driver, asked(1, "other"))
    check_served(driver, asked(1, "other"), box)
    assert ram_tokens(box) > 0
    assert engine.statistics().memory.committed["weights"] == weights
    clock.now += 1000.0
    run(driver, asked(1, "other"))
    assert [info.loaded for info in engine.models()] == [False, True]
    (box,) = run(driver, asked(2))
    check_served(driver, asked(2), box)
    driver.check_idle()


def test_a_model_with_open_requests_or_adapters_in_use_never_goes(tmp_path: Path) -> None:
    clock = Clock()
    driver = driver_of(clock=clock, idle_unload=10.0)
    driver.engine.load("other", ModelSource(OTHER))
    where = write_adapter(tmp_path, driver.engine.roster.serving("other").model.model)
    driver.engine.load("legal", ModelSource(str(where), base="other"))
    box = driver.submit(asked(0, "legal", max_tokens=60))
    driver.decode_all([box], 3)
    for name in ("other", "legal"):
        with pytest.raises(ModelBusy, match="1 open request"):
            driver.engine.unload(name)
    clock.now += 100.0
    driver.decode_all([box], 6)
    assert [info.loaded for info in driver.engine.models()] == [False, True, True]
    driver.run()
    assert driver.engine.unload("other") == ["other", "legal"]
    check_served(driver, asked(0), run(driver, asked(0))[0])
    driver.check_idle()


def test_names_that_are_taken_unknown_or_the_first_are_refused() -> None:
    driver = driver_of()
    engine, first = driver.engine, driver.engine.model.name
    for refused in (
        lambda: engine.load(first, ModelSource(OTHER)),
        lambda: engine.load("", ModelSource(OTHER)),
        lambda: engine.alias(first, first),
        lambda: engine.unload(first),
    ):
        with pytest.raises(InvalidRequest):
            refused()
    with pytest.raises(ModelNotFound, match="nobody"):
        engine.load("legal", ModelSource("somewhere", base="nobody"))
    with pytest.raises(ModelNotFound):
        engine.load("lost", ModelSource("no/such/folder/anywhere"))
    assert [info.name for info in engine.models()] == [first]
    assert engine.alias("short", first).aliases == ("short",)
    check_served(driver, asked(0, "short"), run(driver, asked(0, "short"))[0])


def test_a_model_that_does_not_fit_is_refused_with_the_numbers_and_nothing_changes() -> None:
    first = load(TINY)
    weights = weight_bytes(first)
    driver = Driver(first, memory=weights + (150 << 10))
    box = driver.submit(asked(0, max_tokens=20))
    driver.decode_all([box], 2)
    with pytest.raises(OutOfMemory, match=r"the weights of 'other' take .* the limit is"):
        driver.engine.load("other", ModelSource(OTHER))
    assert driver.engine.statistics().memory.committed["weights"] == weights
    driver.run()
    check_served(driver, asked(0), box)
    with pytest.raises(OutOfMemory, match=r"of which .* are in use"):
        driver.engine.load("larger", ModelSource(OTHER.replace("layers=2", "layers=9")))
    assert [info.loaded for info in driver.engine.models()] == [True]
    driver.check_idle()


def test_models_that_nobody_uses_make_room_for_one_that_is_asked_for() -> None:
    first = load(TINY)
    memory = weight_bytes(first) + weight_bytes(load(OTHER)) + (300 << 10)
    driver = Driver(first, memory=memory)
    for name in ("other", "third"):
        driver.engine.load(name, ModelSource(OTHER))
    loaded = [info.loaded for info in driver.engine.models()]
    assert loaded == [False, True, True]
    seen = driver.recorder.events()
    assert [e.reason for e in seen if isinstance(e, events.ModelUnloaded)] == ["memory"]
    check_served(driver, asked(0), run(driver, asked(0))[0])
    driver.check_idle()


@pytest.mark.parametrize("fits", [True, False])
def test_a_draft_never_takes_the_place_of_the_model_that_it_is_for(fits: bool) -> None:
    """Neither has an open request while the first one for both is being prepared."""
    model, small = load(TINY), load(TINY.replace("hidden=64", "hidden=16"))
    weights = weight_bytes(model)
    limit = weight_bytes(small) + int((2.2 if fits else 1.5) * weights)
    driver = Driver(small, ram=0, memory=limit)
    driver.engine.load("target", ModelSource(TINY))
    driver.engine.load("draft", ModelSource(TINY.replace("seed=3", "seed=4")))
    (box,) = run(driver, replace(asked(0, "target"), draft="draft"))
    if fits:
        check_served(driver, asked(0, "target"), box)
    else:
        assert isinstance(box.error, OutOfMemory)
    driver.check_idle()


def test_a_step_that_fails_ends_the_rows_of_its_model_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = driver_of()
    driver.engine.load("other", ModelSource(OTHER))
    boxes = [driver.submit(asked(0, model, max_tokens=20)) for model in ("", "other")]
    driver.decode_all(boxes, 3)
    lane: Any = driver.engine.roster.serving("other").batch

    def fail() -> None:
        monkeypatch.undo()
        raise RuntimeError("no more")

    monkeypatch.setattr(lane, "step", fail)
    driver.run()
    assert isinstance(boxes[1].error, EngineFailed)
    check_served(driver, asked(0), boxes[0])
    (box,) = run(driver, asked(1, "other"))
    check_served(driver, asked(1, "other"), box)
    driver.check_idle()


def test_the_cold_tier_says_which_model_its_files_are_of(tmp_path: Path) -> None:
    driver = driver_of(cold=tmp_path)
    driver.engine.load("other", ModelSource(OTHER))
    driver.engine.load("draft", ModelSource(TINY.replace("layers=2", "layers=1")))
    run(driver, replace(asked(0), draft="draft"), asked(0, "other"))
    assert driver.engine.flush(30.0).writes == 0
    stored = {found.model for found in namespaces(tmp_path)}
    models = (driver.engine.roster.serving(name).model for name in ("", "other", "draft"))
    assert stored == {model.name for model in models}
    driver.check_idle()
    driver.engine.close()


def folder_of(spec: str, folder: Path) -> Path:
    """A synthetic model as a stock directory, in place of what is there."""
    model = load(spec)
    shutil.rmtree(folder, ignore_errors=True)
    save_model(folder, model.model)
    save_config(dict(model.config), folder / "config.json")
    model.tokenizer.save_pretrained(folder)
    return folder


def with_another_tokenizer(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "clean_up": 1}))


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (shutil.rmtree, ModelNotFound, "does not exist"),
        (with_another_tokenizer, ModelUnreadable, "'other' .* differs in tokenizer; load that"),
        (
            lambda folder: folder_of(OTHER.replace("seed=5", "seed=6"), folder),
            ModelUnreadable,
            "'other' .* differs in weights; load that",
        ),
        (
            lambda folder: folder_of(OTHER.replace("context=256", "context=128"), folder),
            ModelUnreadable,
            "'other' .* differs in config; load that",
        ),
    ],
)
def test_a_model_that_comes_back_as_another_one_is_refused(
    tmp_path: Path, change: Callable[[Path], object], error: type[Exception], said: str
) -> None:
    clock = Clock()
    driver = driver_of(clock=clock, idle_unload=10.0)
    folder = folder_of(OTHER, tmp_path / "model")
    driver.engine.load("other", ModelSource(str(folder)))
    weights = driver.engine.ledger.used(Purpose.WEIGHTS)
    (before,) = run(driver, asked(0, "other"))
    clock.now += 11.0
    driver.run(1)
    change(folder)
    clock.now += 1.0
    (box,) = run(driver, asked(0), asked(0, "other"))[1:]
    assert isinstance(box.error, error)
    assert re.search(said, str(box.error))
    folder_of(OTHER, folder)
    (box,) = run(driver, asked(0, "other"))
    assert box.tokens == before.tokens
    assert ram_tokens(box) > 0
    assert driver.engine.ledger.used(Purpose.WEIGHTS) == weights
    driver.check_idle()


def test_a_draft_is_not_loaded_at_the_expense_of_the_model_that_it_is_for() -> None:
    first, draft = load(TINY), TINY.replace("layers=2", "layers=1")
    driver = Driver(first, memory=weight_bytes(first) + (100 << 10))
    driver.engine.load("draft", ModelSource(draft))
    assert [info.loaded for info in driver.engine.models()] == [False, True]
    (box,) = run(driver, replace(asked(0), draft="draft"))
    assert isinstance(box.error, OutOfMemory)
    assert re.search("the weights of 'draft' take", str(box.error))
    assert [info.loaded for info in driver.engine.models()] == [True, False]
    check_served(driver, asked(0), run(driver, asked(0))[0])
    driver.check_idle()


def test_an_adapter_and_the_model_under_it_make_room_together(tmp_path: Path) -> None:
    first = load(TINY)
    driver = Driver(first, memory=weight_bytes(first) + weight_bytes(load(OTHER)) + (180 << 10))
    driver.engine.load("other", ModelSource(OTHER))
    where = write_adapter(tmp_path, driver.engine.roster.serving("other").model.model)
    driver.engine.load("legal", ModelSource(str(where), base="other"))
    box = driver.submit(asked(0, max_tokens=60))
    driver.decode_all([box], 3)
    driver.engine.load("third", ModelSource(OTHER))
    assert [info.loaded for info in driver.engine.models()] == [True, False, False, True]
    driver.run()
    check_served(driver, asked(0), box)
    driver.check_idle()


def test_an_adapter_that_nobody_uses_takes_the_model_under_it_along(tmp_path: Path) -> None:
    clock = Clock()
    driver = driver_of(clock=clock, idle_unload=40.0)
    driver.engine.load("other", ModelSource(OTHER))
    where = write_adapter(tmp_path, driver.engine.roster.serving("other").model.model)
    driver.engine.load("legal", ModelSource(str(where), base="other"))
    clock.now += 30.0
    run(driver, asked(0, "legal"))
    clock.now += 30.0
    run(driver, asked(0))
    assert [info.loaded for info in driver.engine.models()] == [True, True, True]
    clock.now += 15.0
    driver.run(1)
    assert [info.loaded for info in driver.engine.models()] == [True, False, False]
    check_served(driver, asked(0, "legal"), run(driver, asked(0, "legal"))[0])
    driver.check_idle()


@pytest.mark.parametrize("cold", [False, True])
def test_the_cache_gives_way_to_a_model_before_other_models_do(tmp_path: Path, cold: bool) -> None:
    first = load(TINY)
    memory = weight_bytes(first) + 2 * weight_bytes(load(OTHER)) + (90 << 10)
    driver = Driver(first, ram=400 << 10, memory=memory, cold=tmp_path if cold else None)
    driver.engine.load("other", ModelSource(OTHER))
    for agent in range(6):
        tokens = [200 + agent, *((7 * agent + 3 * at) % 200 + 10 for at in range(150))]
        run(driver, Request(tokens=tokens, max_tokens=1))
        run(driver, Request(tokens=[*tokens[:100], 3], max_tokens=1))
    held = driver.engine.cache.total_bytes
    assert held > 300 << 10
    driver.engine.load("third", ModelSource(OTHER))
    assert [info.loaded for info in driver.engine.models()] == [True, True, True]
    assert 0 < driver.engine.cache.total_bytes < held
    driver.engine.check_integrity()
    driver.engine.close()


def test_looks_for_idle_models_leave_the_thread_its_rest() -> None:
    driver = driver_of(clock=Clock(), idle_unload=1e-9)
    driver.run()
    assert driver.engine.patience() >= 0.01
