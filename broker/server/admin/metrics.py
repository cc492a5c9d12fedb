"""`/metrics` for Prometheus: what the broker counts, read when it is asked for."""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import anyio
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...broker import BrokerStatistics
from ...inspection import NamespaceView
from ..openapi import Operation
from ..service import Service
from ..turns.histories import HistoriesStatistics
from .visibility import reason_for, seen_by

PATIENCE_SECONDS = 1.0
"""So long a scrape waits for the engine before it is answered with what was known last."""

OPERATIONS = (
    Operation("GET", "/metrics", "Counts for Prometheus", media_type=CONTENT_TYPE_LATEST),
)
PREFIX = "mlx_swarm_"
NO_ROUTE = "other"


class HttpCount(NamedTuple):
    """Requests that are counted together. `route` is the pattern that matched."""

    tenant: str
    method: str
    route: str
    status: int


class HttpCounter:
    """Middleware that counts HTTP requests by route and status, once they are answered.

    `counts` are those of the application that a scope belongs to, as `app.state.http_counts`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._counts: Counter[HttpCount] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if "app" in scope:
            scope["app"].state.http_counts = self._counts
        status = 500

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            route = getattr(scope.get("route"), "path", NO_ROUTE)
            method = scope["method"] if route != NO_ROUTE else ""
            tenant = scope.get("state", {}).get("tenant", "")
            self._counts[HttpCount(tenant, method, route, status)] += 1


class Snapshot(NamedTuple):
    """What a scrape tells of. `broker` is None where a tenant may see its own alone."""

    tenant: str | None
    namespaces: tuple[NamespaceView, ...]
    broker: BrokerStatistics | None
    histories: HistoriesStatistics | None
    malformed: int
    http: dict[HttpCount, int]


def routes(service: Service) -> list[BaseRoute]:
    """`GET /metrics`."""
    latest: dict[str | None, Snapshot] = {}

    async def metrics(request: Request) -> Response:
        seen = seen_by(request, service)
        with anyio.move_on_after(PATIENCE_SECONDS):
            latest[seen] = await _snapshot(service, seen)
        counts = getattr(request.app.state, "http_counts", {})
        http = {each: n for each, n in counts.items() if seen is None or each.tenant == seen}
        snapshot = latest.get(seen) or Snapshot(seen, (), None, None, 0, {})
        registry = CollectorRegistry()
        registry.register(_Collector(snapshot._replace(http=http)))
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return [Route("/metrics", metrics, methods=["GET"])]


async def _snapshot(service: Service, seen: str | None) -> Snapshot:
    namespaces = await service.broker.cache_view.namespaces(seen)
    if seen is not None:
        return Snapshot(seen, namespaces, None, None, 0, {})
    return Snapshot(
        seen,
        namespaces,
        await service.broker.statistics(),
        service.generator.histories.statistics(),
        service.generator.malformed,
        {},
    )


class _Collector(Collector):
    """A snapshot as metric families."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        yield from _cache(self._snapshot)
        yield _http(self._snapshot.http)
        if self._snapshot.broker is not None:
            yield from _requests(self._snapshot.broker)
            yield from _memory(self._snapshot.broker)
        if self._snapshot.histories is not None:
            yield from _turns(self._snapshot.histories, self._snapshot.malformed)


def _cache(snapshot: Snapshot) -> Iterator[Metric]:
    labels = ["namespace", "model"]
    lookups = _counter("cache_lookups", "Look-ups in memory by result.", [*labels, "result"])
    reasons = _counter("cache_short_hits", "Misses and short hits by reason.", [*labels, "reason"])
    tokens = _counter("cache_prompt_tokens", "Prompt tokens found or not.", [*labels, "result"])
    events = _counter("cache_events", "What happened to entries.", [*labels, "event"])
    sizes = _gauge(
        "cache_bytes", "Bytes of KV in memory by kind; kinds overlap.", [*labels, "kind"]
    )
    held = _gauge("cache_tokens", "Tokens in the index.", labels)
    for view in snapshot.namespaces:
        own, each = [view.namespace[:16], view.model], view.statistics
        lookups.add_metric([*own, "hit"], each.hits)
        lookups.add_metric([*own, "miss"], each.misses)
        tokens.add_metric([*own, "hit"], each.hit_tokens)
        tokens.add_metric([*own, "miss"], each.missed_tokens)
        held.add_metric(own, each.tokens)
        for name in ("puts", "evictions", "demotions", "restores", "spills", "spill_failures"):
            events.add_metric([*own, name], getattr(each, name))
        for name in ("total", "leased", "pinned", "undurable", "checkpoint"):
            sizes.add_metric([*own, name], getattr(each, f"{name}_bytes"))
        told: Counter[str] = Counter()
        for reason, count in each.reasons.items():
            told[reason_for(snapshot.tenant, reason) or reason] += count
        for reason, count in told.items():
            reasons.add_metric([*own, reason], count)
    yield from (lookups, reasons, tokens, events, sizes, held)


def _http(counts: dict[HttpCount, int]) -> Metric:
    family = _counter("http_requests", "HTTP requests answered.", ["method", "route", "status"])
    merged: Counter[tuple[str, str, str]] = Counter()
    for each, count in counts.items():
        merged[each.method, each.route, str(each.status)] += count
    for labels, count in merged.items():
        family.add_metric(labels, count)
    return family


def _requests(found: BrokerStatistics) -> Iterator[Metric]:
    engine = found.engine
    states = _gauge("requests", "Open requests by state.", ["state"])
    for state in ("queued", "waiting", "restoring", "prefilling", "decoding"):
        states.add_metric([state], getattr(engine.requests, state))
    yield states
    yield _total("requests_completed", "Requests that ended.", engine.usage.requests)
    yield _total("preemptions", "Rows that gave up their place.", engine.requests.preempted)
    tiers = _counter("prompt_tokens", "Prompt tokens by where they came from.", ["tier"])
    for tier in ("ram", "cold", "prefilled"):
        tiers.add_metric([tier], getattr(engine.usage, f"{tier}_tokens"))
    yield tiers
    yield _total("output_tokens", "Tokens generated.", engine.usage.output_tokens)
    yield _total("recomputed_tokens", "Tokens prefilled again.", engine.usage.recomputed_tokens)
    phases = _counter("request_seconds", "Seconds of all requests by phase.", ["phase"])
    for phase in ("queue", "prefill", "decode"):
        phases.add_metric([phase], getattr(engine.usage, f"{phase}_seconds"))
    yield phases
    sessions = _gauge("sessions", "Agents' sessions by state.", ["state"])
    sessions.add_metric(["admitted"], engine.sessions.admitted)
    sessions.add_metric(["waiting"], engine.sessions.waiting)
    yield sessions


def _memory(found: BrokerStatistics) -> Iterator[Metric]:
    engine = found.engine
    tiers = _gauge("tier_bytes", "Bytes of KV by tier.", ["tier"])
    tiers.add_metric(["ram"], engine.cache.total.total_bytes)
    limits = _gauge("tier_limit_bytes", "Bytes that a tier may take.", ["tier"])
    limits.add_metric(["ram"], engine.cache.max_bytes)
    if engine.cache.cold is not None:
        tiers.add_metric(["cold"], engine.cache.cold.bytes)
        limits.add_metric(["cold"], engine.cache.cold.max_bytes)
    yield tiers
    yield limits
    ledger = _gauge("memory_bytes", "Memory of the ledger by purpose.", ["purpose", "kind"])
    for kind in ("committed", "reserved"):
        for purpose, size in getattr(engine.memory, kind).items():
            ledger.add_metric([purpose, kind], size)
    yield ledger
    yield _value("memory_limit_bytes", "What all of it may take.", engine.memory.limit)
    yield _value("footprint_bytes", "What the process takes.", engine.pressure.footprint)
    models = _gauge("model_weight_bytes", "Weights in memory.", ["model"])
    for name, model in engine.models.items():
        models.add_metric([name], model.weights)
    yield models
    yield _total("trace_events", "Trace events.", found.trace.emitted)
    yield _total("trace_events_dropped", "Trace events that left the ring.", found.trace.dropped)


def _turns(histories: HistoriesStatistics, malformed: int) -> Iterator[Metric]:
    yield _value("histories_bytes", "Histories that are kept.", histories.bytes)
    yield _total("histories_continued", "Conversations that continued one.", histories.continued)
    yield _total("history_tokens", "Prompt tokens taken from histories.", histories.tokens)
    yield _total("malformed_tool_calls", "Tool calls that came as text.", malformed)


def _counter(name: str, text: str, labels: list[str]) -> CounterMetricFamily:
    return CounterMetricFamily(PREFIX + name, text, labels=labels)


def _gauge(name: str, text: str, labels: list[str]) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, text, labels=labels)


def _total(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(PREFIX + name, text, value=value)


def _value(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, text, value=value)
