"""Sizes as people write them."""

import re

from .errors import InvalidSetting

SIZE_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
SIZE_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_size(size: int | str) -> int:
    """Bytes of "2GiB", "512MB", "1.5 GB", or of a number. Raises `InvalidSetting`."""
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,15})?)\s*([A-Za-z]*)\s*", str(size))
    unit = SIZE_UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or isinstance(size, bool | float):
        raise InvalidSetting(
            f'{size!r} is not a size; give bytes, or text such as "2GiB" or "512MB"'
        )
    return int(float(match[1]) * unit)
