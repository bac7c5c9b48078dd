"""A step as it is placed: everything that its cost breakdown and its memory depend on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.ir.assignment import Assignment
from autopar.ir.graph import Graph
from autopar.ir.microbatching import ONCE, Repeats

from .prices import Prices


@dataclass(frozen=True, slots=True)
class SharedParameter:
    """A parameter that another chunk stores and updates. ``apart``: on other devices, which send it here once a step
    and are sent its gradient, in ``seconds``."""

    apart: bool
    seconds: float = 0.0


# By path, the parameters of a chunk that it does not store.
SharedParameters = Mapping[str, SharedParameter]


@dataclass(frozen=True)
class PlacedStep:
    """``graph``, with what is recomputed, placed by ``assignment`` on the devices of ``prices`` and run as ``repeats``
    says; ``shared_parameters``: the parameters that it does not store."""

    graph: Graph
    assignment: Assignment
    prices: Prices
    optimizer: str
    repeats: Repeats = ONCE
    shared_parameters: SharedParameters = field(default_factory=dict)


def trained(graph: Graph) -> tuple[str, ...]:
    """Paths of the parameters that get a gradient."""
    return tuple(graph.gradients)
