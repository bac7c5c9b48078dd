"""The text form of a :class:`~autopar.ir.pipeline_program.PipelineProgram`: fields, which that module makes objects of.

    # pipeline, rank at (1, 0) of mesh (2, 2), draws
    schedule 1f1b microbatches=2 training
    placement 0 1
    ...
    input "x" dim 0
    input "scale" whole
    parameter "w" = param "layers.1.weight": f32[4, 8] at (S(0)) in chunks 0 1, gradients 1
    result "loss" = output "0": f32[] at (R) from chunk 1, sum
    # rank at () of mesh ()
    ...
    # chunk 1, rank at (0,) of mesh (2,)
    ...

The head of a rank whose stages have unequal meshes names them all: ``of meshes (1,) (3,)``. A parameter that a chunk
has on another mesh says how: ``in chunks 0 1, gradients 1, in 1 at (S(0))``. The lines of the schedule are
:mod:`autopar.schedule.text`'s. The program of the prelude follows if there is one, then
those of the rank's chunks, ascending.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from autopar.errors import GraphError
from autopar.schedule.schedule import Schedule

from .chunk_program import ChunkProgram
from .graph_text import text_lines
from .placements import Placements, parse_placements, short
from .program import Program, TensorSlot
from .program_text import parse_integers, parse_slot
from .stage_meshes import StageMeshes

_HEAD = re.compile(r"^# pipeline, rank at (\([\d, ]+\)) of mesh(es)?((?: \([\d, ]+\))+)(, draws)?$")
_INPUT = re.compile(r'^input ("(?:.*)") (?:dim (\d+)|whole)$')
_IN_CHUNKS = re.compile(r"^in chunks(( \d+)+), gradients(( \d+)*)((?:, in \d+ at \([^ ]+\))*)$")
_FROM_CHUNK = re.compile(r"^from chunk (\d+), (\S+)$")
_SCHEDULE = ("schedule", "placement", "edges", "in_flight", "rank")
_WORDS = (*_SCHEDULE, "input", "parameter", "result")


class StagedParameterParts(NamedTuple):
    """The fields of a :class:`~autopar.ir.pipeline_program.StagedParameter`."""

    slot: TensorSlot
    chunks: tuple[int, ...]
    gradients: tuple[int, ...]
    elsewhere: Mapping[int, Placements]


class StagedResultParts(NamedTuple):
    """The fields of a :class:`~autopar.ir.pipeline_program.StagedResult`."""

    slot: TensorSlot
    chunk: int
    combine: str


def print_meshes(meshes: StageMeshes) -> str:
    """The end of the head: the mesh of all devices or, if they are unequal, those of the stages."""
    return f"mesh {meshes.whole}" if meshes.are_equal else f"meshes {' '.join(map(str, meshes.meshes))}"


def print_chunks(
    chunks: tuple[int, ...], gradients: tuple[int, ...], elsewhere: Mapping[int, Placements] | None = None
) -> str:
    """The end of the line of a parameter that ``chunks`` use."""
    others = "".join(f", in {chunk} at {short(place)}" for chunk, place in (elsewhere or {}).items())
    return " ".join(["in chunks", *map(str, chunks)]) + " ".join([", gradients", *map(str, gradients)]) + others


def print_combine(chunk: int, combine: str) -> str:
    """The end of the line of a result."""
    return f"from chunk {chunk}, {combine}"


def print_input(name: str, dim: int | None) -> str:
    """The line of an input that microbatches take pieces of along ``dim``."""
    return f"input {json.dumps(name)} {'whole' if dim is None else f'dim {dim}'}"


def parse_pipeline(text: str) -> dict[str, Any]:
    """The fields of the program that was printed, parameters and results as parts. Raises :class:`GraphError` naming
    the line, and :class:`ScheduleError` for the lines of the schedule."""
    lines = text_lines(text)
    head = _HEAD.match(lines[0]) if lines else None
    if head is None:
        raise GraphError('a pipeline starts with a line such as "# pipeline, rank at (1, 0) of mesh (2, 2)"')
    starts = [at for at, line in enumerate(lines) if line.startswith("# ")]
    own, *programs = (lines[a:b] for a, b in pairwise([*starts, len(lines)]))
    by_word = _by_word(own[1:])
    schedule = Schedule.from_text("\n".join(line for word in _SCHEDULE for line in by_word[word]))
    coordinate = parse_integers(head[1])
    return {
        "meshes": _parse_meshes(head[3], unequal=head[2] is not None),
        "coordinate": coordinate,
        "schedule": schedule,
        "chunks": _parse_chunks([lines for lines in programs if not _is_prelude(lines)], schedule, coordinate[0]),
        "parameters": tuple(map(_parse_parameter, by_word["parameter"])),
        "results": tuple(map(_parse_result, by_word["result"])),
        "inputs": dict(map(_parse_input, by_word["input"])),
        "prelude": _parse_prelude([lines for lines in programs if _is_prelude(lines)]),
        "draws": head[4] is not None,
    }


def _parse_meshes(text: str, *, unequal: bool) -> StageMeshes:
    meshes = tuple(map(parse_integers, re.findall(r"\([\d, ]+\)", text)))
    return StageMeshes(meshes) if unequal else StageMeshes.equal(meshes[0][0], meshes[0][1:])


def _by_word(lines: list[str]) -> Mapping[str, list[str]]:
    """Lines by the word that they begin with."""
    by_word: dict[str, list[str]] = {word: [] for word in _WORDS}
    for line in lines:
        word = line.split(" ")[0]
        if word not in by_word:
            raise GraphError(f"a line of a pipeline begins with one of {', '.join(_WORDS)}; found {line!r}")
        by_word[word].append(line)
    return by_word


def _is_prelude(lines: list[str]) -> bool:
    return lines[0].startswith("# rank at")


def _parse_prelude(programs: list[list[str]]) -> Program | None:
    if len(programs) > 1:
        raise GraphError(
            f"a pipeline has one prelude at most; found {len(programs)} programs that begin with # rank at"
        )
    return Program.from_text("\n".join(programs[0])) if programs else None


def _parse_chunks(programs: list[list[str]], schedule: Schedule, stage: int) -> dict[int, ChunkProgram]:
    chunks = [ChunkProgram.from_text("\n".join(lines)) for lines in programs]
    if stage >= schedule.stages:
        raise GraphError(f"the rank is on stage {stage}, but its schedule has {schedule.stages}, counted from 0")
    indices, scheduled = tuple(chunk.chunk for chunk in chunks), schedule.held[stage]
    if indices != scheduled:
        listed = ", ".join(map(str, indices)) or "none"
        raise GraphError(
            f"stage {stage} has the chunks {', '.join(map(str, scheduled))} by its schedule; found: {listed}"
        )
    return {chunk.chunk: chunk for chunk in chunks}


def _parse_input(line: str) -> tuple[str, int | None]:
    match = _INPUT.match(line)
    if match is None:
        raise GraphError(
            f'cannot read the line {line!r}; an input is written as in input "x" dim 0, or input "x" whole'
        )
    return json.loads(match[1]), None if match[2] is None else int(match[2])


def _parse_parameter(line: str) -> StagedParameterParts:
    _, slot, tail = parse_slot(line)
    match = _IN_CHUNKS.match(tail)
    if match is None:
        raise GraphError(
            f"the line of a parameter ends as in {print_chunks((0, 1), (0,))!r}, not with {tail!r}: {line!r}"
        )
    others = re.findall(r", in (\d+) at (\([^ ]+\))", match[5])
    elsewhere = {int(chunk): parse_placements(place) for chunk, place in others}
    return StagedParameterParts(TensorSlot(*slot), parse_integers(match[1]), parse_integers(match[3]), elsewhere)


def _parse_result(line: str) -> StagedResultParts:
    _, slot, tail = parse_slot(line)
    match = _FROM_CHUNK.match(tail)
    if match is None:
        raise GraphError(f"the line of a result ends as in {print_combine(1, 'sum')!r}, not with {tail!r}: {line!r}")
    return StagedResultParts(TensorSlot(*slot), int(match[1]), match[2])
