"""Description of the hardware a plan is priced for. (Being written.)"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """One level of the network, chip outward: groups of ``size`` devices joined by links of that bandwidth and latency."""

    name: str
    size: int
    bandwidth: float
    latency: float
