"""Who may call: hosts against DNS rebinding, origins against foreign pages, keys against all else.

Everything is checked before a request is read or a WebSocket accepted. Keys are read from headers
only, never from the query string, which ends up in logs and histories.
"""

import hmac
from collections.abc import Iterable
from hashlib import sha256
from http import HTTPStatus

from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...errors import InvalidSetting
from ..errors import ApiError
from ..settings import ApiKey, ServerSettings
from .origins import Authority, Hosts, Origins, is_loopback, parse_authority
from .refusals import refusal

OPEN = {("GET", "/healthz"), ("HEAD", "/healthz"), ("HEAD", "/")}
"""What needs no key: whether anybody is there."""

METHODS = "GET, POST, DELETE, OPTIONS"
EXPOSED = "x-request-id, retry-after"
PREFLIGHT_SECONDS = "600"
LONGEST_LIST = 2048


def check_binding(settings: ServerSettings) -> None:
    """Raise `InvalidSetting` where others on the network could call without a key."""
    if is_loopback(settings.host.strip("[]").lower()) or settings.api_keys or settings.no_auth:
        return
    raise InvalidSetting(
        f"{settings.host or 'an empty host'} can be reached from other machines: set a key "
        "(--api-key-file, or MLX_SWARM_API_KEY), or say --no-auth if whoever reaches it may use it"
    )


class Security:
    """An ASGI application in front of another one, which only sees what may pass.

    The tenant of a request's key is in `scope["state"]["tenant"]`.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._hosts = Hosts(settings.host, settings.allowed_hosts)
        self._origins = Origins(settings.allowed_origins)
        self._keys = Keys(settings.api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it here."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        origin: str | None = None
        try:
            host = self._host(scope)
            origin = self._origin(scope, host)
            if origin is not None:
                send = _shared(send, origin)
            if origin is not None and _is_preflight(scope):
                await _preflight(scope)(scope, receive, send)
                return
            is_open = (scope.get("method"), scope["path"]) in OPEN
            state["tenant"] = "" if is_open else self._keys.tenant(scope)
        except ApiError as error:
            await _refuse(scope, error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _host(self, scope: Scope) -> Authority:
        values = _values(scope, b"host")
        host = parse_authority(values[0]) if len(values) == 1 else None
        if host is None:
            raise ApiError(HTTPStatus.BAD_REQUEST, "a request needs one Host header, of a name")
        if not self._hosts.allow(host):
            raise ApiError(
                HTTPStatus.FORBIDDEN,
                f"{host.name} is no host of this server: it takes more by --allowed-host",
                code="host_not_allowed",
            )
        return host

    def _origin(self, scope: Scope, host: Authority) -> str | None:
        """The origin if there is one, as it was sent."""
        values = _values(scope, b"origin")
        if not values:
            return None
        if len(values) != 1 or not self._origins.allow(values[0], host):
            raise ApiError(
                HTTPStatus.FORBIDDEN,
                "pages of this origin may not call this server: it takes more by --allowed-origin",
                code="origin_not_allowed",
            )
        return values[0]


class Keys:
    """API keys. Without any, everybody is the tenant "" and nothing that is sent is looked at."""

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self._keys = [(_digest(key.secret.encode()), key.tenant) for key in keys]

    def tenant(self, scope: Scope) -> str:
        """Whose key a request has; raises the `ApiError` of one that has none.

        How long that takes says nothing about the keys: all are compared, by their digests.
        """
        if not self._keys:
            return ""
        found: str | None = None
        for secret in _secrets(scope):
            digest = _digest(secret)
            for key, tenant in self._keys:
                if hmac.compare_digest(key, digest):
                    found = tenant
        if found is None:
            raise ApiError(
                HTTPStatus.UNAUTHORIZED,
                "this server needs an API key, as `Authorization: Bearer KEY` or `x-api-key: KEY`; "
                "there is none, or it is wrong",
                code="invalid_api_key",
            )
        return found


def _secrets(scope: Scope) -> list[bytes]:
    """What stands where a key may stand; a header that is there twice counts for nothing."""
    bearers, plain = _raw(scope, b"authorization"), _raw(scope, b"x-api-key")
    found = plain if len(plain) == 1 else []
    if len(bearers) == 1:
        scheme, _, secret = bearers[0].partition(b" ")
        if scheme.lower() == b"bearer":
            found = [*found, secret.strip()]
    return [secret for secret in found if secret]


def _digest(secret: bytes) -> bytes:
    return sha256(secret).digest()


def _raw(scope: Scope, name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key.lower() == name]


def _values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1").strip() for value in _raw(scope, name)]


def _is_preflight(scope: Scope) -> bool:
    is_options = scope["type"] == "http" and scope["method"] == "OPTIONS"
    return is_options and bool(_raw(scope, b"access-control-request-method"))


def _preflight(scope: Scope) -> Response:
    """What a browser may send, asked before it does; the origin has been allowed."""
    asked = ", ".join(_values(scope, b"access-control-request-headers"))
    headers = {
        "access-control-allow-methods": METHODS,
        "access-control-max-age": PREFLIGHT_SECONDS,
    }
    if asked and len(asked) <= LONGEST_LIST:
        headers["access-control-allow-headers"] = asked
    if _values(scope, b"access-control-request-private-network") == ["true"]:
        headers["access-control-allow-private-network"] = "true"
    return Response(status_code=204, headers=headers)


def _refuse(scope: Scope, error: ApiError) -> Response:
    headers = {"www-authenticate": "Bearer"} if error.status == HTTPStatus.UNAUTHORIZED else {}
    request_id = scope["state"].get("request_id", "")
    return refusal(scope["path"], error, request_id, headers)


def _shared(send: Send, origin: str) -> Send:
    """Let the browser show an answer to the page that asked."""

    async def shared(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["access-control-allow-origin"] = origin
            headers["access-control-expose-headers"] = EXPOSED
            headers.add_vary_header("Origin")
        await send(message)

    return shared
