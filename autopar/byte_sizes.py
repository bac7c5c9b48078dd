"""Numbers of bytes as people write them."""

from __future__ import annotations

import math
import re

from .errors import OptionsError

# Prefixes of SI and IEC.
_UNITS = {
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
_SIZE = re.compile(r"^\s*((?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*([a-z]*)\s*$", re.ASCII | re.IGNORECASE)


def parse_bytes(text: str, name: str = "") -> int:
    """``"10GiB"``, ``"80GB"`` or ``"1024B"`` in bytes, a fraction of a byte dropped. ``name``: the option whose value
    it is. A bare prefix (``"40G"``) is refused, since some tools mean 10**9 by it and others 2**30, and so is a bare
    number (``"40"``), by which people mean gigabytes.

    Raises:
        OptionsError: if it is not a size.
    """
    match = _SIZE.match(text)
    number, unit = (match[1], match[2].upper()) if match else ("nan", "")
    given = f"{name and f'{name}='}{text!r}"
    if unit and f"{unit}IB" in _UNITS:
        decimal, binary = (f"{number}{prefix}B" for prefix in (unit, f"{unit}i"))
        raise OptionsError(f"{given} may be {decimal} ({_count(decimal)}) or {binary} ({_count(binary)}): write which")
    if not unit and math.isfinite(float(number)):
        raise OptionsError(f"{given} has no unit: write {number}GiB, {number}GB or, for bytes, {number}B")
    count = float(number) * _UNITS.get(unit, math.nan)
    if not math.isfinite(count):
        raise OptionsError(f"{given} is not a size in bytes; write 10GiB, 80GB or 1024B")
    return int(count)


def bytes_of(value: object, name: str) -> int:
    """Bytes per device that a user gives: a number, or text as for :func:`parse_bytes`; a fraction of a byte is
    dropped. ``name``: the option whose value it is.

    Raises:
        OptionsError: if it is not a size of at least a byte.
    """
    count: object = parse_bytes(value, name) if isinstance(value, str) else value
    is_number = isinstance(count, (int, float)) and not isinstance(count, bool)
    if not is_number or not 1 <= count < math.inf:  # type: ignore[operator]
        raise OptionsError(
            f"{name}={value!r} is not a positive number of bytes per device; write 40 * 2**30 or '40GiB'"
        )
    return int(count)  # type: ignore[call-overload,no-any-return]


def _count(text: str) -> str:
    return f"{parse_bytes(text):,} bytes"
