"""The program of one device for a placed step without stages."""

from __future__ import annotations

from autopar.ir.assignment import Assignment
from autopar.ir.graph import Graph
from autopar.ir.program import Program
from autopar.passes.lower.lower import Lowering, lower
from autopar.passes.lower.overlap import overlap
from autopar.placement.prices import BUCKET_BYTES, Prices


def step_program(graph: Graph, assignment: Assignment, prices: Prices, coordinate: tuple[int, ...]) -> Program:
    """The program of the device at ``coordinate`` for a placed step without stages, which has the nodes that it
    recomputes."""
    job = Lowering(graph, assignment, coordinate, prices.path, BUCKET_BYTES, prices.messages)
    return overlap(lower(job, graph.outputs))
