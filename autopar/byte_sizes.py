"""Numbers of bytes as people write them."""

from __future__ import annotations

import math
import re

from .errors import OptionsError

# Prefixes of SI and IEC.
_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([A-Za-z]*)\s*$")


def parse_bytes(text: str, name: str = "") -> int:
    """``"10GiB"``, ``"80GB"``, ``"1.5e9"`` or ``"1024"`` in bytes. ``name``: the option whose value it is.

    Raises:
        OptionsError: if it is not a size.
    """
    match = _SIZE.match(text)
    count = float(match[1]) * _UNITS.get(match[2].upper(), math.nan) if match else math.nan
    if not math.isfinite(count):
        raise OptionsError(f"{name and f'{name}='}{text!r} is not a size in bytes; write 10GiB, 80GB or 1024")
    return int(count)
