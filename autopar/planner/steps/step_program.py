"""The program of one device for a placed step without stages."""

from __future__ import annotations

from dataclasses import replace

from autopar.ir.assignment import Assignment
from autopar.ir.graph import Graph
from autopar.ir.pipeline_program import PipelineProgram, StagedParameter
from autopar.ir.program import Program
from autopar.ir.stage_meshes import StageMeshes
from autopar.passes.lower.lower import Lowering, lower
from autopar.passes.lower.lower_chunk import ChunkLowering, lower_chunk
from autopar.passes.lower.overlap import overlap
from autopar.placement.placed_step import PlacedStep
from autopar.placement.prices import BUCKET_BYTES, Prices
from autopar.schedule.named import make_schedule


def step_program(graph: Graph, assignment: Assignment, prices: Prices, coordinate: tuple[int, ...]) -> Program:
    """The program of the device at ``coordinate`` for a placed step without stages, which has the nodes that it
    recomputes."""
    job = Lowering(graph, assignment, coordinate, prices.path, BUCKET_BYTES, prices.messages)
    return overlap(lower(job, graph.outputs))


def without_input_gradients(graph: Graph) -> Graph:
    """The graph of a step that does not return the gradients of its inputs."""
    return replace(graph, outputs=tuple(output for output in graph.outputs if output.kind != "input_gradient"))


def program_in_microbatches(step: PlacedStep) -> PipelineProgram:
    """The program of the fullest device for a placed step that runs its microbatches one after the other, without
    results and inputs."""
    prices = step.prices
    graph = without_input_gradients(step.graph)
    job = Lowering(graph, step.assignment, prices.fullest, prices.path, BUCKET_BYTES, prices.messages)
    schedule, meshes = make_schedule("1f1b", 1, step.repeats.microbatches, 1), StageMeshes((prices.mesh,))
    chunk = lower_chunk(ChunkLowering(job, 0, {}, schedule, meshes))
    return PipelineProgram(
        meshes=meshes,
        coordinate=(0, *prices.fullest),
        schedule=schedule,
        chunks={0: chunk},
        parameters=tuple(StagedParameter(slot, (0,), ()) for slot in chunk.parameters),
        results=(),
        inputs={},
    )
