"""Binds the sections of a :class:`~autopar.ir.program.Program` to this rank's process groups, constants and random
numbers.

:mod:`.section_source` writes a section as a Python function, :mod:`.section_code` compiles it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import ExecutionError
from autopar.ir.placements import take_local
from autopar.ir.program import Program, Section, TensorSlot
from autopar.ops.masked import LOCAL_OPS
from autopar.runtime.comm.collectives import Collectives
from autopar.runtime.comm.groups import MeshGroups, mesh_groups

from .buffer_updates import BufferUpdates
from .casts_at_once import OPERATION, cast_all, with_casts_at_once
from .compiled_pieces import Compilation, with_pieces
from .fused_recomputation import recomputed_in_backward
from .host_tier import HostTier
from .index_guards import GUARDED
from .randomness import draws, shared_random
from .section_code import Run, compile_section
from .torch_operations import Operation

# The section that makes working weights of stored ones.
REFRESH = "refresh"


def instruction_axes(sections: Iterable[Section]) -> set[tuple[int, ...]]:
    """Every set of mesh axes that a collective of ``sections`` runs over."""
    collectives = (i for s in sections for i in s.instructions if i.op.startswith("collective."))
    axes = (dict(i.kwargs)["axes"] if "axes" in dict(i.kwargs) else (*i.args, ())[1] for i in collectives)
    return {tuple(each) for each in axes if each}


def operations_of(collectives: Collectives) -> dict[str, Operation]:
    """The ``autopar.*``, ``collective.*`` and ``host.*`` operations by name, and on CPUs guarded ATen operations;
    those of a GPU check indices themselves."""

    public = [name for name in dir(collectives) if not name.startswith("_") and name != "groups"]
    bound = {f"collective.{name}": getattr(collectives, name) for name in public}
    guarded = GUARDED if collectives.groups.device.type == "cpu" else {}
    host = HostTier(collectives.groups.device)
    tiers = {"host.store": host.store, "host.fetch": host.fetch, "host.rest": host.rest}
    return {**LOCAL_OPS, **guarded, **bound, **tiers, OPERATION: cast_all}


def _with_shared_random(section: Section, run: Run, groups: MeshGroups) -> Run:
    """``run``, with the same generator state on all ranks if ``section`` draws from it."""
    if not draws(section) or groups.device.type == "meta":
        return run

    def drawing(values: list[torch.Tensor]) -> list[Any]:
        with shared_random(groups):
            return run(values)

    return drawing


@contextmanager
def plainly(device: torch.device) -> Iterator[None]:
    """Under ``no_grad`` and without autocast."""
    with torch.no_grad():
        if device.type == "meta" or not torch.is_autocast_enabled(device.type):
            yield
        else:
            with torch.autocast(device.type, enabled=False):
                yield


def _outside_autograd(run: Run, device: torch.device) -> Run:
    def outside(values: list[torch.Tensor]) -> list[Any]:
        with plainly(device):
            return run(values)

    return outside


def runner(
    section: Section,
    groups: MeshGroups,
    where: str,
    compilation: Compilation | None = None,
    replaced: Mapping[str, Operation] | None = None,
) -> Run:
    """Compiles ``section`` with its collectives on ``groups`` (:func:`compile_section`), to run outside of autograd and
    autocast. With a ``compilation`` its pieces are compiled by Inductor. ``replaced``: what runs instead of some of its
    instructions outside of pieces, by name."""
    operations, device = operations_of(Collectives(groups)), groups.device
    # Elsewhere a cast is one of few, and its operand may be dropped before the next.
    in_pieces = section = with_casts_at_once(section) if section.name == REFRESH else section
    if compilation is not None:

        def as_it_is(piece: Section) -> Run:
            return compile_section(piece, operations, device, where)

        in_pieces, operations = with_pieces(section, operations, as_it_is, compilation)
    compiled = compile_section(in_pieces, operations, device, where, replaced)
    return _outside_autograd(_with_shared_random(section, compiled, groups), device)


def own_constants(
    slots: Iterable[TensorSlot], constants: Mapping[str, torch.Tensor], groups: MeshGroups
) -> dict[str, torch.Tensor]:
    """This rank's part of each constant in ``slots``."""
    return {
        slot.target: take_local(
            constants[slot.target].to(groups.device), slot.placements, groups.shape, groups.coordinate
        )
        for slot in slots
        if slot.kind == "constant"
    }


def as_list(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """``values`` itself if it is a list, which a section empties, else a copy."""
    return values if isinstance(values, list) else list(values)


class Executable:
    """A program ready to run on this rank of ``mesh``; each call is under ``no_grad`` and without autocast.

    Creating one is collective, since it creates process groups. Raises :class:`ExecutionError` if the program is for
    another rank. With a ``compilation`` pieces of the program are compiled (:mod:`.compiled_pieces`).
    """

    def __init__(self, program: Program, mesh: DeviceMesh, compilation: Compilation | None = None) -> None:
        groups = mesh_groups(mesh)
        if groups.shape != program.mesh or groups.coordinate != program.coordinate:
            raise ExecutionError(
                f"the program is for coordinate {program.coordinate} of a mesh {program.mesh}, "
                f"but this rank is at {groups.coordinate} of a mesh {groups.shape}"
            )
        groups.prepare(instruction_axes((program.refresh, program.forward, program.backward)))
        self.program = program
        self.device = groups.device
        where = f"the rank at {program.coordinate} of mesh {program.mesh}"
        sections = (program if compilation is None else recomputed_in_backward(program)).sections
        self.buffers = BufferUpdates.of(program, sections[1], compilation is None)
        self._refresh, self._forward, self._backward = (
            runner(section, groups, where, compilation, replaced)
            for section, replaced in zip(sections, ({}, self.buffers.replaced, {}), strict=True)
        )
        self.constants = own_constants(program.placeholders, program.constants, groups)

    def refresh(self, stored: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Working tensors from ``stored`` local ones, both in the order of ``program.parameters``."""
        return self._refresh(as_list(stored))

    def forward(self, placeholders: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """``(results, saved)`` from local tensors in the order of ``program.placeholders``."""
        values = self._forward(as_list(placeholders))
        count = len(self.program.results)
        return values[:count], values[count:]

    def backward(self, saved: list[torch.Tensor], tangents: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Local gradients in the order of ``program.gradients``; empties ``saved``."""
        values = [*saved, *tangents]
        saved.clear()
        return self._backward(values)
