"""The programs of several ranks in one process, without the others: what they have in common is made once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autopar.errors import PlanMismatchError
from autopar.ir.assignment import Assignment
from autopar.ir.graph import Graph
from autopar.ir.pipeline_program import PipelineProgram
from autopar.ir.placements import coordinate_of
from autopar.ir.program import Program
from autopar.passes.recompute.recompute import recomputed
from autopar.placement.prices import Prices
from autopar.planner.prepare import Prepared, batch_size
from autopar.planner.step_graphs import pipelined_graph
from autopar.planner.steps.step_program import step_program
from autopar.runtime.calls.compiled import Compiled, Request

from .calls import Compiler

AnyProgram = Program | PipelineProgram


@dataclass
class SeveralRanks(Compiler):
    """A compiler of the planned step for any rank of its mesh. Its own ``ranks`` are a group of one, so nothing is
    agreed upon; a ``plan`` is given."""

    _make: Callable[[int], AnyProgram] | None = None

    def program(self, request: Request, rank: int) -> AnyProgram:
        """That of ``rank`` for ``request``, a step of the batch that was planned. Raises what compiling it raises."""
        if self._make is None:
            self._check_batch(request)
            self(request)
        assert self._make is not None
        return self._make(rank)

    def _check_batch(self, request: Request) -> None:
        assert self.plan is not None
        batch = batch_size(request.args, request.kwargs)
        if batch != self.plan.batch:
            raise PlanMismatchError(
                f"the batch has {batch} rows, but the plan was made for {self.plan.batch}: give such a batch, or plan "
                "for this one"
            )

    def _staged_training(self, request: Request, base: Prepared, batch: int) -> Compiled:
        graph = pipelined_graph(base.graph, base.loss, batch)
        placed = self._stages().placed(graph, base.graph)
        self._make = placed.program
        return self._as_compiled(placed.program(self.ranks.index), placed.caches, graph, base, batch, planned=True)

    def _lowered(
        self,
        graph: Graph,
        assignment: Assignment,
        prices: Prices,
        base: Prepared,
        batch: int,
        *,
        planned: bool = False,
    ) -> Compiled:
        assert self.plan is not None
        graph, assignment = recomputed(graph, assignment)
        mesh = self.plan.mesh

        def make(rank: int) -> Program:
            return step_program(graph, assignment, prices, coordinate_of(rank, mesh))

        self._make = make
        program = make(self.ranks.index)
        return self._as_compiled(program, assignment.resting(graph), graph, base, batch, planned=planned)
