"""What rests outside of the device's memory: kinds of tensors, tiers of memory, and ``Options(offload=...)``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast, get_args

from .errors import OptionsError

# What can rest elsewhere: saved activations between forward and backward, optimizer state between updates, and weights
# between their uses.
Kind = Literal["activations", "optimizer", "weights"]
# Memory that is not the device's: that of its host, and a local disk.
Tier = Literal["host", "nvme"]
# A kind, and a tier in which it may rest.
Destination = tuple[Kind, Tier]
# By kind, the tier that is asked for; "device": none; None: searched.
Asked = Mapping[Kind, Tier | Literal["device"] | None]
# The tiers of each kind. Activations and weights are read within a step, for which disks are too slow.
TIERS: Mapping[Kind, tuple[Tier, ...]] = {
    "activations": ("host",),
    "optimizer": ("host", "nvme"),
    "weights": ("host",),
}
# State of a disk is read, updated and written in pieces of so many elements of a parameter. Chosen: pieces of Adam's
# state in fp32 have 8 MiB, long enough for a disk of 6 GB/s not to wait for the interpreter (0.4 ms a piece, measured),
# and even enough that the update of one hides behind the others however unequal parameters are. A multiple of a
# disk's block in any dtype.
NVME_PIECE = 1 << 20
# The buffers that pieces pass through: one is read into, one is updated, one is written from.
NVME_BUFFERS = 3
IN_TIER: Mapping[Tier, str] = {"host": "in host memory", "nvme": "on a local disk"}


def asked(offload: object) -> Asked:
    """What ``Options(offload=...)`` asks for. Raises :class:`OptionsError`."""
    if offload is None:
        return dict.fromkeys(TIERS)
    if isinstance(offload, bool):
        return (
            {"activations": None, "optimizer": "host", "weights": None} if offload else dict.fromkeys(TIERS, "device")
        )
    if isinstance(offload, str):
        return _tiers(_parsed(offload), offload)
    if not isinstance(offload, Mapping):
        raise _unknown(offload)
    return _tiers(offload, offload)


def _tiers(tiers: Mapping[Any, Any], offload: object) -> Asked:
    """The tier of each kind of tensor; ``offload``: what the user wrote."""
    found: dict[Kind, Tier | Literal["device"] | None] = dict.fromkeys(TIERS)
    for kind, tier in tiers.items():
        if kind not in TIERS or tier not in (*TIERS[kind], "device", None):
            raise _unknown(offload)
        found[kind] = tier
    return found


def _parsed(text: str) -> Mapping[str, str]:
    """``"activations"`` or ``"activations=host,optimizer=nvme"`` as a mapping; without a tier: host memory."""
    parts = [part.partition("=") for part in text.replace(" ", "").split(",")]
    found = {kind: tier if equals else "host" for kind, equals, tier in parts}
    if len(found) < len(parts):
        raise _unknown(text)
    return found


def _unknown(offload: object) -> OptionsError:
    ways = ", ".join(f"{kind!r}: {' or '.join(map(repr, (*tiers, 'device')))}" for kind, tiers in TIERS.items())
    return OptionsError(
        f"offload={offload!r} is not True, False, None to search, or a dict such as {{'optimizer': 'nvme'}} (as text: "
        f"'optimizer=nvme'); what can rest where: {ways}"
    )


def required(offload: object) -> frozenset[Destination]:
    """The destinations that ``Options(offload=...)`` asks for."""
    return frozenset((kind, tier) for kind, tier in asked(offload).items() if tier is not None and tier != "device")


def allowed(offload: object) -> frozenset[Destination]:
    """The destinations that ``Options(offload=...)`` does not rule out."""
    wishes = asked(offload)
    return frozenset((kind, tier) for kind, tiers in TIERS.items() for tier in tiers if wishes[kind] in (None, tier))


def tier_of(text: object) -> Tier | Literal[""]:
    """The tier of a plan's text: plans before there were several say true. Raises ``ValueError``."""
    if isinstance(text, bool):
        return "host" if text else ""
    if text in ("", *get_args(Tier)):
        return cast(Tier, text)
    raise ValueError(f"{text!r} is no tier of memory; one of {', '.join(get_args(Tier))}")
