"""Levels of the network between devices, and the rates of collectives on each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from autopar.errors import OptionsError
from autopar.ir.program import COLLECTIVES
from autopar.keywords import suggests_fields

# Algorithms of collectives; :mod:`autopar.cost.collective.algorithms` describes them.
ALGORITHMS = ("ring", "levels", "tree", "nvls", "direct")
MESSAGE = "message"


def is_rate(value: float) -> bool:
    """Whether ``value`` is a positive number."""
    return 0 < value < math.inf


def is_amount(value: float) -> bool:
    """Whether ``value`` is a number of at least zero."""
    return 0 <= value < math.inf


def require(holds: bool, message: str) -> None:
    """Raises :class:`OptionsError` with ``message`` unless ``holds``."""
    if not holds:
        raise OptionsError(message)


@dataclass(frozen=True, slots=True)
class Rate:
    """A line of the alpha-beta model: a collective takes ``start`` seconds, ``latency`` seconds per step, and its
    traffic over ``bandwidth`` (bytes per second, per device and direction).

    ``ramp`` seconds r bend the line where messages are too small to fill the link: with x = traffic / bandwidth, the
    traffic takes x + 2 sqrt(r x), like a pipeline that cuts its message into the best number of pieces. ``algorithm``
    is the algorithm that the line describes, empty for all. With ``growth`` above 1 the latency grows faster than the
    logarithm of the group: processes that share cores wait for each other's time slices.
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


@suggests_fields
@dataclass(frozen=True)
class Link:
    """One level of the network: groups of ``size`` consecutive devices (all devices, inner levels included; None: any
    number). Each device sends ``bandwidth`` bytes per second in each direction, and a step takes ``latency`` seconds.

    Args:
        rates: the rates of collectives that differ (``all_gather`` on gloo), and of ``message``, from one device to
            another. A kind may have several rates: of the rates of one algorithm the one that takes longest counts (it
            bends upward where large messages fall out of a cache), and of several algorithms the quickest.
        adapters: the number of adapters for each block of the inner level, if its devices share them; ``bandwidth`` is
            then that of one adapter.
        oversubscription: the ratio of the devices' bandwidth to what the level carries when all devices send at once
            (the upper stages of a fat tree).
        torus: the lengths of the dims of a torus, innermost first, if the level is one; ``bandwidth`` is then that of a
            device's two links in one dim together, and a group has that of every dim it spans.
        pair_bandwidth: bytes per second from one device to another, if that is less than ``bandwidth`` (links that join
            devices directly, or a library that uses few of them). A group of n has at most n - 1 times as much.
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
        """The link's own rate, for kinds of collective without rates of their own."""
        return Rate(self.latency, self.bandwidth)

    def lines(self, kind: str, algorithm: str = "") -> tuple[Rate, ...]:
        """The rates of ``kind`` by ``algorithm``: those given for the algorithm, otherwise those given for all
        algorithms, otherwise the link's own latency and bandwidth."""
        rates = self.rates.get(kind, ())
        exact = tuple(rate for rate in rates if rate.algorithm == algorithm)
        return exact or tuple(rate for rate in rates if not rate.algorithm) or (self.own,)

    def share(self, inside: int) -> float:
        """The share of a rate's bandwidth that each device gets if all send at once. ``inside``: the number of devices
        that the inner level joins."""
        adapters = 1.0 if self.adapters is None else self.adapters / inside
        return adapters / self.oversubscription
