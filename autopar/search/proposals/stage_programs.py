"""Solves the placement programs of one microbatch of few layers on the mesh inside a stage.

Their axes have the roles that a layout gives them, as in the search for a plan of that layout."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.cost import usable_host_bytes
from autopar.errors import AutoparError
from autopar.layout import Layout
from autopar.planner.formulate import with_memory_savers
from autopar.planner.memory_limit import with_recomputed
from autopar.planner.mesh_solution import MeshSolution
from autopar.planner.request import UNLIMITED, PlanRequest, memory_limit_of
from autopar.planner.solve_mesh import solve_only
from autopar.planner.timings import Timings
from autopar.search.restricted.arrangements import arrangements
from autopar.search.rounds import inner_repeats
from autopar.solver.problem import Solution, evaluate

from .few_layer_step import FewLayerStep, Microbatch
from .stage_costs import PlacedStage


def division(tensor: int, pipeline: int, data: int, microbatch: int) -> Layout:
    """The layout that a proposal of these degrees is. What the search for its plan decides as well as it can be, such
    as the schedule, and where weights rest, is left to it."""
    return Layout(tensor=tensor, pipeline=pipeline, data=data, context=1, microbatch=microbatch)


@dataclass
class StagePrograms:
    """The programs of ``step``, each solved when it is first asked for."""

    step: FewLayerStep
    # By tensor ranks and samples, what has been placed so far, and what remains to be.
    _placed: dict[tuple[int, int], tuple[list[PlacedStage], Iterator[PlacedStage]]] = field(default_factory=dict)
    _microbatches: dict[int, Microbatch] = field(default_factory=dict)

    def placed(self, tensor: int, samples: int) -> Iterator[PlacedStage]:
        """The placements of a microbatch of so many ``samples`` on tensor ranks alone, without limits of memory: the
        quickest, and the same with more and more recomputed, each priced when it is first asked for; none if the model
        does not divide so."""
        if (tensor, samples) not in self._placed:
            self._placed[tensor, samples] = [], self._solved(tensor, samples)
        found, rest = self._placed[tensor, samples]
        for at in itertools.count():
            if at == len(found):
                with suppress(AutoparError):  # Heads, or samples, do not divide, or samples are coupled.
                    found += itertools.islice(rest, 1)
            if at == len(found):
                return
            yield found[at]

    def any_of(self, tensor: int) -> tuple[int, PlacedStage] | None:
        """The first placement that was solved for so many tensor ranks, with its samples; None if none was."""
        return next(((m, found[0]) for (t, m), (found, _) in self._placed.items() if t == tensor and found), None)

    def _solved(self, tensor: int, samples: int) -> Iterator[PlacedStage]:
        layout = division(tensor, math.prod(self.step.request.mesh) // tensor, 1, samples)
        # The seconds of all microbatches count: of what is done once a step little depends on tensor ranks.
        inside = self._inside(layout, {"tensor"}, 1, UNLIMITED, math.inf)
        first = self._quickest(inside, layout, has_data=False)
        yield first
        others = _recomputing(inside, first.solution)
        yield from (PlacedStage(first.microbatch, solution, of_parameters=first) for solution in others)

    def placed_on(self, layout: Layout) -> tuple[PlacedStage, ...]:
        """The quickest placements of a microbatch on the mesh inside a stage of ``layout``, data ranks included, within
        the memory of all stages together; none if it does not divide so, or does not fit."""
        request, stages, share = self.step.request, layout.pipeline, self.step.share
        limits = (stages * limit * share for limit in (memory_limit_of(request), usable_host_bytes(request.cluster)))
        try:
            inside = self._inside(layout, {"data", "tensor"}, stages, *limits)
            return (self._quickest(inside, layout, has_data=True),)
        except AutoparError:
            return ()

    def _inside(
        self, layout: Layout, axes: Collection[str], stages: int, memory_limit: float, host_limit: float
    ) -> PlanRequest:
        """The request for those ``axes`` of ``layout``, which says what each axis is for, with as many microbatches in
        flight as so many ``stages`` have. Raises :class:`OptionsError` if the layout is impossible."""
        request = self.step.request
        options = replace(request.options, layout=layout, pins={}, offload=False)
        arranged = arrangements(replace(request, options=options))[0]
        inside = [(n, role) for n, role in zip(arranged.mesh, arranged.roles, strict=True) if role.name in axes]
        mesh, roles = zip(*inside, strict=True) if inside else ((1,), ())
        repeats = inner_repeats(layout.microbatches(request.batch), stages)
        own = replace(arranged, mesh=mesh, roles=roles, repeats=repeats, propose=None, axis_names=(), rank_limits=())
        return replace(own, memory_limit=memory_limit, host_limit=host_limit)

    def _quickest(self, inside: PlanRequest, layout: Layout, has_data: bool) -> PlacedStage:
        count = layout.microbatches(inside.batch)
        if count not in self._microbatches:
            self._microbatches[count] = self.step.microbatch(count)
        own = self._microbatches[count]
        return PlacedStage(own, solve_only(inside, own.graph, Timings(counted=True)), has_data)


def _recomputing(request: PlanRequest, quickest: MeshSolution) -> Iterator[MeshSolution]:
    """``quickest`` with the insides of attention recomputed, with all but products, and with whole layers."""
    wide = with_memory_savers(request, quickest.instance)
    possible = wide.recomputable
    if possible is None:
        return
    for dropped in dict.fromkeys((possible.selective, possible.selective | possible.cheap, possible.full)):
        if dropped:
            choices = with_recomputed(wide, quickest.solution.choices, possible.chain(dropped))
            objective = evaluate(wide.problem, choices)
            if math.isfinite(objective):
                yield MeshSolution.of(wide, Solution(np.asarray(choices), objective, 0.0, "feasible", 0.0))
