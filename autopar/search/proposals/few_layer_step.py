"""The step with few of its layers, and how to unfold what is known of its segments to all layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from autopar.errors import OptionsError
from autopar.ir.graph import Graph
from autopar.ir.node import Output
from autopar.passes.annotate.few_layers import FewLayers
from autopar.passes.annotate.omit_layers import Stack, number_in, stacks_of
from autopar.passes.pipeline.cut_candidates import CutCandidate, cut_candidates
from autopar.passes.pipeline.microbatch import microbatch, split_inputs
from autopar.passes.recompute.saved_values import SaveActivations
from autopar.placement.prices import exchanged_bytes
from autopar.planner.request import PlanRequest, folded_graph
from autopar.planner.step_graphs import pipelined_step_of
from autopar.search.segments import segment_of_nodes

# The fewest equal layers of a model for which stages are proposed: one could not be cut.
LEAST_LAYERS = 2


@dataclass(frozen=True, eq=False)
class Microbatch:
    """One of several microbatches of a few-layer step. ``graph`` has nodes for saved activations, ``bare`` has none; it
    is cut at ``candidates``; ``segment_of``: of each node; ``unfolded``: for each segment of all layers, the one that
    stands for it; ``exchanged``: bytes of the unsharded gradients of all layers."""

    graph: Graph
    bare: Graph
    exchanged: int
    candidates: tuple[CutCandidate, ...]
    segment_of: Mapping[str, int]
    unfolded: tuple[int, ...]

    @cached_property
    def starts(self) -> tuple[str, ...]:
        """A name for the start of each segment of all layers but the first."""
        return tuple(f"{self.candidates[own - 1].name}+{at}" for at, own in enumerate(self.unfolded[1:], start=1))

    @cached_property
    def returned(self) -> tuple[Output, ...]:
        """The gradients that a segment returns to earlier ones: every stage but the first has such work."""
        of, backward = self.segment_of, {node.name: node for node in self.bare if node.phase == "backward"}
        read = ((value, of[name]) for name, node in backward.items() if name in of for value in node.operands)
        late = (value for value, own in read if value.node in backward and of.get(value.node, 0) > own)
        return tuple(Output("input_gradient", value.node, value) for value in dict.fromkeys(late))


@dataclass(frozen=True, eq=False)
class FewLayerStep:
    """The step ``graph`` of a whole batch with few layers of each of ``stacks``."""

    request: PlanRequest
    graph: Graph
    stacks: tuple[Stack, ...]

    @staticmethod
    def of(request: PlanRequest) -> FewLayerStep | None:
        """The few-layer step of a request; None if its model has no equal layers."""
        whole = folded_graph(request, pipelined_step_of(request))
        if not stacks_of(whole, LEAST_LAYERS):
            return None
        return FewLayerStep(request, *FewLayers().shortened(whole))

    def microbatch(self, count: int) -> Microbatch:
        """One of ``count`` microbatches. Raises :class:`OptionsError` if the batch does not divide, or if layers that
        are left out cannot be cut as others are."""
        pieces = microbatch(self.graph, count, split_inputs(self.request.graph))
        candidates = cut_candidates(pieces.graph)
        unfolded = tuple(range(len(candidates) + 1))
        for stack in self.stacks:
            layers = [number_in(pieces.graph[each.name], stack.path) for each in candidates]
            unfolded = _unfolded(unfolded, stack, layers)
        segments = segment_of_nodes(pieces.graph, candidates)
        exchanged = exchanged_bytes(pipelined_step_of(self.request))
        return Microbatch(SaveActivations()(pieces.graph), pieces.graph, exchanged, candidates, segments, unfolded)

    @cached_property
    def share(self) -> float:
        """The bytes of the parameters of few layers, as a share of those of all."""
        whole = pipelined_step_of(self.request)
        few, every = (sum(int(n.stored.bytes) for n in graph.placeholders("param")) for graph in (self.graph, whole))
        return few / every


def _unfolded(segments: tuple[int, ...], stack: Stack, layers: Sequence[int | None]) -> tuple[int, ...]:
    """``segments`` with those of the last turn of layers before the ones that ``stack`` lacks once more for each turn
    that it lacks. ``layers``: in which each segment but the first begins."""
    turn, times = FewLayers().repeated(stack)
    at = [at for at, own in enumerate(segments) if own and layers[own - 1] in turn]
    if not at or at != list(range(at[0], at[-1] + 1)):
        raise OptionsError(f"layers {turn} of {stack.path}* are no segments of their own")
    end = at[-1] + 1
    return segments[:end] + segments[at[0] : end] * times + segments[end:]
