"""A broker with several models: names, adapters, what goes on meanwhile, and wrong input."""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from mlx_swarm import Broker, Swarm
from mlx_swarm.broker import (
    BrokerClosed,
    InvalidRequest,
    InvalidSetting,
    Message,
    ModelBusy,
    ModelError,
    ModelNotFound,
    Request,
)
from mlx_swarm.broker.models import load
from tests.models.tiny_adapter import write_adapter
from tests.tiny_broker import TINY, check_idle, inside, prompt, reference, request, tiny

pytestmark = pytest.mark.anyio

OTHER = "synthetic:qwen3?layers=2&hidden=64&heads=4&kv_heads=2&intermediate=128&context=256&seed=5"


async def expected(broker: Broker, asked: Request) -> tuple[int, ...]:
    """The greedy tokens of mlx-lm alone."""
    return await inside(
        broker,
        lambda engine: reference(
            engine.roster.serving(asked.model).model, asked.tokens, asked.max_tokens
        ),
    )


async def test_requests_name_a_model_an_alias_or_an_adapter(tmp_path: Path) -> None:
    write_adapter(tmp_path, load(TINY).model, seed=1)
    async with tiny() as broker:
        other = await broker.load(OTHER, name="other")
        assert (other.name, other.base, other.loaded) == ("other", "", True)
        assert (await broker.alias("second", "other")).aliases == ("second",)
        legal = await broker.load_adapter(tmp_path, name="legal")
        assert legal.base == broker.model_name
        answers = {}
        async with anyio.create_task_group() as group:

            async def ask(model: str) -> None:
                answers[model] = await broker.complete(request(1, model=model))

            for model in ("", "other", "second", "legal", broker.model_name):
                group.start_soon(ask, model)
        for model, answer in answers.items():
            assert answer.tokens == await expected(broker, request(1, model=model))
        assert [info.name for info in await broker.models()] == [
            broker.model_name,
            "other",
            "legal",
        ]
        await broker.unload("other")
        with pytest.raises(ModelNotFound, match="'second'"):
            await broker.complete(request(1, model="second"))
        with pytest.raises(ModelNotFound, match="'other'"):
            await broker.encode("text", model="other")
        await check_idle(broker)


async def test_running_requests_live_through_a_load_and_an_unload() -> None:
    async with tiny() as broker:
        long = request(0, max_tokens=60)
        async with broker.stream(long) as stream:
            tokens: list[int] = []
            async for event in stream:
                tokens += getattr(event, "tokens", ()) if type(event).__name__ == "Delta" else ()
                if len(tokens) == 3:
                    await broker.load(OTHER, name="other")
                    await broker.unload("other")
        assert tuple(tokens) == await expected(broker, long)
        await check_idle(broker)


async def test_a_model_in_use_stays_and_says_so() -> None:
    async with tiny() as broker:
        await broker.load(OTHER, name="other")
        async with broker.stream(request(0, model="other", max_tokens=100)) as stream:
            await anext(stream)
            with pytest.raises(ModelBusy, match="1 open request"):
                await broker.unload("other")
        await check_idle(broker)


async def test_what_cannot_be_loaded_changes_nothing(tmp_path: Path) -> None:
    async with tiny() as broker:
        with pytest.raises(ModelNotFound):
            await broker.load("./nowhere", name="other")
        with pytest.raises(ModelError):
            await broker.load_adapter(tmp_path / "nowhere", name="legal")
        with pytest.raises(ModelNotFound, match="'nobody'"):
            await broker.load_adapter(tmp_path, name="legal", base="nobody")
        with pytest.raises(InvalidRequest, match="is taken"):
            await broker.load(OTHER, name=broker.model_name)
        with pytest.raises(InvalidRequest):
            await broker.alias("", broker.model_name)
        with pytest.raises(InvalidRequest, match="it stays"):
            await broker.unload(broker.model_name)
        with pytest.raises(ModelNotFound):
            await broker.complete(request(0, model="other"))
        assert len(await broker.models()) == 1
        await check_idle(broker)


async def test_closing_the_broker_ends_a_load() -> None:
    async with tiny() as broker:
        async with anyio.create_task_group() as group:

            async def load_for_ever() -> None:
                while True:
                    await broker.load(OTHER, name="other")
                    await broker.unload("other")

            async def ask() -> None:
                with pytest.raises(BrokerClosed):
                    await load_for_ever()

            group.start_soon(ask)
            await anyio.sleep(0.05)
            await broker.aclose()


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), "soon"])
def test_idle_unload_is_a_number_of_seconds(seconds: float) -> None:
    with pytest.raises(InvalidSetting, match="idle_unload is"):
        tiny(idle_unload=seconds)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda broker: broker.load(OTHER, name=3), "name is 3; it must be text"),
        (lambda broker: broker.load_adapter("folder", name="a", base=[]), "base is \\[\\]"),
        (lambda broker: broker.alias("a", []), "existing is \\[\\]; it must be text"),
        (lambda broker: broker.unload([]), "name is \\[\\]; it must be text"),
        (lambda broker: broker.encode("text", model=[]), "model is \\[\\]; it must be text"),
        (lambda broker: broker.pin(1.0, agent=""), "agent is empty"),
    ],
)
async def test_what_names_nothing_is_refused_before_anything_happens(
    call: Callable[[Broker], Awaitable[object]], reason: str
) -> None:
    async with tiny() as broker:
        with pytest.raises(InvalidRequest, match=reason):
            await call(broker)
        assert [info.aliases for info in await broker.models()] == [()]


async def test_a_model_is_named_by_text_or_a_path() -> None:
    async with tiny() as broker:
        nothing: Any = []
        with pytest.raises(ModelNotFound, match=r"no model \[\]: a model is named by text"):
            await broker.load(nothing)


def test_wired_is_yes_or_no() -> None:
    with pytest.raises(InvalidSetting, match="wired is 'no'; it must be True or False"):
        tiny(wired="no")


async def test_a_folder_may_be_a_path(tmp_path: Path) -> None:
    async with tiny() as broker:
        with pytest.raises(ModelError, match=str(tmp_path)):
            await broker.load(tmp_path)


async def test_agents_of_one_swarm_may_run_on_different_models(tmp_path: Path) -> None:
    write_adapter(tmp_path, load(TINY).model, seed=1)
    async with tiny() as broker:
        await broker.load_adapter(tmp_path, name="legal")
        async with Swarm(broker, instructions="Be brief.", max_tokens=6) as swarm:
            plain, legal = swarm.spawn("Hello."), swarm.spawn("Hello.", model="legal")
            assert await plain != await legal
        rendered = await broker.render([Message("user", "Hello.")], model="legal")
        assert rendered.tokens == (await broker.render([Message("user", "Hello.")])).tokens
        await check_idle(broker)
        with pytest.raises(InvalidRequest, match="model"):
            broker.stream(Request(tokens=prompt(0), model=3))  # type: ignore[arg-type]


async def test_a_load_that_is_cancelled_leaves_nothing() -> None:
    async with tiny() as broker:
        for seconds in (0.0, 0.001, 0.005, 0.02, 0.08):
            with anyio.move_on_after(seconds) as scope:
                await broker.load(OTHER, name="other")
            if not scope.cancelled_caught:
                await broker.unload("other")
            assert len(await broker.models()) == 1
            await broker.load(OTHER, name="other")
            assert await broker.encode("Hello", model="other")
            await broker.unload("other")
        await check_idle(broker)


async def test_names_and_texts_agree_whatever_happens_at_the_same_time() -> None:
    async with tiny() as broker:
        for _ in range(4):
            async with anyio.create_task_group() as group:

                async def attempt(call: Callable[..., Awaitable[object]], *given: str) -> None:
                    with suppress(InvalidRequest, ModelNotFound):
                        await call(*given)

                for turn in range(3):
                    group.start_soon(attempt, partial(broker.load, OTHER, name="other"))
                    for number in range(10):
                        name = f"alias {turn} {number}"
                        group.start_soon(attempt, broker.alias, name, "other")
                        await anyio.sleep(0.0005)
                    group.start_soon(attempt, broker.unload, "other")
                    group.start_soon(attempt, broker.alias, f"late {turn}", "other")
            for info in await broker.models():
                for name in (info.name, *info.aliases):
                    assert await broker.encode("Hello", model=name)
            await attempt(broker.unload, "other")
            with pytest.raises(ModelNotFound):
                await broker.encode("Hello", model="other")
        await check_idle(broker)


@pytest.mark.parametrize("wrong", [3, None, [], b"bytes"])
async def test_what_is_no_name_is_told_so(wrong: Any) -> None:
    async with tiny() as broker:
        for call in (
            lambda: broker.load_adapter("folder", name=wrong),
            lambda: broker.alias("second", wrong),
            lambda: broker.alias(wrong, broker.model_name),
            lambda: broker.unload(wrong),
            lambda: broker.encode("text", model=wrong),
            lambda: broker.render([Message("user", "text")], model=wrong),
        ):
            with pytest.raises(InvalidRequest, match="must be text"):
                await call()
        with pytest.raises(ModelNotFound, match="named by text or a path"):
            await broker.load(wrong, name="other")
        assert len(await broker.models()) == 1


async def test_a_model_may_be_named_by_its_path(tmp_path: Path) -> None:
    async with tiny() as broker:
        with pytest.raises(ModelNotFound, match="nowhere does not exist"):
            await broker.load(tmp_path / "nowhere")
