"""What one rank runs for a step in microbatches, over one stage or several: its chunks, and the list of actions.

The devices of each stage form a mesh; the rank at stage s holds the chunks that the schedule places there. Everything
else in a :class:`PipelineProgram` is the same on every rank, so that each can name every parameter and every result,
including those of other stages.

Text forms: ``str`` shows what runs; :meth:`PipelineProgram.to_text` has everything, and
:meth:`PipelineProgram.from_text` reads it (:mod:`.pipeline_program_text`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from autopar.schedule.schedule import Schedule

from .chunk_program import ChunkProgram
from .pipeline_program_text import parse_pipeline, print_chunks, print_combine, print_input, print_meshes
from .placements import Placements
from .program import Program, TensorSlot
from .program_text import print_slot
from .stage_meshes import Mesh, StageMeshes


@dataclass(frozen=True, slots=True)
class StagedParameter:
    """A parameter, stored as ``slot`` says on the mesh inside the stage of the first of ``chunks``, its owner.

    The other chunks that use it are sent what is stored, once a step. Those of ``gradients`` have a part of its
    gradient, placed as stored, which the owner adds up. On another mesh than the owner's, or another kind of device, a
    chunk has both as ``elsewhere`` says.
    """

    slot: TensorSlot
    chunks: tuple[int, ...]
    gradients: tuple[int, ...]
    elsewhere: Mapping[int, Placements] = field(default_factory=dict)

    @property
    def owner(self) -> int:
        return self.chunks[0]

    def placed(self, chunk: int) -> Placements:
        """How ``chunk`` has what is stored."""
        return self.elsewhere.get(chunk, self.slot.placements)


@dataclass(frozen=True, slots=True)
class StagedResult:
    """A model output or the new value of a buffer: ``slot`` as each microbatch gives it, whole on every rank of the
    stage that has ``chunk``. ``combine`` says how the results of the microbatches become that of the step:
    ``concatenate:<dim>``, ``sum``, ``same``, or ``last``: every microbatch begins with the buffers that the one before
    left."""

    slot: TensorSlot
    chunk: int
    combine: str

    @property
    def dim(self) -> int | None:
        """The dim along which microbatches are concatenated; None if they are not."""
        kind, _, dim = self.combine.partition(":")
        return int(dim) if kind == "concatenate" else None

    def shape(self, microbatches: int) -> tuple[int, ...]:
        """The shape of the step's result."""
        sizes = list(self.slot.shape)
        if self.dim is not None:
            sizes[self.dim] *= microbatches
        return tuple(sizes)


@dataclass(frozen=True)
class PipelineProgram:
    """See the module docstring. ``coordinate``: the stage, then the place on its mesh. ``chunks``: those of this rank.

    ``inputs`` gives for each input the dim along which it is split equally among microbatches, None if each takes it
    whole. The forward of ``prelude`` (on a mesh of no axes: every rank alone, on whole tensors) runs once, before
    anything else; its results are further inputs, by their names. ``draws``: whether anything takes a random state;
    element 3 of that state is k for microbatch k, and 0 for the prelude.
    """

    meshes: StageMeshes
    coordinate: tuple[int, ...]
    schedule: Schedule
    chunks: Mapping[int, ChunkProgram]
    parameters: tuple[StagedParameter, ...]
    results: tuple[StagedResult, ...]
    inputs: Mapping[str, int | None]
    prelude: Program | None = None
    draws: bool = False

    @property
    def mesh(self) -> Mesh:
        """That of all devices: the stages first, or one axis where they have unequal meshes."""
        return self.meshes.whole

    @property
    def stage(self) -> int:
        return self.coordinate[0]

    @property
    def microbatches(self) -> int:
        return self.schedule.microbatches

    @property
    def updates_in_turn(self) -> bool:
        """Whether microbatches read the buffers that the ones before them left."""
        return any(result.combine == "last" for result in self.results)

    def stage_of(self, chunk: int) -> int:
        return self.schedule.placement[chunk]

    def __str__(self) -> str:
        head = f"# stage {self.stage} of {self.meshes.stages}, {self.microbatches} microbatches\n"
        listed = " ".join(map(str, self.schedule.ranks[self.stage]))
        return head + "".join(str(self.chunks[chunk]) for chunk in sorted(self.chunks)) + f"# {listed}\n"

    def to_text(self) -> str:
        """The text form, which :meth:`from_text` reads; constants print by name only."""
        head = f"# pipeline, rank at {self.coordinate} of {print_meshes(self.meshes)}{', draws' if self.draws else ''}"
        programs = [] if self.prelude is None else [self.prelude.to_text()]
        programs += [self.chunks[chunk].to_text() for chunk in sorted(self.chunks)]
        return "\n".join([head, str(self.schedule).rstrip(), *self._lines(), "".join(programs)])

    def _lines(self) -> Iterator[str]:
        for name, dim in self.inputs.items():
            yield print_input(name, dim)
        for parameter in self.parameters:
            yield print_slot(
                "parameter", parameter.slot, print_chunks(parameter.chunks, parameter.gradients, parameter.elsewhere)
            )
        for result in self.results:
            yield print_slot("result", result.slot, print_combine(result.chunk, result.combine))

    @staticmethod
    def from_text(text: str) -> PipelineProgram:
        """The program that :meth:`to_text` printed. Raises :class:`GraphError` naming the line, and
        :class:`ScheduleError` for the lines of the schedule."""
        fields = parse_pipeline(text)
        fields["parameters"] = tuple(StagedParameter(*parts) for parts in fields["parameters"])
        fields["results"] = tuple(StagedResult(*parts) for parts in fields["results"])
        return PipelineProgram(**fields)
