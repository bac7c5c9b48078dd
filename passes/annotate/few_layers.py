"""Leaves out all but few layers of deep stacks: what layers have in common is found out from few of them.

A pass over all stacks by :class:`.OmitLayers`. Of layers 0 to 127 that are equal but for the first, 0 to 2 and 126 to
127 are left. These include the first node of every class, by whose name a class goes.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

from autopar.errors import GraphError
from autopar.ir.graph import Graph
from autopar.passes.base import Pass

from .omit_layers import OmitLayers, Stack, stacks_of

# Layers that are kept at each end of what repeats in a stack, and how many more of a ``longer`` one.
# Chosen: what the ends of forward and backward hold besides saved activations ends within two layers.
ENDS, MORE = 2, 2
# The least layers of a stack that are left out: below, all take not much longer than few.
# Chosen, not measured.
LEAST_OMITTED = 4


@dataclass(frozen=True)
class FewLayers(Pass):
    """Leaves out the middle layers of every deep stack of a graph with classes. Of the stack at the path ``longer``
    some more are kept. A stack of which values are read outside, layer by layer, keeps all of its layers."""

    name: ClassVar[str] = "few-layers"
    longer: str = ""

    def apply(self, graph: Graph) -> Graph:
        return self.shortened(graph)[0]

    def shortened(self, graph: Graph) -> tuple[Graph, tuple[Stack, ...]]:
        """The graph, and the stacks that lack layers in it."""
        few, stacks = graph.once((FewLayers, self.longer), lambda: self._shortened(graph))
        return (few if few.strategies is graph.strategies else few.annotated(strategies=graph.strategies)), stacks

    def _shortened(self, graph: Graph) -> tuple[Graph, tuple[Stack, ...]]:
        found: list[Stack] = []
        for stack in stacks_of(graph, LEAST_OMITTED):
            if _omitted(stack, 0) >= LEAST_OMITTED:
                with suppress(GraphError):
                    graph = self.omits(stack)(graph)
                    found.append(stack)
        return graph, tuple(found)

    def omits(self, stack: Stack) -> OmitLayers:
        """What is left out of ``stack``."""
        return OmitLayers(stack, stack.first + _whole_turns(stack, ENDS), _omitted(stack, self._more(stack)))

    def repeated(self, stack: Stack) -> tuple[range, int]:
        """The last turn of layers before those that are left out, and how often these repeat it."""
        omits = self.omits(stack)
        return range(omits.begin - stack.period, omits.begin), omits.count // stack.period

    def missing(self, stack: Stack) -> float:
        """How many times as many layers as ``longer`` adds to ``stack`` are left out without it."""
        return _omitted(stack, 0) / (_omitted(stack, 0) - _omitted(stack, 1))

    def _more(self, stack: Stack) -> int:
        return 1 if stack.path == self.longer else 0


def _whole_turns(stack: Stack, count: int) -> int:
    """At least ``count`` layers of ``stack``, in whole turns."""
    return -(-count // stack.period) * stack.period


def _omitted(stack: Stack, more: int) -> int:
    """How many layers of ``stack`` are left out, if ``MORE`` of them, or a turn, are kept ``more`` times besides those
    at both ends."""
    kept = 2 * _whole_turns(stack, ENDS) + more * _whole_turns(stack, MORE)
    return max(0, (stack.last - stack.first - kept) // stack.period * stack.period)
