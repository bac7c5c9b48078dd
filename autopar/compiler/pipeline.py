"""Compiles a cut and placed graph into the program of one rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Protocol

from autopar.errors import PlanMismatchError
from autopar.ir.assignment import Assignment
from autopar.ir.graph import Graph
from autopar.ir.pipeline_program import PipelineProgram, StagedParameter, StagedResult
from autopar.ir.program import Program
from autopar.ir.stage_meshes import StageMeshes
from autopar.ir.staged_graph import Staged
from autopar.ir.weight_messages import WeightMessages
from autopar.passes.lower.lower import Lowering, Path, lower, stored_slot
from autopar.passes.lower.lower_chunk import ChunkLowering, Wires, lower_chunk
from autopar.passes.pipeline.microbatch import Microbatched
from autopar.schedule.check import check
from autopar.schedule.schedule import Schedule


class PlacedChunk(Protocol):
    """A chunk's graph, with saved activations inserted, and the choice for each of its nodes."""

    @property
    def graph(self) -> Graph: ...

    @property
    def assignment(self) -> Assignment: ...


def pipeline_program(
    pieces: Microbatched,
    staged: Staged,
    chunks: Sequence[PlacedChunk],
    wires: Wires,
    schedule: Schedule,
    device: int,
    paths: Sequence[Path],
    bucket_bytes: int,
    messages: WeightMessages,
) -> PipelineProgram:
    """The program of the ``device``-th of all devices.

    Gradients of inputs are left out: a step gives none. ``paths``, by stage, ``bucket_bytes`` and ``messages`` as in
    :class:`~autopar.passes.lower.lower.Lowering`. Raises :class:`PlanMismatchError` if the parts do not belong
    together, or if chunks store a parameter they share differently, and :class:`ScheduleError` if the schedule is not
    proven to run.
    """
    meshes = _meshes(pieces, chunks, schedule)
    if not 0 <= device < meshes.devices:
        raise PlanMismatchError(f"no rank is the device {device} of {schedule.stages} stages of {meshes}")
    stage, inside = meshes.place(device)
    indices = schedule.held[stage]
    jobs = [
        # Of other stages' chunks only what all their devices have in common is asked.
        Lowering(
            _stepping(chunk.graph),
            chunk.assignment,
            inside if index in indices else (0,) * len(inside),
            paths[schedule.placement[index]],
            bucket_bytes,
            messages,
        )
        for index, chunk in enumerate(chunks)
    ]
    return PipelineProgram(
        meshes=meshes,
        coordinate=(stage, *inside),
        schedule=schedule,
        chunks={index: lower_chunk(ChunkLowering(jobs[index], index, wires, schedule, meshes)) for index in indices},
        parameters=tuple(_parameters(staged, jobs, schedule.placement)),
        results=tuple(_results(pieces, jobs)),
        inputs=pieces.inputs,
        draws=any(job.graph.placeholders("random") for job in jobs)
        or (staged.prelude is not None and bool(staged.prelude.placeholders("random"))),
        prelude=None if staged.prelude is None else prelude_program(staged.prelude),
    )


def _stepping(graph: Graph) -> Graph:
    return replace(graph, outputs=tuple(o for o in graph.outputs if o.kind != "input_gradient"))


def _meshes(pieces: Microbatched, chunks: Sequence[PlacedChunk], schedule: Schedule) -> StageMeshes:
    """The mesh of each stage, on which its chunks are placed."""
    if pieces.count != schedule.microbatches:
        raise PlanMismatchError(f"{pieces.count} microbatches under a schedule of {schedule.microbatches}")
    if len(chunks) != schedule.chunks:
        raise PlanMismatchError(f"{len(chunks)} chunks under a schedule of {schedule.chunks}")
    for stage, held in enumerate(schedule.held):
        on = {chunks[chunk].assignment.mesh for chunk in held}
        if len(on) > 1:
            raise PlanMismatchError(
                f"the chunks of stage {stage} are placed on different meshes: {', '.join(map(str, sorted(on)))}"
            )
    if pieces.own_statistics and any(
        _forwards(schedule, chunk) != list(range(pieces.count)) for chunk in range(schedule.chunks)
    ):
        raise PlanMismatchError(
            f"the schedule {schedule.name!r} runs the microbatches of a chunk out of order, but each of them "
            "begins with the buffers that the one before left"
        )
    _prove(schedule)
    return StageMeshes(tuple(chunks[held[0]].assignment.mesh for held in schedule.held))


def _forwards(schedule: Schedule, chunk: int) -> list[int]:
    """The microbatches of a chunk's forwards, in the order of its rank."""
    listed = schedule.ranks[schedule.placement[chunk]]
    return [action.microbatch for action in listed if action.kind == "forward" and action.chunk == chunk]


# A process that compiles the programs of many ranks proves their schedule once.
@lru_cache(maxsize=8)
def _prove(schedule: Schedule) -> None:
    """Raises :class:`ScheduleError` for a schedule that would stall or compute something else. The proof assumes that
    each message blocks until both its ends are posted: NCCL may do so, and the messenger waits for earlier sends at
    any point."""
    check(schedule, "blocking")


def prelude_program(graph: Graph) -> Program:
    """The program of what is computed once a step and for the whole batch, by every rank alone."""
    unplaced = Assignment((), {}, {})
    job = Lowering(graph, unplaced, (), lambda kind, source, target, sent: (), 0)
    return lower(job, graph.outputs)


def _parameters(staged: Staged, jobs: Sequence[Lowering], placement: tuple[int, ...]) -> Iterable[StagedParameter]:
    are_equal = len({job.mesh for job in jobs}) == 1
    for path, users in staged.owners.items():
        slots = {chunk: stored_slot(jobs[chunk], jobs[chunk].graph.parameters[path]) for chunk in users}
        owner, home = slots[users[0]], placement[users[0]]
        # Stages of equal meshes exchange with their counterparts alone, and so have a parameter alike.
        apart = {chunk for chunk in users if not are_equal and placement[chunk] != home}
        here = jobs[users[0]].mesh, owner.placements
        elsewhere = {
            c: slots[c].placements for c in users if c in apart and (jobs[c].mesh, slots[c].placements) != here
        }
        if any(slot.placements != owner.placements for c, slot in slots.items() if c not in elsewhere):
            places = "; ".join(f"chunk {chunk}: {slot.placements}" for chunk, slot in slots.items())
            raise PlanMismatchError(f"the parameter {path} is stored differently by the chunks that share it: {places}")
        gradients = tuple(chunk for chunk in users if path in jobs[chunk].graph.gradients)
        yield StagedParameter(owner, users, gradients, elsewhere)


def _results(pieces: Microbatched, jobs: Sequence[Lowering]) -> Iterable[StagedResult]:
    """Yields the results of all chunks, each once: several chunks compute what depends on data alone."""
    seen: set[tuple[str, str]] = set()
    for index, job in enumerate(jobs):
        for output in job.graph.outputs:
            key = (output.kind, output.name)
            if output.kind == "mutation" and output.name in job.graph.caches:
                continue  # It stays on its stage.
            if output.kind in ("output", "mutation") and output.value is not None and key not in seen:
                seen.add(key)
                slot = job.output_slot(output, job.assignment.replicated)
                yield StagedResult(slot, index, pieces.combine.get(key, "same"))
