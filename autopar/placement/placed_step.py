"""A placed step: everything that its cost breakdown and its memory depend on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.ir.assignment import Assignment
from autopar.ir.graph import Graph
from autopar.ir.microbatching import ONCE, Repeats

from .prices import Prices


@dataclass(frozen=True, slots=True)
class SharedParameter:
    """A parameter that another chunk stores and updates. ``is_remote``: that chunk is on other devices, which send the
    parameter once a step and receive its gradient, in ``seconds``."""

    is_remote: bool
    seconds: float = 0.0


# The parameters that a chunk uses but does not store, by path.
SharedParameters = Mapping[str, SharedParameter]


@dataclass(frozen=True)
class PlacedStep:
    """A step that runs ``graph``, recomputed nodes included, placed by ``assignment`` on the devices of ``prices``, as
    often as ``repeats`` says. ``shared_parameters``: the parameters that it does not store. ``counts``: by name, how
    many nodes of a deeper step those stand for that stand for several."""

    graph: Graph
    assignment: Assignment
    prices: Prices
    optimizer: str
    repeats: Repeats = ONCE
    shared_parameters: SharedParameters = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)

    def count_of(self, name: str) -> int:
        """How many nodes the node ``name`` stands for, itself included."""
        return self.counts.get(name, 1)


def phases_of(graph: Graph) -> int:
    """The phases of a step: forward, and backward if there is one."""
    return 2 if graph.gradients else 1


def trained(graph: Graph) -> tuple[str, ...]:
    """Paths of the parameters that get a gradient."""
    return tuple(graph.gradients)
