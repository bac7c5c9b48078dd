"""Formats quantities as text: always three digits and a unit."""

from __future__ import annotations

import math


def microbatches_text(count: int) -> str:
    """``1 microbatch``, ``4 microbatches``."""
    return f"{count} microbatch{'es' if count > 1 else ''}"


def duration(seconds: float) -> str:
    """``16.6 ms``: seconds in the unit that keeps the number below a thousand; ``0`` for 0."""
    if not math.isfinite(seconds):
        return str(seconds)
    if seconds < 0:
        return f"-{duration(-seconds)}"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)):
        # 0.9995 of a unit rounds up to a whole one.
        if seconds >= scale * 0.9995:
            return f"{_digits(seconds / scale)} {unit}"
    return f"{seconds * 1e9:.2g} ns" if seconds else "0"


def size(count: float) -> str:
    """``5.8 GiB``: bytes in the binary unit that keeps the number below a thousand or so."""
    if count < 0:
        return f"-{size(-count)}"
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= scale:
            return f"{_digits(count / scale)} {unit}"
    return f"{count:.0f} B"


def amount(count: float) -> str:
    """How many, in thousands (K), millions (M) or billions (B)."""
    for unit in ("", "K", "M"):
        if count < 1000:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g}B"


def signed_duration(seconds: float) -> str:
    """``+1.2 ms``, ``-30 us`` or ``±0``."""
    return f"+{duration(seconds)}" if seconds > 0 else duration(seconds) if seconds < 0 else "±0"


def signed_size(count: float) -> str:
    """``+1.5 GiB``, ``-3 MiB`` or ``±0``."""
    return f"+{size(count)}" if count > 0 else size(count) if count < 0 else "±0"


def share(part: float, whole: float) -> str:
    """``79%``; ``-28%`` for what is saved; ``<1%`` or ``>-1%`` for what rounds to 0."""
    if part == 0 or whole <= 0:
        return "0%"
    if abs(part) / whole < 0.005:
        return "<1%" if part > 0 else ">-1%"
    return f"{part / whole:.0%}"


def longer(seconds: float, than: float) -> str:
    """By how much longer something takes ``than`` something else: ``+51%``, ``-3%``."""
    return f"{seconds / than - 1.0 if than > 0 else 0.0:+.0%}"


def clip(text: str, width: int) -> str:
    """``text`` in at most ``width`` characters. The middle is cut out, because both ends of a path identify it."""
    if len(text) <= width:
        return text
    room = width - 1
    return f"{text[: room // 3]}…{text[len(text) - (room - room // 3) :]}" if room > 0 else text[:width]


def trim(text: str, width: int) -> str:
    """``text`` as one line of at most ``width`` characters. The end is cut off; used for sentences."""
    line = " ".join(text.split())
    return line if len(line) <= width else f"{line[: width - 1]}…"


def _digits(number: float) -> str:
    return f"{number:.3g}" if number < 999.5 else f"{number:.0f}"
