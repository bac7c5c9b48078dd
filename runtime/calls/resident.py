"""Inputs that rest on the devices between calls, which change them in place: key-value caches.

What a caller holds, and passes, is a tensor on the meta device, of the global shape and without values. This rank's
part is its :class:`Resident`. It is one tensor for each microbatch of the programs that use it, so that a microbatch
reads and writes memory of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from autopar.errors import PlanMismatchError
from autopar.ir.placements import Placements, local_shape, short
from autopar.ir.program import TensorSlot
from autopar.runtime.comm.groups import MeshGroups

# The attribute of a tensor on the meta device that has its resident.
_ATTRIBUTE = "_autopar_resident"


@dataclass(frozen=True)
class Resident:
    """``placements`` on the mesh (inside a stage), and this rank's part, by microbatch: none on ranks of other
    stages."""

    placements: Placements
    pieces: tuple[torch.Tensor, ...]


def resident_of(tensor: object) -> Resident | None:
    """The resident of a tensor that a caller holds; None for any other tensor."""
    return getattr(tensor, _ATTRIBUTE, None)


def give_resident(tensor: torch.Tensor, resident: Resident) -> torch.Tensor:
    """A tensor of the shape of ``tensor``, without values, that has this resident."""
    handle = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    setattr(handle, _ATTRIBUTE, resident)
    return handle


def new_resident(placements: Placements, slot: TensorSlot | None, groups: MeshGroups, microbatches: int) -> Resident:
    """Zeros for the cache ``slot`` of each microbatch; no memory if this rank's programs have no such slot."""
    if slot is None:
        return Resident(placements, ())
    shape = local_shape(slot.shape, slot.placements, groups.shape, groups.coordinate)
    zeros = (torch.zeros(shape, dtype=slot.dtype, device=groups.device) for _ in range(microbatches))
    return Resident(placements, tuple(zeros))


def own_piece(slot: TensorSlot, leaf: object, microbatch: int = 0, microbatches: int = 1) -> torch.Tensor:
    """This rank's part of a cache for one microbatch. Raises :class:`PlanMismatchError` if it rests elsewhere than the
    program has it."""
    resident = resident_of(leaf)
    if resident is None:
        raise PlanMismatchError(
            f"{slot.target} is a plain tensor, but the program takes a cache that rests on the devices: pass a "
            "transformers.StaticCache that no model has written to, whose tensors the first call makes"
        )
    if resident.placements != slot.placements or len(resident.pieces) != microbatches:
        raise PlanMismatchError(
            f"{slot.target} rests as {short(resident.placements)} in {len(resident.pieces)} microbatches, but the "
            f"program takes {short(slot.placements)} in {microbatches}: begin with a new cache"
        )
    return resident.pieces[microbatch]


def keep_piece(own: torch.Tensor, value: torch.Tensor) -> None:
    """Writes the new ``value`` of a cache to where it rests, unless the program has done so."""
    if value.data_ptr() != own.data_ptr() or value.stride() != own.stride():
        own.copy_(value)


def placements_of(leaves: Mapping[str, object]) -> dict[str, Placements]:
    """The placements of those ``leaves``, by name, that rest on the devices."""
    found = {name: resident_of(leaf) for name, leaf in leaves.items()}
    return {name: resident.placements for name, resident in found.items() if resident is not None}


def cache_slots(placeholders: Sequence[TensorSlot]) -> dict[str, TensorSlot]:
    """The caches among placeholders, by name."""
    return {slot.target: slot for slot in placeholders if slot.kind == "cache"}
