"""What is kept of responses: chains, tenants and a bound on bytes."""

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_swarm.broker.server.errors import ApiError
from mlx_swarm.broker.server.responses.live import LiveRuns
from mlx_swarm.broker.server.responses.objects import OutputMessage, OutputText, Response
from mlx_swarm.broker.server.responses.store import ResponseStore, Stored, Stores

PLENTY = 1 << 30


def stored(name: str, parent: Stored | None = None, **fields: Any) -> Stored:
    output = OutputMessage(
        id=f"msg_{name}", status="completed", content=(OutputText(f"reply {name}"),)
    )
    response = Response(
        id=name,
        created_at=0,
        model="m",
        output=(output,),
        temperature=1.0,
        text={},
        store=fields.pop("store", True),
    )
    question = {"type": "message", "id": f"in_{name}", "role": "user", "content": name}
    return Stored(response=response, input=(question,), parent=parent, **fields)


def present(store: ResponseStore, names: Iterable[str]) -> set[str]:
    return {name for name in names if store.find(name, "") is not None}


def test_any_number_of_responses_continue_one() -> None:
    store = ResponseStore(PLENTY)
    root = stored("a")
    forks = [stored(f"b{number}", root) for number in range(3)]
    for each in (root, *forks):
        store.put(each)
    assert all(fork.chain() == [root, fork] for fork in forks)
    assert store.bytes == sum(each.bytes for each in (root, *forks))
    store.check_integrity()


def test_the_least_recently_used_goes_first_and_never_what_others_continue() -> None:
    root, other = stored("a"), stored("x")
    tip = stored("b", root)
    store = ResponseStore(root.bytes + other.bytes + tip.bytes)
    store.put(root)
    store.put(other)
    store.put(tip)
    store.find("x", "")
    store.put(stored("y"))
    assert present(store, "abxy") == {"a", "x", "y"}
    store.check_integrity()


def test_what_was_deleted_lives_on_in_what_continues_it() -> None:
    store = ResponseStore(PLENTY)
    root = stored("a")
    tip = stored("b", root)
    store.put(root)
    store.put(tip)
    assert store.delete("a", "")
    assert not store.delete("a", "")
    assert store.find("a", "") is None
    assert store.find_item("in_a", "") is None
    found = store.find("b", "")
    assert found is not None
    assert [each.id for each in found.chain()] == ["a", "b"]
    assert store.bytes == root.bytes + tip.bytes
    assert store.delete("b", "")
    assert (store.bytes, len(store)) == (0, 0)
    store.check_integrity()


def test_a_response_too_large_for_the_store_is_not_kept() -> None:
    store = ResponseStore(10)
    store.put(stored("a"))
    assert (store.bytes, len(store)) == (0, 0)
    store.check_integrity()


def test_tenants_see_only_their_own() -> None:
    store = ResponseStore(PLENTY)
    store.put(stored("a", tenant="one"))
    assert store.find("a", "two") is None
    assert store.find_item("in_a", "two") is None
    assert not store.delete("a", "two")
    assert store.find("a", "one") is not None
    assert store.find_item("msg_a", "one") is not None


def test_a_connection_keeps_what_is_not_to_be_stored() -> None:
    shared = Stores(ResponseStore(PLENTY), LiveRuns())
    connection, other = shared.of_connection(PLENTY), shared.of_connection(PLENTY)
    root = stored("a")
    connection.keep(root)
    tip = stored("b", root, store=False)
    connection.keep(tip)
    shared.keep(stored("c", store=False))
    assert shared.previous("a", "") is root
    assert connection.previous("b", "") is tip
    for stores, name in ((shared, "b"), (other, "b"), (shared, "c")):
        with pytest.raises(ApiError) as refused:
            stores.previous(name, "")
        assert refused.value.code == "previous_response_not_found"
        assert refused.value.param == "previous_response_id"
    assert connection.own is not None
    assert connection.own.find("a", "") is None
    connection.own.check_integrity()


def test_a_conversation_of_many_turns_goes_at_once() -> None:
    store = ResponseStore(PLENTY)
    last = None
    for number in range(5_000):
        last = stored(str(number), last)
    assert last is not None
    store.put(last)
    store.check_integrity()
    assert len(last.chain()) == 5_000
    store.delete(last.id, "")
    assert store.bytes == 0
    del last


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["put", "fork", "find", "delete"]), st.integers(0, 7)),
        max_size=30,
    ),
    room=st.integers(1, 6),
)
def test_totals_and_chains_hold_whatever_happens(steps: list[tuple[str, int]], room: int) -> None:
    store = ResponseStore(room * stored("00").bytes)
    known = [stored("r")]
    for number, (step, which) in enumerate(steps):
        chosen = known[which % len(known)]
        match step:
            case "put":
                known.append(stored(f"{number:02}"))
                store.put(known[-1])
            case "fork":
                known.append(stored(f"{number:02}", chosen))
                store.put(known[-1])
            case "find":
                store.find(chosen.id, "")
            case "delete":
                store.delete(chosen.id, "")
        store.check_integrity()
