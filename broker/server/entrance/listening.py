"""Sockets to listen on, and a certificate, looked at before a model is loaded."""

import errno
import socket
import ssl
from pathlib import Path

from ...errors import InvalidSetting
from ..settings import ServerSettings

REASONS = {
    errno.EADDRINUSE: "something listens there already; --port takes another",
    errno.EACCES: "this user may not listen there",
    errno.EADDRNOTAVAIL: "this machine has no such address",
}


def listen(settings: ServerSettings) -> list[socket.socket]:
    """Sockets bound to every address of the host. Raises `InvalidSetting`."""
    host, port = settings.host.strip("[]"), settings.port
    try:
        kinds = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        raise InvalidSetting(f"host is {host!r}, which is no address: {_reason(error)}") from None
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, place in dict.fromkeys(kinds):
            chosen = (place[0], port, *place[2:])
            sockets.append(_bound(family, kind, protocol, chosen))
            port = sockets[0].getsockname()[1]
    except OSError as error:
        for each in sockets:
            each.close()
        reason = REASONS.get(error.errno or 0, _reason(error))
        raise InvalidSetting(f"port {port} of {host} cannot be used: {reason}") from None
    return sockets


def check_certificate(settings: ServerSettings) -> None:
    """Raise `InvalidSetting` for a certificate that cannot be served."""
    certificate, key = settings.ssl_certfile, settings.ssl_keyfile
    if certificate is None:
        if key is not None:
            raise InvalidSetting("ssl_keyfile needs ssl_certfile: a key without its certificate")
        return
    for path in filter(None, (certificate, key)):
        try:
            Path(path).read_bytes()
        except OSError as error:
            raise InvalidSetting(f"{path} cannot be read: {_reason(error)}") from None
    try:
        # A key that is locked asks for its password otherwise.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, "")
    except (ssl.SSLError, ValueError) as error:
        told = getattr(error, "reason", None) or "it cannot be used"
        raise InvalidSetting(f"{certificate} is no certificate with its key: {told}") from None


def address(sockets: list[socket.socket], settings: ServerSettings) -> str:
    """The URL under which a client on this machine finds the server."""
    host, port = sockets[0].getsockname()[:2]
    scheme = "http" if settings.ssl_certfile is None else "https"
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _bound(family: int, kind: int, protocol: int, place: tuple[object, ...]) -> socket.socket:
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(place)
        # Two sockets may be bound to one port as long as neither listens.
        bound.listen()
    except BaseException:
        bound.close()
        raise
    return bound


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
