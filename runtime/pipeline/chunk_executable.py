"""Runs the sections of a :class:`~autopar.ir.chunk_program.ChunkProgram`, and groups sent and received values by the
chunk at the other end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

import torch

from autopar.errors import ExecutionError
from autopar.ir.chunk_program import ChunkProgram, Port
from autopar.ir.placements import index_of
from autopar.ir.program import Section
from autopar.ir.wire_pieces import Layout
from autopar.runtime.comm.groups import MeshGroups
from autopar.runtime.execute.compiled_pieces import Compilation
from autopar.runtime.execute.executor import instruction_axes, own_constants, runner
from autopar.runtime.execute.gradient_reducer import Reducer, Reduction
from autopar.runtime.execute.section_code import Run

from .point_to_point import Crossing

# The messages to or from other chunks: (chunk, what this rank has of each tensor of the message).
Exchange = tuple[tuple[int, tuple[Crossing, ...]], ...]
# The mesh of the stage that has a chunk.
MeshOf = Callable[[int], tuple[int, ...]]
Messages = dict[int, list[torch.Tensor]]


def exchanges(program: ChunkProgram, ports: Iterable[Port], device: int, mesh_of: MeshOf, *, sends: bool) -> Exchange:
    """The ends of edges at ``device`` of the stage by the chunk at their other end; ports are in that order."""

    def other(port: Port) -> int:
        return port.edge.target if sends else port.edge.source

    def local(port: Port) -> Crossing:
        slot, there = port.slot, Layout(port.there, mesh_of(other(port)))
        return Crossing.of(slot.shape, slot.dtype, Layout(slot.placements, program.mesh), there, device, sends=sends)

    return tuple((peer, tuple(map(local, several))) for peer, several in groupby(ports, other))


class ChunkExecutable:
    """The sections of ``program`` on ``groups`` of the mesh inside its stage. ``mesh_of``: that of any chunk's stage.
    Creating one is collective there. Raises :class:`ExecutionError` if the program is for another rank. With a
    ``compilation`` pieces of the sections are compiled. ``around`` each section: what runs it, given what would."""

    def __init__(
        self,
        program: ChunkProgram,
        groups: MeshGroups,
        mesh_of: MeshOf,
        compilation: Compilation | None = None,
        around: Callable[[Run], Run] = lambda run: run,
    ) -> None:
        if groups.shape != program.mesh or groups.coordinate != program.coordinate:
            raise ExecutionError(
                f"chunk {program.chunk} is lowered for coordinate {program.coordinate} of a mesh {program.mesh}, but "
                f"this rank is at {groups.coordinate} of a mesh {groups.shape}"
            )
        groups.prepare(instruction_axes(program.sections))
        where = f"the rank at {program.coordinate} of mesh {program.mesh} for chunk {program.chunk}"
        self.program = program

        def run(section: Section) -> Run:
            return around(runner(section, groups, where, compilation))

        self._refresh, self._forward = run(program.refresh), run(program.forward)
        self._input_gradient, self._backward = run(program.input_gradient), run(program.backward)
        self._weight_gradient = run(program.weight_gradient)
        self._more_weight_gradient = run(program.more_weight_gradient)
        self._more_backward, self._last = run(program.more_backward), run(program.last)
        self._reducer = Reducer(program.reduce, groups, where)
        self.constants = own_constants(program.placeholders, program.constants, groups)
        device = index_of(program.coordinate, program.mesh)
        self.receives = exchanges(program, program.receives, device, mesh_of, sends=False)
        self.sends = exchanges(program, program.sends, device, mesh_of, sends=True)
        self.gradient_receives = exchanges(program, program.gradient_receives, device, mesh_of, sends=False)
        self.gradient_sends = exchanges(program, program.gradient_sends, device, mesh_of, sends=True)

    def refresh(self, stored: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Working parameters from stored ones."""
        return self._refresh(list(stored))

    def forward(self, inputs: list[torch.Tensor]) -> tuple[list[torch.Tensor], Messages, list[torch.Tensor]]:
        """From placeholders and received values to results, messages to each chunk, and saved values."""
        outputs = self._forward(inputs)
        results, others = _part(outputs, len(self.program.results))
        sends, saved = _part(others, len(self.program.sends))
        return results, _messages(sends, self.sends), saved

    def input_gradient(self, inputs: list[torch.Tensor]) -> tuple[Messages, list[torch.Tensor]]:
        """From saved values, tangents and received gradients to messages to each chunk, and carried values."""
        sends, carried = _part(self._input_gradient(inputs), len(self.program.gradient_sends))
        return _messages(sends, self.gradient_sends), carried

    def weight_gradient(
        self, carried: list[torch.Tensor], sums: list[torch.Tensor], last: bool = False
    ) -> list[torch.Tensor]:
        """Unreduced gradients, added in place to ``sums`` of earlier microbatches if there are any; for the ``last``
        microbatch gradients in flight, for :meth:`reduce`. Empties ``carried`` and ``sums``."""
        run = self._more_weight_gradient if sums else self._weight_gradient
        return (self._last if last else run)(_emptied(carried, sums))

    def backward(
        self, inputs: list[torch.Tensor], sums: list[torch.Tensor], last: bool = False
    ) -> tuple[Messages, list[torch.Tensor]]:
        """:meth:`input_gradient` and :meth:`weight_gradient` at once."""
        run = self._more_backward if sums else self._backward
        outputs = (self._last if last else run)(_emptied(inputs, sums))
        sends, raw = _part(outputs, len(self.program.gradient_sends))
        return _messages(sends, self.gradient_sends), raw

    def reduce(self, in_flight: list[torch.Tensor], computations: int) -> Reduction:
        """Begins to complete the reduction of gradients ``in_flight``, a list it empties; see
        :meth:`.Reducer.begin`."""
        return self._reducer.begin(in_flight, computations)


def _emptied(*lists: list[torch.Tensor]) -> list[torch.Tensor]:
    """Moves the elements of ``lists`` to one new list, so that the section that takes it has the only references."""
    moved = [value for values in lists for value in values]
    for values in lists:
        values.clear()
    return moved


def _part(values: list[Any], count: int) -> tuple[list[Any], list[Any]]:
    return values[:count], values[count:]


def _messages(values: list[torch.Tensor], exchange: Exchange) -> Messages:
    messages: Messages = {}
    for peer, several in exchange:
        messages[peer], values = _part(values, len(several))
    return messages
