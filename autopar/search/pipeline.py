"""The quickest pipeline for one division of the devices into stages and of the batch into microbatches.

The placement program is solved once, for the graph of one microbatch on the mesh inside a stage, or once for each kind
of stage where they have unequal meshes. Its solution prices every node. From these prices come the cuts (:mod:`.cuts`)
and, for each schedule, the simulated step (:mod:`.stage_prices.pipeline_breakdown`). The quickest step wins.

Within a limit of memory the program is solved several times. What decides is what stages hold, where they are soon
rehearsed and equal (:mod:`.rehearsed_rounds`), otherwise what is counted of them (:mod:`.counted_rounds`).

Where devices are of several kinds (:mod:`.stage_devices`), each stage is priced and limited by its own, and the order
in which stages lie on them is tried like a schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from autopar.ir.graph import Graph
from autopar.passes.pipeline.cut_candidates import CutCandidate, cut_candidates
from autopar.passes.pipeline.microbatch import Microbatched, microbatch
from autopar.passes.recompute.saved_values import SaveActivations
from autopar.planner.mesh_solution import MeshSolution

from .counted_rounds import best_of_counted
from .fitting_schedules import kinds_within
from .pipeline_request import PipelineRequest
from .pipeline_solution import PipelineSolution
from .rehearsed_memory import is_soon_rehearsed
from .rehearsed_rounds import best_of_rehearsed
from .rounds import Sought, slowest_of_use
from .segments import PinnedTogetherError, pinned_ranks, segment_of_nodes


def search(request: PipelineRequest) -> PipelineSolution:
    """The quickest pipeline for one layout and number of microbatches.

    Raises:
        InfeasibleError: no division into stages fits into the memory of the devices or of their hosts.
            :class:`TooSlowError`: such a pipeline is expected to take longer than the best plan.
        OptionsError: the batch does not divide, the model has too few places to cut, or a pin cannot be met.
    """
    pieces = _pieces(request)
    saving = request.shared.once("saving", (pieces,), make=lambda: SaveActivations()(pieces.graph))
    candidates, segment_of = _candidates(request, pieces.graph)
    kinds_within(request, len(candidates) + 1)
    return _best(Sought(request, pieces, saving, candidates, segment_of))


def _best(sought: Sought) -> PipelineSolution:
    quickest = _too_large(sought)
    slowest = math.inf if quickest is None else slowest_of_use(sought, quickest)
    if is_soon_rehearsed(sought.request.layout, sought.saving, sought.request.microbatches):
        return best_of_rehearsed(sought, slowest, quickest)
    return best_of_counted(sought, slowest)


def _too_large(sought: Sought) -> tuple[MeshSolution, ...] | None:
    """The solutions of the program without limits, if a better plan is known and they do not fit."""
    request, program = sought.request, sought.first
    if request.layout.stages == 1 or math.isinf(request.best):
        return None
    return request.too_large(sought.saving, program.repeats, program.limit, program.host)


def _pieces(request: PipelineRequest) -> Microbatched:
    """The graph of a microbatch. Raises :class:`OptionsError` if the batch does not divide."""
    graph, count, inputs = request.graph, request.microbatches, request.inputs
    settings = count, tuple(inputs.items()), request.alone is None
    return request.shared.once(
        "microbatch", (graph,), *settings, make=lambda: microbatch(graph, count, inputs, request.alone)
    )


def _candidates(request: PipelineRequest, graph: Graph) -> tuple[tuple[CutCandidate, ...], dict[str, int]]:
    """Where the graph may be cut, and the segment of each node. Takes the best places, and as many more as are needed
    to separate modules that pins put on different stages. Raises :class:`OptionsError` if none separate them."""
    least = _least_cuts(request)
    while True:
        cuts = cut_candidates if request.layout.stages > 1 else _no_cuts
        candidates, segment_of = request.shared.once(
            "segments", (graph,), cuts, least, make=partial(_segments, graph, cuts, least)
        )
        try:
            pinned_ranks(graph, segment_of, len(candidates) + 1, request.pins, request.layout.stages)
        except PinnedTogetherError:
            if len(candidates) < least:
                raise
            least = len(candidates) + 1
        else:
            return candidates, segment_of


def _no_cuts(graph: Graph, least: int) -> tuple[CutCandidate, ...]:
    return ()


def _segments(
    graph: Graph, cuts: Callable[[Graph, int], tuple[CutCandidate, ...]], least: int
) -> tuple[tuple[CutCandidate, ...], dict[str, int]]:
    candidates = cuts(graph, least)
    return candidates, segment_of_nodes(graph, candidates)


def _least_cuts(request: PipelineRequest) -> int:
    """How many cuts are needed at least: those of the requested schedule, or of one with a chunk per stage."""
    return min(request.layout.stages * chunks for _, chunks in request.kinds) - 1
