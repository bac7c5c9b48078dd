"""Levels of the network between devices, and how quick collectives are on each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from autopar.errors import OptionsError
from autopar.ir.program import COLLECTIVES

# How a library may carry out a collective: :mod:`autopar.cost.collective.algorithms` says what each does.
ALGORITHMS = ("ring", "levels", "tree", "nvls", "direct")
MESSAGE = "message"


def is_rate(value: float) -> bool:
    """Whether ``value`` is a positive number."""
    return 0 < value < math.inf


def is_amount(value: float) -> bool:
    """Whether ``value`` is a number not below zero."""
    return 0 <= value < math.inf


def require(holds: bool, message: str) -> None:
    """Raises :class:`OptionsError` with ``message`` unless ``holds``."""
    if not holds:
        raise OptionsError(message)


@dataclass(frozen=True, slots=True)
class Rate:
    """A line of the alpha-beta model: a collective takes ``start`` seconds, ``latency`` seconds per step, and its
    traffic over ``bandwidth`` (bytes per second, per device and direction).

    ``ramp`` seconds r bend the line where messages are too small to fill the link: with x = traffic / bandwidth it
    takes x + 2 sqrt(r x), which is what a pipeline takes that cuts its message into the best number of pieces.
    ``algorithm`` is the one the line describes, empty for all. With ``growth`` above 1 the latency grows faster than
    the logarithm of the group: processes that share cores wait for each other's time slices.
    """

    latency: float
    bandwidth: float
    growth: float = 1.0
    start: float = 0.0
    ramp: float = 0.0
    algorithm: str = ""

    def __post_init__(self) -> None:
        for name in ("latency", "start", "ramp"):
            value = getattr(self, name)
            require(value >= 0 and math.isfinite(value), f"{name} {value!r} is not a time in seconds")
        require(self.bandwidth > 0, f"bandwidth {self.bandwidth!r} is not a positive number of bytes per second")
        require(is_rate(self.growth), f"growth {self.growth!r} of a latency is not a positive number")
        algorithms = ", ".join(ALGORITHMS)
        require(self.algorithm in ("", *ALGORITHMS), f"{self.algorithm!r} is not an algorithm; one of {algorithms}")


@dataclass(frozen=True)
class Link:
    """One level of the network: groups of ``size`` consecutive devices (counted in all, inner levels included; None:
    any number) in which each device sends ``bandwidth`` bytes per second in each direction, a step taking ``latency``
    seconds.

    Args:
        rates: kinds of collective that differ (``all_gather`` on gloo), and ``message`` for what one device sends to
            another. A kind may have several rates: of those of one algorithm the largest counts, which bends upward
            where large messages fall out of a cache, and among algorithms the quickest.
        adapters: how many there are for each block of the level inside, if its devices share them; ``bandwidth`` is
            then that of one adapter.
        oversubscription: how many times more bandwidth the devices have than the level carries when all send at once
            (a fat tree's upper stages).
        torus: the lengths of the dims of a torus of which the level consists, innermost first; ``bandwidth`` is then
            that of the two links a device has in one dim, together, and a group has that of every dim it spans.
        pair_bandwidth: bytes per second from one device to another, where that is less than ``bandwidth`` (links that
            join devices directly, or a library that uses few of them): a group of n has at most n - 1 times as much.
    """

    name: str
    size: int | None
    bandwidth: float
    latency: float
    rates: Mapping[str, tuple[Rate, ...]] = field(default_factory=dict)
    adapters: int | None = None
    oversubscription: float = 1.0
    torus: tuple[int, ...] = ()
    pair_bandwidth: float = math.inf

    def __post_init__(self) -> None:
        where = f"link {self.name!r}"
        require(self.size is None or self.size > 0, f"{where}: size {self.size!r} is not a number of devices")
        require(is_rate(self.bandwidth), f"{where}: bandwidth {self.bandwidth!r} is not a positive number (bytes/s)")
        require(is_amount(self.latency), f"{where}: latency {self.latency!r} is not a number of seconds")
        require(self.adapters is None or self.adapters > 0, f"{where}: adapters {self.adapters!r} is not positive")
        require(self.pair_bandwidth > 0, f"{where}: pair_bandwidth {self.pair_bandwidth!r} is not positive")
        require(
            1 <= self.oversubscription < math.inf,
            f"{where}: oversubscription {self.oversubscription!r} is not a number of at least 1",
        )
        require(all(dim > 0 for dim in self.torus), f"{where}: torus {self.torus} has a dim without devices")
        kinds = (*COLLECTIVES, MESSAGE)
        for kind, lines in self.rates.items():
            require(kind in kinds, f"{where}: {kind!r} is not a collective; one of {', '.join(kinds)}")
            require(len(lines) > 0, f"{where}: {kind} has no rate; leave it out to use the link's own")

    @cached_property
    def own(self) -> Rate:
        """What the link does for a kind nothing more is said of."""
        return Rate(self.latency, self.bandwidth)

    def lines(self, kind: str, algorithm: str = "") -> tuple[Rate, ...]:
        """The rates of ``kind`` by ``algorithm``: those said of it, else those said of all, else the link's own latency
        and bandwidth."""
        rates = self.rates.get(kind, ())
        exact = tuple(rate for rate in rates if rate.algorithm == algorithm)
        return exact or tuple(rate for rate in rates if not rate.algorithm) or (self.own,)

    def share(self, inside: int) -> float:
        """Which part of a rate's bandwidth each device has, where all send at once and the level inside joins
        ``inside`` devices."""
        adapters = 1.0 if self.adapters is None else self.adapters / inside
        return adapters / self.oversubscription
