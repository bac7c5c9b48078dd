"""Places the parameters of a module: exchanges the content of its wrapped parameters for this rank's parts.

See :mod:`autopar.runtime.state.parameters`. A meta model is filled tensor by tensor, from files or by its own
initialisation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from autopar.errors import PlanMismatchError
from autopar.ir.placements import local_shape, short
from autopar.ir.program import TensorSlot
from autopar.runtime.comm.groups import MeshGroups
from autopar.torch_internals.modules import buffers_of

from .materialise import Initialiser
from .parameters import (
    Stored,
    broadcast_first,
    local_of,
    make_dtensor,
    shared_seed,
    swap_parameter,
    take_own,
    torch_can_gather,
    torch_placements,
    unwrapped,
)


class Values(Protocol):
    """Values for a meta model: a checkpoint, say."""

    def find(self, names: Sequence[str]) -> str | None:
        """What it calls the tensor that the model calls by any of ``names``; None if it has no such tensor."""

    def fill(self, found: str, tensor: torch.Tensor) -> None:
        """Fills this rank's part of the tensor that it calls ``found``."""


def place_parameters(
    module: nn.Module,
    stored: Mapping[str, Stored],
    groups: MeshGroups,
    seed: int | None = None,
    values: Values | None = None,
) -> None:
    """Places every wrapped parameter of ``module`` as in ``stored[name]``, or replicated on the mesh of ``groups`` if
    it is not there (the program does not use it). Moves buffers to the mesh's device, with rank 0's values. A meta
    model takes its ``values``, as far as there are some, and others from its own initialisation with ``seed`` (default:
    torch's initial seed on rank 0). Collective over ``groups``.

    Raises :class:`PlanMismatchError` if a slot and its parameter differ in shape.
    """
    parameters = dict(module.named_parameters())
    complete = {name: stored.get(name) or _replicated(name, p, groups) for name, p in parameters.items()}
    for name, parameter in parameters.items():
        _check_storable(name, parameter, complete[name])
    real = [name for name, parameter in parameters.items() if not parameter.is_meta]
    _place_meta(module, complete, groups, seed, values)
    for index, whole in broadcast_first([local_of(parameters[name]) for name in real], groups):
        _replace(parameters[real[index]], take_own(whole, *complete[real[index]]), complete[real[index]])
    _place_buffers(module, groups)


def _place_meta(
    module: nn.Module, complete: Mapping[str, Stored], groups: MeshGroups, seed: int | None, values: Values | None
) -> None:
    """Gives meta parameters and buffers of ``module`` their values, in memory of the device."""
    found = _found(module, values)
    parameters = {name: p for name, p in module.named_parameters() if p.is_meta}
    lost = [name for name, buffer in module.named_buffers() if buffer.is_meta]
    initialiser = None
    if any(name not in found for name in (*parameters, *lost)):
        with unwrapped(module, device="meta"), _buffers_kept(module):  # What was loaded is not initialised again.
            initialiser = Initialiser(module, groups.device, shared_seed(groups, seed))
    for name, parameter in parameters.items():
        own = _read(name, parameter, complete[name], groups, values, found) if name in found else None
        if own is None:
            assert initialiser is not None
            own = take_own(_initial(initialiser, name, parameter, complete[name]), *complete[name])
        _replace(parameter, own, complete[name])
    _fill_buffers(module, groups.device, initialiser, values, found)


@contextmanager
def _buffers_kept(module: nn.Module) -> Iterator[None]:
    """Gives buffers with memory their present values when the context ends."""
    kept = [(buffer, buffer.clone()) for buffer in module.buffers() if not buffer.is_meta]
    yield
    for buffer, value in kept:
        buffer.copy_(value)


def _found(module: nn.Module, values: Values | None) -> dict[str, str]:
    """What ``values`` calls the parameters and buffers of ``module``, by their first names."""
    names: dict[int, list[str]] = {}
    for name, tensor in (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ):
        names.setdefault(id(tensor), []).append(name)
    found = {} if values is None else {own[0]: values.find(own) for own in names.values()}
    return {name: stored for name, stored in found.items() if stored is not None}


def _read(
    name: str,
    parameter: nn.Parameter,
    stored: Stored,
    groups: MeshGroups,
    values: Values | None,
    found: Mapping[str, str],
) -> torch.Tensor:
    """This rank's part of the value in ``values``: nothing else is in memory."""
    slot, place = stored
    shape = (
        (0,) if place.coordinate is None else local_shape(slot.shape, slot.placements, place.shape, place.coordinate)
    )
    own = torch.empty(shape, dtype=parameter.dtype, device=groups.device)
    assert values is not None
    values.fill(found[name], make_dtensor(own, slot, place))
    return own


def _replicated(name: str, parameter: nn.Parameter, groups: MeshGroups) -> Stored:
    everywhere = (Replicate(),) * len(groups.shape)
    return TensorSlot(name, "param", name, tuple(parameter.shape), everywhere), groups


def _check_storable(name: str, parameter: nn.Parameter, stored: Stored) -> None:
    slot, place = stored
    if tuple(parameter.shape) != slot.shape:
        raise PlanMismatchError(
            f"the parameter {name} has shape {list(parameter.shape)}, but the plan was made for {list(slot.shape)}"
        )
    if not torch_can_gather(slot.placements, place.shape):
        raise PlanMismatchError(
            f"the parameter {name} would be stored as {short(slot.placements)}, of which torch makes a wrong "
            "full_tensor(): store the strided shard on the innermost axis of its dim"
        )


def _initial(initialiser: Initialiser, name: str, parameter: nn.Parameter, stored: Stored) -> torch.Tensor:
    """The whole initial value; empty if this rank has no part of it."""
    local = local_of(parameter)
    if stored[1].coordinate is None:
        return torch.empty(0, dtype=local.dtype, device=initialiser.device)
    return initialiser.value(local, f"the parameter {name}")


def _replace(parameter: nn.Parameter, own: torch.Tensor, stored: Stored) -> None:
    """Gives ``parameter`` this rank's part of its value, ``own``."""
    slot, place = stored
    with torch.no_grad():
        replacement = nn.Parameter(make_dtensor(own, slot, place), parameter.requires_grad)
        if parameter.grad is not None and not parameter.grad.is_meta:
            gradient = take_own(local_of(parameter.grad).to(own.device), slot, place)
            replacement.grad = make_dtensor(gradient, slot, place)
    swap_parameter(parameter, replacement, slot.target)


def _fill_buffers(
    module: nn.Module,
    device: torch.device,
    initialiser: Initialiser | None,
    values: Values | None,
    found: Mapping[str, str],
) -> None:
    first = {id(buffer): name for name, buffer in module.named_buffers()}
    made: dict[int, torch.Tensor] = {}
    for path, part in module.named_modules():
        for key, buffer in buffers_of(part).items():
            if buffer is None or not buffer.is_meta:
                continue
            name = first[id(buffer)]
            if id(buffer) not in made and values is not None and name in found:
                made[id(buffer)] = torch.empty_like(buffer, device=device)
                values.fill(found[name], made[id(buffer)])
            elif id(buffer) not in made:
                assert initialiser is not None
                made[id(buffer)] = initialiser.value(buffer, f"the buffer {path}.{key}")
            buffers_of(part)[key] = made[id(buffer)]


def _place_buffers(module: nn.Module, groups: MeshGroups) -> None:
    buffers = [buffer for _, buffer in module.named_buffers()]
    moved: dict[int, torch.Tensor] = {}
    for index, value in broadcast_first(buffers, groups):
        buffer = buffers[index]
        if buffer.device == groups.device:
            buffer.copy_(value)
        else:
            moved[id(buffer)] = value
    for part in module.modules():
        for key, tensor in buffers_of(part).items():
            if tensor is not None and id(tensor) in moved:
                buffers_of(part)[key] = moved[id(tensor)]


def check_placed(module: nn.Module, stored: Mapping[str, Stored]) -> None:
    """Raises :class:`PlanMismatchError` if a parameter is stored in other placements than ``stored`` says."""
    for name, parameter in module.named_parameters():
        if name not in stored or not isinstance(parameter, DTensor):
            continue
        slot, place = stored[name]
        if tuple(parameter.placements) != torch_placements(slot.placements, place.shape):
            raise PlanMismatchError(
                f"the parameter {name} is stored as {tuple(map(str, parameter.placements))}, but this "
                f"program stores it as {short(slot.placements)}; all programs of one model must agree"
            )
        if parameter.device_mesh != place.mesh:
            raise PlanMismatchError(
                f"the parameter {name} is stored on ranks {parameter.device_mesh.mesh.flatten().tolist()}, but this "
                f"program stores it on {place.mesh.mesh.flatten().tolist()}; all programs of one model must agree"
            )
