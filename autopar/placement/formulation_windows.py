"""The windows of a placement program: which of its groups compute, and which of its transfers travel meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.node import REST
from autopar.solver.problem import Window

from .choices import OUTPUTS, Offer
from .edges import Route
from .overlap_windows import Beside, windows_of


def instance_windows(offer: Offer, routes: Sequence[Route]) -> tuple[Window, ...]:
    """The windows of a step; transfer i is that of ``routes[i]``."""
    found = windows_of(offer.graph, offer.prices.cluster, offer.repeats)
    return tuple(_window(offer, window, routes) for window in found)


def _window(offer: Offer, window: Beside, routes: Sequence[Route]) -> Window:
    """Groups and gathers cost what they do in all microbatches, reductions once."""
    part = window.times / offer.repeats.microbatches
    computes = (i for i, name in enumerate(offer.choices) if _computes(offer, name, window.phase))
    gathers = (i for i, route in enumerate(routes) if _gathers(offer, route, window.phase))
    reductions = (i for i, route in enumerate(routes) if window.reduces and route.role == "gradient")
    transfers = dict.fromkeys(gathers, part) | dict.fromkeys(reductions, 1.0)
    return Window(window.name, dict.fromkeys(computes, part), transfers, window.hidden)


def _computes(offer: Offer, name: str, phase: str) -> bool:
    if name == OUTPUTS:
        return False
    node = offer.graph[name]
    return node.phase == phase and not node.is_placeholder and node.op != REST


def _gathers(offer: Offer, route: Route, phase: str) -> bool:
    return route.role == phase and offer.graph[route.producer].op == "param"
