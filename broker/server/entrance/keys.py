"""API keys as they are written down. No error quotes one."""

import logging
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from ...errors import InvalidSetting
from ..settings import ApiKey

LOGGER = logging.getLogger("mlx_swarm.server")
LONGEST = 1024


def keys_of_file(path: str) -> list[ApiKey]:
    """The keys in a file: lines of `SECRET` or `TENANT:SECRET`; empty ones and `#` say nothing."""
    try:
        with Path(path).expanduser().open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            lines = file.read().decode().splitlines()
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise InvalidSetting(f"the API keys in {path} cannot be read: {reason}") from None
    if mode & stat.S_IROTH:
        LOGGER.warning("every user of this machine can read the API keys in %s", path)
    told = [(number, line.strip()) for number, line in enumerate(lines, 1)]
    keys = [
        parse_key(line, f"line {number} of {path}")
        for number, line in told
        if line and not line.startswith("#")
    ]
    if not keys:
        raise InvalidSetting(f"{path} has no API keys")
    return keys


def parse_key(text: str, where: str) -> ApiKey:
    """`SECRET` or `TENANT:SECRET`. `where` names it in errors."""
    tenant, colon, secret = text.strip().partition(":")
    return checked(ApiKey(secret, tenant) if colon else ApiKey(tenant), where)


def checked(key: ApiKey, where: str) -> ApiKey:
    """The same key; raises `InvalidSetting` where no client could send it."""
    secret = key.secret
    if not secret or len(secret) > LONGEST or not secret.isascii() or not secret.isprintable():
        raise InvalidSetting(f"{where} is no API key: 1 to {LONGEST:,} printable ASCII characters")
    if " " in secret:
        raise InvalidSetting(f"{where} is no API key: it has a space")
    return key


def distinct(keys: Iterable[ApiKey]) -> tuple[ApiKey, ...]:
    """Each key once; raises `InvalidSetting` for one that has two tenants."""
    found: dict[str, ApiKey] = {}
    for key in keys:
        known = found.setdefault(key.secret, key)
        if known.tenant != key.tenant:
            raise InvalidSetting(
                f"one API key is given to two tenants, {known.tenant!r} and {key.tenant!r}"
            )
    return tuple(found.values())
