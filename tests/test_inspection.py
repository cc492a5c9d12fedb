"""The prompt cache of an open broker, looked into and steered by hand."""

from pathlib import Path

import pytest

from mlx_swarm.broker import Broker, CacheError, InvalidRequest, ModelNotFound
from tests.tiny_broker import SHARED, inside, prompt, request, tiny

pytestmark = pytest.mark.anyio


async def filled(broker: Broker, tenant: str = "") -> None:
    for agent in range(3):
        await broker.complete(request(agent, tenant=tenant))


async def test_a_plan_changes_nothing() -> None:
    async with tiny() as broker:
        view = broker.cache_view
        await filled(broker)
        before = await broker.statistics()
        plan = await view.plan([*SHARED, 9, 9])
        assert plan.ram_tokens == len(SHARED)
        assert plan.reason == "diverged"
        assert (await view.plan(prompt(0))).to_prefill == 1
        assert (await view.plan([*SHARED], tenant="other")).ram_tokens == 0
        after = await broker.statistics()
        assert after.engine.cache.total == before.engine.cache.total


async def test_entries_and_namespaces() -> None:
    async with tiny() as broker:
        view = broker.cache_view
        await filled(broker)
        await filled(broker, "acme")
        (own,) = await view.namespaces()
        (other,) = await view.namespaces("acme")
        assert own.namespace == view.namespace()
        assert other.namespace == view.namespace(tenant="acme")
        assert own.model == other.model == broker.model_name
        assert {each.namespace for each in await view.namespaces(None)} == {
            own.namespace,
            other.namespace,
        }
        listing = await view.entries(own.namespace)
        assert listing.total == len(listing.entries)
        assert sum(each.own_tokens for each in listing.entries) <= own.statistics.tokens
        for each in listing.entries:
            assert 0 < each.own_bytes <= each.bytes <= own.statistics.total_bytes
        pages = [
            (await view.entries(own.namespace, offset=at, limit=1)).entries[0]
            for at in range(listing.total)
        ]
        assert [each.name for each in pages] == [each.name for each in listing.entries]
        assert (await view.entries("nobody's")).total == 0


async def test_pins_are_seen_and_refused_beyond_half() -> None:
    async with tiny() as broker:
        view = broker.cache_view
        await filled(broker)
        pinned = await view.pin(prompt(0), 60.0)
        assert pinned == len(prompt(0))
        entries = (await view.entries(view.namespace())).entries
        assert max(each.pinned_tokens for each in entries) == pinned
        assert await view.unpin(prompt(0)[:pinned]) == pinned
        entries = (await view.entries(view.namespace())).entries
        assert not any(each.pinned_tokens for each in entries)
        size = await inside(broker, lambda engine: engine.cache.total_bytes)
        await inside(broker, lambda engine: setattr(engine.cache._steering, "_limit", size // 8))
        with pytest.raises(CacheError, match="would be pinned"):
            await view.pin(prompt(0), 60.0)


async def test_a_tenant_clears_its_own() -> None:
    async with tiny() as broker:
        view = broker.cache_view
        await filled(broker)
        await filled(broker, "acme")
        assert await view.clear(tenant="nobody") == 0
        assert await view.clear(tenant="acme") > len(SHARED)
        assert (await view.plan(prompt(0))).to_prefill == 1
        assert (await view.plan(prompt(0), tenant="acme")).ram_tokens == 0
        await filled(broker, "acme")
        assert await view.clear(model=broker.model_name, tenant=None) > 0
        assert (await view.plan(prompt(0))).ram_tokens == 0
        assert await view.clear(tenant=None) > 0
        assert (await view.plan(prompt(0), tenant="acme")).ram_tokens == 0


async def test_a_flush_writes_what_a_tenant_has(tmp_path: Path) -> None:
    async with tiny(cold=tmp_path) as broker:
        view = broker.cache_view
        await filled(broker)
        await filled(broker, "acme")
        left = await view.flush(30.0, tenant="acme")
        assert (left.writes, left.bytes) == (0, 0)
        (other,) = await view.namespaces("acme")
        assert other.statistics.undurable_bytes == 0
        assert (await view.flush(30.0, tenant=None)).writes == 0


async def test_what_is_wrong_is_refused() -> None:
    async with tiny() as broker:
        view = broker.cache_view
        with pytest.raises(ModelNotFound):
            await view.plan([1], model="none")
        with pytest.raises(InvalidRequest):
            await view.plan([-1])
        with pytest.raises(InvalidRequest):
            await view.pin([1], 0.0)
        with pytest.raises(InvalidRequest):
            await view.entries("", limit=10**6)
        with pytest.raises(InvalidRequest):
            await view.flush(1e9)
