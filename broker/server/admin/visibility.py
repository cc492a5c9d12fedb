"""What a caller may see: its own tenant's, or everything where no keys tell callers apart."""

from collections import OrderedDict
from collections.abc import Iterable

from msgspec.structs import replace
from starlette.requests import HTTPConnection

from ...trace import events
from ...trace.events import Event
from ..service import Service

REMEMBERED = 65_536
"""Requests whose tenant is remembered; the oldest go."""


def tenant_of(connection: HTTPConnection) -> str:
    """The tenant of the caller's key."""
    tenant: str = getattr(connection.state, "tenant", "")
    return tenant


def seen_by(connection: HTTPConnection, service: Service) -> str | None:
    """The tenant that a caller sees; None where it sees all of them."""
    tenant = tenant_of(connection)
    return tenant if tenant or service.settings.api_keys else None


def reason_for(tenant: str | None, reason: str | None) -> str | None:
    """Why a look-up missed, without telling a tenant that others have what it lacks."""
    return "cold_start" if tenant is not None and reason == "namespace" else reason


class Sight:
    """What a tenant may see of a trace; None sees all.

    Has to be shown every event: it learns from them whose request is whose. `namespaces` are those
    that are known to be the tenant's already.
    """

    def __init__(self, tenant: str | None, namespaces: Iterable[str] = ()) -> None:
        self._tenant = tenant
        self._namespaces = set(namespaces)
        self._requests: OrderedDict[str, None] = OrderedDict()

    def see(self, event: Event) -> Event | None:
        """The event as the tenant may see it, or None."""
        if self._tenant is None:
            return event
        match event:
            case events.TraceStarted():
                return event
            case events.Queued():
                return self._queued(event)
            case events.Displaced():
                is_own = event.tenant == self._tenant
                return replace(event, request=self._own(event.request)) if is_own else None
            case events.PinRefused():
                return event if event.tenant == self._tenant else None
        namespace = getattr(event, "namespace", None)
        if namespace is not None:
            return event if namespace in self._namespaces else None
        if getattr(event, "request", None) not in self._requests:
            return None
        return self._discreet(event)

    def _queued(self, event: events.Queued) -> Event | None:
        if event.tenant != self._tenant:
            return None
        self._namespaces.add(event.namespace)
        self._requests[event.request] = None
        if len(self._requests) > REMEMBERED:
            self._requests.popitem(last=False)
        return event

    def _discreet(self, event: Event) -> Event:
        """Without what it says of others."""
        match event:
            case events.Preempted():
                return replace(event, by=self._own(event.by))
            case events.Planned() | events.Resumed() if event.reason == "namespace":
                return replace(event, reason="cold_start")
        return event

    def _own(self, request: str) -> str:
        return request if request in self._requests else ""
