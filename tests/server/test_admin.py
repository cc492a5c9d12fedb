"""The administrative endpoints over HTTP: what they tell, what they do, and whose it is."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from mlx_swarm.broker.server.admin.cache_bodies import (
    ClearAnswer,
    EntryList,
    FlushAnswer,
    NamespaceList,
    PinAnswer,
    PlanAnswer,
    WarmAnswer,
)
from mlx_swarm.broker.server.admin.model_routes import ModelList
from mlx_swarm.broker.server.admin.text_routes import Detokenized, Tokenized
from mlx_swarm.broker.server.admin.trace_feed import TraceAnswer
from mlx_swarm.broker.trace import events
from tests.server.administered import KEYED, SURFACES, administered, client

SAID = "A long enough text that is said again and again, more than a page of tokens of bytes. "
MESSAGES = {
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
}


@pytest.fixture(scope="module")
def patched() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def url(patched: pytest.MonkeyPatch) -> Iterator[str]:
    with administered(patched) as url:
        yield url


@pytest.fixture(scope="module")
def keyed_url(patched: pytest.MonkeyPatch) -> Iterator[str]:
    with administered(patched, KEYED) as url:
        yield url


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with client(url) as http:
        http.delete("/v1/cache").raise_for_status()
        yield http


@pytest.fixture
def first(keyed_url: str) -> Iterator[httpx.Client]:
    with client(keyed_url, "one") as first:
        first.delete("/v1/cache").raise_for_status()
        yield first


@pytest.fixture
def second(keyed_url: str) -> Iterator[httpx.Client]:
    with client(keyed_url, "two") as second:
        second.delete("/v1/cache").raise_for_status()
        yield second


def post(http: httpx.Client, path: str, **body: Any) -> Any:
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def error(response: httpx.Response, status: int) -> Any:
    assert response.status_code == status, response.text
    return response.json()["error"]


def samples(http: httpx.Client) -> dict[tuple[str, str], float]:
    """The metrics by name and last label."""
    response = http.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    families = text_string_to_metric_families(response.text)
    found: dict[tuple[str, str], float] = {}
    for sample in (sample for family in families for sample in family.samples):
        assert sample.name.startswith("mlx_swarm_")
        last = [*sample.labels.values(), ""][max(len(sample.labels) - 1, 0)]
        key = sample.name.removeprefix("mlx_swarm_"), last
        found[key] = found.get(key, 0) + sample.value
    return found


class TestCache:
    def test_a_prompt_is_planned_warmed_and_planned_again(self, http: httpx.Client) -> None:
        before = post(http, "/v1/cache/plan", text=SAID)
        assert (before["ram_tokens"], before["reason"]) == (0, "cold_start")
        warmed = post(http, "/v1/cache/warm", text=SAID)
        assert warmed["prefilled_tokens"] == warmed["prompt_tokens"] == before["prompt_tokens"]
        after = post(http, "/v1/cache/plan", text=SAID)
        assert after["prefill_tokens"] == 1
        assert after["reason"] is None
        other = post(http, "/v1/cache/plan", text=f"{SAID[:40]}else")
        assert other["reason"] == "diverged"
        assert other["divergence"]["index"] == other["ram_tokens"] == 40

    def test_messages_are_planned_as_they_are_answered(self, http: httpx.Client) -> None:
        post(http, "/v1/cache/warm", **MESSAGES)
        plan = post(http, "/v1/cache/plan", **MESSAGES)
        assert plan["prefill_tokens"] == 1
        assert plan["boundaries"]

    def test_pins_hold_and_end(self, http: httpx.Client) -> None:
        assert post(http, "/v1/cache/pin", text=SAID)["tokens"] == 0
        post(http, "/v1/cache/warm", text=SAID)
        pinned = post(http, "/v1/cache/pin", text=SAID, seconds=60)
        assert 0 < pinned["tokens"] <= pinned["prompt_tokens"]
        (namespace,) = [each for each in http.get("/v1/cache").json()["data"] if each["tokens"]]
        assert namespace["pinned_bytes"] > 0
        tokens = post(http, "/tokenize", text=SAID)["tokens"][: pinned["tokens"]]
        assert post(http, "/v1/cache/pin", tokens=tokens, seconds=0)["tokens"] == pinned["tokens"]

    def test_entries_come_in_pages_the_last_used_first(self, http: httpx.Client) -> None:
        for word in ("one", "two", "three"):
            post(http, "/v1/cache/warm", text=SAID + word)
        (name,) = [e["namespace"] for e in http.get("/v1/cache").json()["data"] if e["tokens"]]
        whole = http.get("/v1/cache", params={"namespace": name}).json()
        assert whole["total"] == len(whole["data"]) >= 3
        assert not whole["has_more"]
        idle = [each["idle_seconds"] for each in whole["data"]]
        assert idle == sorted(idle)
        assert all(each["tier"] == "ram" and each["bytes"] > 0 for each in whole["data"])
        page = http.get("/v1/cache", params={"namespace": name, "offset": 1, "limit": 1}).json()
        assert [each["name"] for each in page["data"]] == [whole["data"][1]["name"]]
        assert page["has_more"]
        assert page["next_offset"] == 2

    def test_what_is_cleared_is_gone(self, http: httpx.Client) -> None:
        warmed = post(http, "/v1/cache/warm", text=SAID)
        cleared = http.delete("/v1/cache").json()
        assert cleared["tokens"] >= warmed["prompt_tokens"]
        assert post(http, "/v1/cache/plan", text=SAID)["ram_tokens"] == 0

    def test_without_a_cold_tier_all_is_left_to_write(self, http: httpx.Client) -> None:
        post(http, "/v1/cache/warm", text=SAID)
        assert post(http, "/v1/cache/flush", seconds=1)["writes_left"] > 0
        assert http.post("/v1/cache/flush").json()["object"] == "cache.flushed"

    @pytest.mark.parametrize(
        ("path", "body", "status", "param"),
        [
            ("plan", {}, 400, "prompt"),
            ("plan", {"text": "a", "tokens": [1]}, 400, "prompt"),
            ("plan", {"tokens": []}, 400, "tokens"),
            ("plan", {"tokens": [-1]}, 400, "tokens[0]"),
            ("plan", {"text": "a", "model": "none"}, 404, "model"),
            ("pin", {"text": "a", "seconds": -1}, 400, None),
            ("pin", {"text": "a", "seconds": 1e9}, 400, None),
            ("warm", {"tokens": [100000]}, 400, "tokens"),
            ("flush", {"seconds": 1e9}, 400, None),
            ("plan", {"messages": [{"role": "nobody"}]}, 400, "messages[0].role"),
        ],
    )
    def test_what_is_wrong_is_refused(
        self, http: httpx.Client, path: str, body: Any, status: int, param: str | None
    ) -> None:
        assert error(http.post(f"/v1/cache/{path}", json=body), status)["param"] == param

    @pytest.mark.parametrize("query", ["limit=-1", "limit=1001", "offset=x", "limit=٣"])
    def test_so_are_wrong_pages(self, http: httpx.Client, query: str) -> None:
        post(http, "/v1/cache/warm", text=SAID)
        name = http.get("/v1/cache").json()["data"][0]["namespace"]
        error(http.get(f"/v1/cache?namespace={name}&{query}"), 400)
        error(http.get("/v1/cache?namespace=none"), 404)

    def test_tenants_see_and_touch_their_own(
        self, first: httpx.Client, second: httpx.Client
    ) -> None:
        post(first, "/v1/cache/warm", text=SAID)
        mine = [each for each in first.get("/v1/cache").json()["data"] if each["tokens"]]
        assert len(mine) == 1
        assert not [each for each in second.get("/v1/cache").json()["data"] if each["tokens"]]
        name = mine[0]["namespace"]
        error(second.get("/v1/cache", params={"namespace": name}), 404)
        plan = post(second, "/v1/cache/plan", text=SAID)
        assert (plan["ram_tokens"], plan["reason"]) == (0, "cold_start")
        assert second.delete("/v1/cache").json()["tokens"] == 0
        assert post(first, "/v1/cache/plan", text=SAID)["prefill_tokens"] == 1
        assert post(second, "/v1/cache/flush", seconds=0)["writes_left"] == 0


class TestTrace:
    def test_lines_are_those_of_a_trace_file(self, http: httpx.Client) -> None:
        post(http, "/reply", text=SAID)
        response = http.get("/v1/trace?format=jsonl")
        found = [events.decode(line) for line in response.text.splitlines()]
        assert isinstance(found[0], events.TraceStarted)
        assert any(isinstance(each, events.Finished) for each in found)
        after = response.headers["x-trace-next"]
        rest = http.get(f"/v1/trace?format=jsonl&since={after}")
        assert len(rest.text.splitlines()) == 1

    def test_it_goes_on_where_it_ended(self, http: httpx.Client) -> None:
        post(http, "/reply", text=SAID)
        whole = http.get("/v1/trace?since=0").json()
        assert whole["dropped"] == 0
        found: list[Any] = []
        after = 0
        while True:
            page = http.get(f"/v1/trace?since={after}&limit=3").json()
            found += page["events"][1:]
            if page["next"] == after:
                break
            after = page["next"]
        assert found == whole["events"][1:]
        latest = http.get("/v1/trace?limit=2").json()
        assert latest["events"][1:] == whole["events"][-2:]
        time = whole["events"][-1]["time"]
        late = http.get(f"/v1/trace?since_time={time}").json()["events"][1:]
        assert late == [each for each in whole["events"][1:] if each["time"] >= time]

    @pytest.mark.parametrize(
        "query", ["since=-1", "since=x", "limit=0", "since_time=soon", "format=xml", "follow=9"]
    )
    def test_wrong_queries_are_refused(self, http: httpx.Client, query: str) -> None:
        error(http.get(f"/v1/trace?{query}"), 400)

    def test_it_is_followed_live(self, http: httpx.Client) -> None:
        start = http.get("/v1/trace").json()["next"]
        with http.stream("GET", f"/v1/trace?follow=1&since={start}") as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            post(http, "/reply", text=SAID)
            seen: list[str] = []
            for line in stream.iter_lines():
                if line.startswith("id: "):
                    assert int(line[4:]) > int(start)
                if line.startswith("data: "):
                    seen.append(json.loads(line[6:])["event"])
                if seen and seen[-1] == "Finished":
                    break
        assert seen[0] == "Queued"

    def test_tenants_see_their_own(self, first: httpx.Client, second: httpx.Client) -> None:
        post(first, "/reply", text=f"first: {SAID}")
        post(second, "/reply", text=f"second: {SAID}")
        own = first.get("/v1/trace").json()["events"]
        kinds = {each["event"] for each in own}
        assert {"Queued", "Planned", "Put", "Finished"} <= kinds
        assert "DecodeStep" not in kinds
        assert {each["tenant"] for each in own if each["event"] == "Queued"} == {"first"}
        others = second.get("/v1/trace").json()["events"]
        for name in ("request", "namespace"):
            mine = {each[name] for each in own if each.get(name)}
            assert mine
            assert not mine & {each[name] for each in others if each.get(name)}
        assert all(each.get("reason") != "namespace" for each in [*own, *others])


class TestMetrics:
    def test_tokens_are_counted_by_tier(self, http: httpx.Client) -> None:
        before = samples(http)
        post(http, "/reply", text=SAID)
        post(http, "/reply", text=SAID)
        after = samples(http)

        def gained(name: str, label: str) -> float:
            return after[name, label] - before.get((name, label), 0)

        assert gained("prompt_tokens_total", "ram") >= len(SAID) - 1
        assert gained("prompt_tokens_total", "prefilled") >= len(SAID)
        assert gained("cache_lookups_total", "hit") == 1
        assert gained("cache_short_hits_total", "cold_start") == 1
        assert gained("http_requests_total", "200") >= 2
        assert after["tier_bytes", "ram"] > 0
        assert after["requests", "decoding"] == 0
        assert ("malformed_tool_calls_total", "") in after

    def test_routes_are_counted_by_their_pattern(self, http: httpx.Client) -> None:
        http.get("/v1/models/none")
        http.get("/nowhere/at/all")
        text = http.get("/metrics").text
        line = 'method="GET",route="/v1/models/{model:path}",status="404"'
        assert f"mlx_swarm_http_requests_total{{{line}}}" in text
        assert "nowhere" not in text

    def test_tenants_see_their_own(self, first: httpx.Client, second: httpx.Client) -> None:
        before = samples(second)
        post(first, "/reply", text=SAID)
        post(first, "/reply", text=SAID)
        after = samples(second)
        assert not [name for name, _ in after if name.startswith(("prompt_tokens", "memory"))]
        assert after.get(("cache_lookups_total", "hit"), 0) == before.get(
            ("cache_lookups_total", "hit"), 0
        )
        assert samples(first)["cache_lookups_total", "hit"] >= 1
        names = [line for line in second.get("/metrics").text.splitlines() if 'namespace="' in line]
        assert not set(names) & set(first.get("/metrics").text.splitlines())


class TestText:
    def test_text_and_back(self, http: httpx.Client) -> None:
        found = post(http, "/tokenize", text="né<|im_end|>", pieces=True)
        assert found["count"] == len(found["tokens"]) == len(found["pieces"]) == 4
        assert found["pieces"][-1] == "<|im_end|>"
        assert found["context_length"] == 256
        back = post(http, "/detokenize", tokens=found["tokens"])
        assert back["text"] == "né<|im_end|>"
        assert post(http, "/tokenize", tokens=found["tokens"])["text"] == back["text"]

    def test_messages_as_the_model_gets_them(self, http: httpx.Client) -> None:
        found = post(http, "/tokenize", **MESSAGES)
        assert found["text"].endswith("<|im_start|>assistant\n")
        assert post(http, "/detokenize", tokens=found["tokens"])["text"] == found["text"]
        assert found["boundaries"]
        bare = post(http, "/tokenize", **MESSAGES, add_generation_prompt=False)
        assert bare["count"] < found["count"]

    def test_what_is_no_token_is_refused(self, http: httpx.Client) -> None:
        error(http.post("/detokenize", json={"tokens": [100000]}), 400)
        error(http.post("/detokenize", json={"tokens": [-1]}), 400)
        error(http.post("/tokenize", json={"text": "a", "model": "none"}), 404)


class TestModels:
    def test_they_are_listed_and_found(self, http: httpx.Client) -> None:
        listed = http.get("/v1/models").json()
        assert listed["object"] == "list"
        (model,) = listed["data"]
        assert model["context_length"] == 256
        assert model["loaded"]
        name = httpx.URL(f"/v1/models/{model['id'].replace('?', '%3F')}")
        assert http.get(name).json() == model
        assert error(http.get("/v1/models/none"), 404)["code"] == "model_not_found"


def test_every_answer_is_of_the_form_that_is_told(http: httpx.Client) -> None:
    asked = {"text": SAID}
    post(http, "/v1/cache/warm", **asked)
    name = http.get("/v1/cache").json()["data"][0]["namespace"]
    answers = {
        NamespaceList: http.get("/v1/cache"),
        EntryList: http.get("/v1/cache", params={"namespace": name}),
        PlanAnswer: http.post("/v1/cache/plan", json=asked),
        PinAnswer: http.post("/v1/cache/pin", json=asked),
        WarmAnswer: http.post("/v1/cache/warm", json=asked),
        FlushAnswer: http.post("/v1/cache/flush"),
        ClearAnswer: http.delete("/v1/cache"),
        ModelList: http.get("/v1/models"),
        Tokenized: http.post("/tokenize", json=asked),
        Detokenized: http.post("/detokenize", json={"tokens": [5]}),
        TraceAnswer: http.get("/v1/trace"),
    }
    for kind, answer in answers.items():
        found = msgspec.json.decode(answer.content)
        assert found.keys() - {"object"} == set(kind.__struct_fields__) - {"object"}
        msgspec.convert(found, kind)


def test_the_document_of_the_api_has_it_all(http: httpx.Client) -> None:
    document = http.get("/openapi.json")
    assert document.status_code == 200, document.text
    told = {
        (method.upper(), path)
        for path, methods in document.json()["paths"].items()
        for method in methods
    }
    operations = [each for surface in SURFACES for each in surface.OPERATIONS]
    assert {(each.method, each.path) for each in operations} <= told
