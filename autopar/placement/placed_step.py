"""A step as it is placed: everything that its bill and its memory depend on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.ir.assignment import Assignment
from autopar.ir.graph import Graph
from autopar.ir.microbatching import ONCE, Repeats

from .prices import Prices


@dataclass(frozen=True, slots=True)
class Borrowed:
    """A parameter that another chunk stores and updates. ``apart``: on other devices, which send it here once a step
    and are sent its gradient, in ``seconds``."""

    apart: bool
    seconds: float = 0.0


# By path, the parameters of a chunk that it does not store.
Loans = Mapping[str, Borrowed]


@dataclass(frozen=True)
class PlacedStep:
    """``graph``, with what is recomputed, placed by ``assignment`` on the devices of ``prices`` and run as ``repeats``
    says; ``loans``: the parameters that it does not store."""

    graph: Graph
    assignment: Assignment
    prices: Prices
    optimizer: str
    repeats: Repeats = ONCE
    loans: Loans = field(default_factory=dict)


def trained(graph: Graph) -> tuple[str, ...]:
    """Paths of the parameters that get a gradient."""
    return tuple(graph.gradients)
