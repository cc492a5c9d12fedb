"""Hosts and origins of requests: which are this server's own, and which may call it."""

import re
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import NamedTuple

PORTS = {"http": 80, "https": 443, "ws": 80, "wss": 443}

_AUTHORITY = re.compile(
    r"(?P<name>\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,252}))(?::(?P<port>[0-9]{1,5}))?"
)
_ORIGIN = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]{0,31})://(?P<authority>[^/?#@\\\s]{1,300})", re.I
)


class Authority(NamedTuple):
    """The name of a host, in lower case and without brackets, and the port if one is given."""

    name: str
    port: int | None = None


class Origin(NamedTuple):
    """Where a page of a browser came from."""

    scheme: str
    name: str
    port: int | None


def parse_authority(text: str) -> Authority | None:
    """The value of a Host header; None for what is none. Nothing is decoded: `%` is no part."""
    match = _AUTHORITY.fullmatch(text)
    if match is None:
        return None
    name, port = match["name"].lower(), match["port"]
    if port is not None and not 0 < int(port) < 1 << 16:
        return None
    if name.startswith("["):
        address = _address(name[1:-1])
        if not isinstance(address, IPv6Address):
            return None
        name = str(address)
    elif name.endswith("."):
        name = name[:-1]
    return Authority(name, int(port) if port else None)


def parse_origin(text: str) -> Origin | None:
    """The value of an Origin header; None for `null` and for what is none."""
    match = _ORIGIN.fullmatch(text)
    authority = parse_authority(match["authority"]) if match else None
    if match is None or authority is None:
        return None
    scheme = match["scheme"].lower()
    return Origin(scheme, authority.name, authority.port or PORTS.get(scheme))


def is_loopback(name: str) -> bool:
    """Whether a host's name can only be this machine."""
    address = _address(name)
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped.is_loopback
    return name == "localhost" or (address is not None and address.is_loopback)


def is_address(name: str) -> bool:
    """Whether a host is named by an IP address. No DNS server can make that one mean another."""
    return _address(name) is not None


def is_any(name: str) -> bool:
    """Whether to listen there is to listen on every address of the machine."""
    address = _address(name)
    return name == "" or (address is not None and address.is_unspecified)


class Hosts:
    """The names by which the server may be called.

    `allowed` are names, `*.example.org` for all below one, or `*` for all.
    """

    def __init__(self, bound: str, allowed: tuple[str, ...] = ()) -> None:
        self._is_any = is_any(bound)
        names = [*allowed, bound.strip("[]")]
        self._names = {_plain(name) for name in names if name}
        self._endings = tuple(name[1:] for name in self._names if name.startswith("*."))

    def allow(self, host: Authority) -> bool:
        """Whether a request to this host is meant for this server."""
        name = host.name
        return (
            is_loopback(name)
            or name in self._names
            or "*" in self._names
            or (self._is_any and is_address(name))
            or (bool(self._endings) and name.endswith(self._endings))
        )


class Origins:
    """The pages that may call the server: its own, those of `allowed`, and of the same host if that
    is this machine. `*` in `allowed` is every page."""

    def __init__(self, allowed: tuple[str, ...] = ()) -> None:
        self._is_open = "*" in allowed
        parsed = (parse_origin(each.rstrip("/")) for each in allowed)
        self._origins = {each for each in parsed if each is not None}
        self._allows_null = "null" in allowed

    def allow(self, text: str, host: Authority) -> bool:
        """Whether a page of an origin may call this host, which is the server's."""
        origin = parse_origin(text)
        if self._is_open or (text == "null" and self._allows_null):
            return origin is not None or text == "null"
        if origin is None:
            return False
        if origin in self._origins:
            return True
        if origin.scheme not in ("http", "https") or origin.name != host.name:
            return False
        return is_loopback(host.name) or origin.port == (host.port or PORTS[origin.scheme])


def _plain(name: str) -> str:
    """A name as `parse_authority` gives it."""
    bare = name.lower().strip("[]").removesuffix(".")
    address = _address(bare)
    return bare if address is None else str(address)


def _address(name: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(name)
    except ValueError:
        return None
