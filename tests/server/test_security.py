"""Who may call the server, by which names, from which pages, with which keys."""

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message, Receive, Scope, Send

from mlx_swarm.broker.errors import InvalidSetting
from mlx_swarm.broker.server.entrance.origins import (
    Authority,
    Hosts,
    Origins,
    is_loopback,
    parse_authority,
    parse_origin,
)
from mlx_swarm.broker.server.entrance.security import Security, check_binding
from mlx_swarm.broker.server.settings import ApiKey, ServerSettings

Headers = Iterable[tuple[str, str]]

KEYS = (ApiKey("sk-one"), ApiKey("sk-two", "acme"))


class Asked:
    """What came of one request: the status, or `passed` with the tenant it was given."""

    def __init__(
        self,
        headers: Headers,
        *,
        kind: str = "http",
        method: str = "GET",
        path: str = "/v1/models",
        query: bytes = b"",
        **settings: Any,
    ) -> None:
        self.passed = False
        self.tenant: str | None = None
        self.messages: list[Message] = []
        self.scope: Scope = {
            "type": kind,
            "path": path,
            "query_string": query,
            "headers": [(key.encode("latin-1"), value.encode("latin-1")) for key, value in headers],
            "extensions": {"websocket.http.response": {}},
        }
        if kind == "http":
            self.scope["method"] = method
        anyio.run(self._run, Security(self._app, ServerSettings(**settings)))

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {key.decode(): value.decode() for key, value in self.messages[0]["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages[1:])

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.passed = True
        self.tenant = scope["state"]["tenant"]
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})

    async def _run(self, security: Security) -> None:
        async def receive() -> Message:
            raise AssertionError("nothing is read before it is known who calls")

        async def send(message: Message) -> None:
            self.messages.append(message)

        await security(self.scope, receive, send)


def ask(host: str = "localhost:8321", /, *more: tuple[str, str], **rest: Any) -> Asked:
    return Asked([("host", host), *more], **rest)


GOOD_HOSTS = [
    "localhost",
    "LOCALHOST:8321",
    "localhost.",
    "localhost:1",
    "127.0.0.1",
    "127.0.0.1:65535",
    "127.9.8.7",
    "[::1]",
    "[::1]:8321",
    "[0:0:0:0:0:0:0:1]:8321",
    "[::ffff:127.0.0.1]",
]
BAD_HOSTS = [
    "evil.example",
    "evil.example:8321",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "10.0.0.1",
    "127.1",
    "0x7f.0.0.1",
    "2130706433",
    "0.0.0.0",
    "[::]",
    "[::2]:8321",
    "local_host",
]
NO_HOSTS = [
    "",
    " ",
    "local%68ost",
    "127.0.0.1%2f.evil.example",
    "localhost:",
    "localhost:0",
    "localhost:65536",
    "localhost:8321:8321",
    "localhost:٣",
    "localhost/evil.example",
    "evil.example@localhost",
    "localhost,evil.example",
    "localhost evil.example",
    "http://localhost",
    "::1",
    "[::1",
    "[::1%25lo]",
    "[127.0.0.1]",
    "[localhost]",
    "-localhost",
    "localhost\x00",
    "lócalhost",
]


@pytest.mark.parametrize("kind", ["http", "websocket"])
@pytest.mark.parametrize("host", GOOD_HOSTS)
def test_this_machine_has_many_names(host: str, kind: str) -> None:
    assert ask(host, kind=kind).passed


@pytest.mark.parametrize("kind", ["http", "websocket"])
@pytest.mark.parametrize(("hosts", "status"), [(BAD_HOSTS, 403), (NO_HOSTS, 400)])
def test_other_hosts_are_refused_before_anything_is_accepted(
    hosts: list[str], status: int, kind: str
) -> None:
    for host in hosts:
        if not host.isascii():
            host = host.encode().decode("latin-1")
        asked = ask(host, kind=kind)
        assert not asked.passed, host
        assert asked.status == status, host
        if status == 403:
            assert b"--allowed-host" in asked.body


@pytest.mark.parametrize("hosts", [[], ["localhost", "localhost"], ["localhost", "evil.example"]])
def test_a_request_has_one_host(hosts: list[str]) -> None:
    asked = Asked([("host", host) for host in hosts])
    assert (asked.passed, asked.status) == (False, 400)


@pytest.mark.parametrize(
    ("settings", "host", "passes"),
    [
        ({"allowed_hosts": ("box.example",)}, "BOX.example.:80", True),
        ({"allowed_hosts": ("box.example",)}, "a.box.example", False),
        ({"allowed_hosts": ("*.box.example",)}, "a.box.example", True),
        ({"allowed_hosts": ("*.box.example",)}, "box.example", False),
        ({"allowed_hosts": ("*.box.example",)}, "evilbox.example", False),
        ({"allowed_hosts": ("*",)}, "anything.example", True),
        ({"host": "192.168.1.5"}, "192.168.1.5:8321", True),
        ({"host": "192.168.1.5"}, "192.168.1.6:8321", False),
        ({"host": "fe80::5"}, "[FE80::5]", True),
        ({"host": "0.0.0.0"}, "192.168.1.6:8321", True),
        ({"host": "0.0.0.0"}, "evil.example", False),
        ({"host": "::"}, "[fe80::7]:8321", True),
        ({"host": ""}, "10.1.2.3", True),
    ],
)
def test_more_hosts_are_known_by_the_settings(
    settings: dict[str, Any], host: str, passes: bool
) -> None:
    assert ask(host, **settings).passed == passes


@pytest.mark.parametrize("kind", ["http", "websocket"])
@pytest.mark.parametrize(
    ("host", "origin", "passes"),
    [
        ("localhost:8321", "http://localhost:8321", True),
        ("localhost:8321", "http://LOCALHOST:3000", True),
        ("localhost:8321", "https://localhost", True),
        ("[::1]:8321", "http://[::1]:8321", True),
        ("localhost:8321", "http://127.0.0.1:8321", False),
        ("localhost:8321", "http://evil.example", False),
        ("localhost:8321", "http://localhost.evil.example", False),
        ("localhost:8321", "http://evil.example/http://localhost:8321", False),
        ("localhost:8321", "http://localhost@evil.example", False),
        ("localhost:8321", "http://local%68ost:8321", False),
        ("localhost:8321", "null", False),
        ("localhost:8321", "", False),
        ("localhost:8321", "localhost:8321", False),
        ("localhost:8321", "file://", False),
        ("localhost:8321", "chrome-extension://localhost", False),
        ("localhost:8321", "http://localhost:8321 http://evil.example", False),
        ("localhost:8321", "https://page.example", True),
        ("localhost:8321", "https://page.example:443", True),
        ("localhost:8321", "https://page.example:444", False),
        ("localhost:8321", "http://page.example", False),
        ("box.example:8321", "http://box.example:8321", True),
        ("box.example:8321", "https://box.example:8321", True),
        ("box.example:8321", "http://box.example:3000", False),
        ("box.example", "http://box.example", True),
    ],
)
def test_pages_of_other_sites_may_not_call(host: str, origin: str, passes: bool, kind: str) -> None:
    allowed = {"allowed_hosts": ("box.example",), "allowed_origins": ("https://page.example/",)}
    asked = ask(host, ("origin", origin), kind=kind, **allowed)
    assert asked.passed == passes
    if not passes:
        assert asked.status == 403
        assert b"--allowed-origin" in asked.body
        assert "access-control-allow-origin" not in asked.headers
    elif kind == "http":
        assert asked.headers["access-control-allow-origin"] == origin
        assert asked.headers["vary"] == "Origin"


def test_a_request_has_one_origin() -> None:
    page = ("origin", "http://localhost:8321")
    assert ask("localhost:8321", page, page).status == 403


def test_every_page_may_call_if_the_settings_say_so() -> None:
    assert ask("localhost", ("origin", "http://any.example"), allowed_origins=("*",)).passed
    assert not ask("localhost", ("origin", "not one"), allowed_origins=("*",)).passed
    assert ask("localhost", ("origin", "null"), allowed_origins=("null",)).passed


def test_browsers_are_told_before_they_send() -> None:
    question = [
        ("origin", "https://page.example"),
        ("access-control-request-method", "POST"),
        ("access-control-request-headers", "authorization, content-type"),
        ("access-control-request-private-network", "true"),
    ]
    settings = {"api_keys": KEYS, "allowed_origins": ("https://page.example",)}
    asked = ask("localhost", *question, method="OPTIONS", **settings)
    assert (asked.passed, asked.status) == (False, 204)
    assert asked.headers["access-control-allow-headers"] == "authorization, content-type"
    assert asked.headers["access-control-allow-private-network"] == "true"
    assert "POST" in asked.headers["access-control-allow-methods"]
    assert ask("localhost", *question, method="OPTIONS").status == 403


@pytest.mark.parametrize("kind", ["http", "websocket"])
@pytest.mark.parametrize(
    ("headers", "tenant"),
    [
        ([("authorization", "Bearer sk-one")], ""),
        ([("Authorization", "bearer   sk-two ")], "acme"),
        ([("x-api-key", "sk-two")], "acme"),
        ([("x-api-key", "wrong"), ("authorization", "Bearer sk-two")], "acme"),
        ([], None),
        ([("authorization", "Bearer ")], None),
        ([("authorization", "sk-one")], None),
        ([("authorization", "Basic sk-one")], None),
        ([("authorization", "Bearer sk-one sk-two")], None),
        ([("authorization", "Bearer sk-on")], None),
        ([("authorization", "Bearer sk-one\xff")], None),
        ([("x-api-key", "SK-ONE")], None),
        ([("x-api-key", "sk-one"), ("x-api-key", "sk-one")], None),
        ([("authorization", "Bearer sk-one"), ("authorization", "Bearer sk-two")], None),
        ([("cookie", "key=sk-one")], None),
    ],
)
def test_a_key_says_whose_request_it_is(
    headers: list[tuple[str, str]], tenant: str | None, kind: str
) -> None:
    asked = ask("localhost", *headers, kind=kind, query=b"api_key=sk-one", api_keys=KEYS)
    assert (asked.passed, asked.tenant) == (tenant is not None, tenant)
    if tenant is None:
        assert asked.status == 401
        assert b'"code":"invalid_api_key"' in asked.body
        assert b"sk-" not in asked.body


def test_messages_refuse_keys_in_the_words_of_their_api() -> None:
    asked = ask("localhost", path="/v1/messages", method="POST", api_keys=KEYS)
    assert asked.status == 401
    assert b'"type":"authentication_error"' in asked.body


@pytest.mark.parametrize(
    ("method", "path", "passes"),
    [
        ("GET", "/healthz", True),
        ("HEAD", "/", True),
        ("GET", "/", False),
        ("POST", "/healthz", False),
        ("GET", "/healthz/", False),
        ("GET", "//healthz", False),
    ],
)
def test_only_whether_anybody_is_there_needs_no_key(method: str, path: str, passes: bool) -> None:
    assert ask("localhost", method=method, path=path, api_keys=KEYS).passed == passes


def test_without_keys_everybody_is_the_same_tenant() -> None:
    assert ask("localhost", ("authorization", "Bearer anything")).tenant == ""


@pytest.mark.parametrize(
    ("settings", "is_taken"),
    [
        ({}, True),
        ({"host": "localhost"}, True),
        ({"host": "[::1]"}, True),
        ({"host": "127.0.0.2"}, True),
        ({"host": "0.0.0.0"}, False),
        ({"host": "::"}, False),
        ({"host": ""}, False),
        ({"host": "192.168.1.5"}, False),
        ({"host": "box.example"}, False),
        ({"host": "0.0.0.0", "api_keys": KEYS}, True),
        ({"host": "0.0.0.0", "no_auth": True}, True),
    ],
)
def test_other_machines_are_not_served_without_a_key(
    settings: dict[str, Any], is_taken: bool
) -> None:
    if is_taken:
        check_binding(ServerSettings(**settings))
        return
    with pytest.raises(InvalidSetting, match=r"--api-key-file.*--no-auth"):
        check_binding(ServerSettings(**settings))


def test_no_secret_is_in_what_is_printed_of_settings() -> None:
    settings = ServerSettings(api_keys=KEYS)
    assert "sk-" not in f"{settings!r}{settings}{list(KEYS[0].__rich_repr__())}"


ports = st.none() | st.integers(1, 65535)


@given(st.ip_addresses(v=4) | st.ip_addresses(v=6), ports)
def test_addresses_are_read_as_they_are_meant(
    address: IPv4Address | IPv6Address, port: int | None
) -> None:
    shown = f"[{address}]" if isinstance(address, IPv6Address) else str(address)
    text = shown if port is None else f"{shown}:{port}"
    assert parse_authority(text.upper()) == Authority(str(address), port)
    origin = parse_origin(f"http://{text}")
    assert origin is not None
    assert (origin.name, origin.port) == (str(address), port or 80)
    mapped = getattr(address, "ipv4_mapped", None)
    assert is_loopback(str(address)) == (mapped or address).is_loopback


@given(st.text(max_size=40) | st.text("localhst127.0[]:%@/#?\\-_ \t", max_size=30))
def test_whatever_is_sent_as_a_host_is_this_machine_or_refused(text: str) -> None:
    host = parse_authority(text)
    if host is not None and Hosts("127.0.0.1").allow(host):
        name = text.lower().rpartition(":")[0] if host.port else text.lower()
        assert is_loopback(name.removesuffix(".").strip("[]"))


@given(st.text(max_size=40) | st.text("htps:/localhst127.0[]%@#?\\-_ ", max_size=40))
def test_whatever_is_sent_as_an_origin_is_this_machine_or_refused(text: str) -> None:
    for host in (Authority("localhost", 8321), Authority("::1", 8321)):
        if Origins().allow(text, host):
            origin = parse_origin(text)
            assert origin is not None
            assert origin.name == host.name
