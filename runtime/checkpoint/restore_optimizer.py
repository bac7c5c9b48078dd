"""Restores an optimizer: its options by group, its state by the name of the parameter, placed like the parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from autopar.errors import CheckpointError
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.state.parameters import contiguous_stride
from autopar.runtime.torch_internals.dtensors import dtensor

from .boxes import local_part
from .fill import Target, fill
from .index import Entry
from .opened import Opened
from .snapshot import names_of
from .tree_json import from_json

# The key under which torch's optimizers count steps, which is a number whatever the shape of the parameter.
_COUNT = "step"


def check_optimizer(opened: Opened, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raises :class:`CheckpointError` unless the optimizer is of the class that was saved, and its groups have the
    parameters that they had."""
    saved = opened.state["optimizer"]
    if saved is None:
        raise CheckpointError(f"the checkpoint {opened.store} has no optimizer: leave it out here")
    _check_class(saved["class"], type(optimizer).__name__)
    own, named = names_of(model), _parameters(opened, model)
    if len(saved["groups"]) != len(optimizer.param_groups):
        raise CheckpointError(
            f"the checkpoint's optimizer has {len(saved['groups'])} groups of parameters, and this one "
            f"{len(optimizer.param_groups)}: make it with the groups that were saved"
        )
    for number, (old, new) in enumerate(zip(saved["groups"], optimizer.param_groups, strict=True)):
        before = {own[id(named[name])] if name in named else name for name in old["params"]}
        foreign = [list(parameter.shape) for parameter in new["params"] if id(parameter) not in own]
        if foreign:
            raise CheckpointError(
                f"group {number} of the optimizer has a parameter of shape {foreign[0]} that is not one of the model: "
                "make it by model.optimizer(...)"
            )
        now = {own[id(parameter)] for parameter in new["params"]}
        if before != now:
            raise CheckpointError(
                f"group {number} of the optimizer had {len(before)} parameters when it was saved, and has {len(now)} "
                f"here; {min(before ^ now)} is in one of them only: make it with the groups that were saved"
            )


def _check_class(saved: str, given: str) -> None:
    """The state of another class would be taken over in silence, and read wrongly or not at all."""
    if saved != given:
        raise CheckpointError(
            f"the checkpoint has the state of the optimizer {saved}, and this one is {given}: make it by "
            f"model.optimizer({saved}, ...), or leave the optimizer out of load(), which restores the rest, so that "
            f"{given} begins anew"
        )


def _parameters(opened: Opened, model: nn.Module) -> dict[str, nn.Parameter]:
    """The model's parameters by their names here and in the checkpoint."""
    named = dict(model.named_parameters(remove_duplicate=False))
    tied = opened.state["model"]["tied"]
    return {**{first: named[name] for name, first in tied.items() if name in named}, **named}


def restore_options(opened: Opened, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Learning rates and all other options of the groups."""
    for saved, group in zip(opened.state["optimizer"]["groups"], optimizer.param_groups, strict=True):
        group.update(from_json(saved["options"], opened.whole))


def restore_state(opened: Opened, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Replaces the state of all parameters; each rank reads its own parts."""
    named, targets = _parameters(opened, model), list[Target]()
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    state: dict[torch.Tensor, Any] = {}
    for name, tree in opened.state["optimizer"]["state"].items():
        parameter = named[name]
        slots = _Slots(opened.index, optimizer, groups[id(parameter)], parameter, _in_host(model, parameter), targets)
        state[parameter] = {key: from_json(value, slots.of(key)) for key, value in tree.items()}
    fill(opened.reader, opened.index, targets)
    optimizer.state.clear()
    optimizer.state.update(state)
    if hasattr(optimizer, "autopar_inner"):
        optimizer.autopar_inner = None  # Its shards are those of the old state.


def _in_host(model: nn.Module, parameter: nn.Parameter) -> bool:
    return isinstance(model, ParallelModule) and bool(model.autopar_parts.in_host(names_of(model)[id(parameter)]))


class _Slots:
    """Makes the tensors into which the state of one parameter is read; adds them to ``targets``."""

    def __init__(
        self,
        index: Mapping[str, Entry],
        optimizer: torch.optim.Optimizer,
        group: Mapping[str, Any],
        parameter: nn.Parameter,
        in_host: bool,
        targets: list[Target],
    ) -> None:
        self._index, self._parameter, self._in_host, self._targets = index, parameter, in_host, targets
        self._on_shards = hasattr(optimizer, "autopar_inner")
        self._counts_on_device = bool(group.get("capturable") or group.get("fused"))

    def of(self, key: str) -> Any:
        """What makes the tensors of the state called ``key``, given their names in the checkpoint."""
        return lambda name: self._slot(key, name)

    def _slot(self, key: str, name: str) -> torch.Tensor:
        if name not in self._index:
            raise CheckpointError(f"the checkpoint has no tensor {name}, which its optimizer refers to")
        entry = self._index[name]
        tensor = self._count(entry) if key == _COUNT else self._value(entry)
        self._targets.append((name, tensor))
        return tensor

    def _count(self, entry: Entry) -> torch.Tensor:
        device = local_part(self._parameter).device if self._counts_on_device else "cpu"
        return torch.empty(entry.shape, dtype=entry.dtype, device=device)

    def _value(self, entry: Entry) -> torch.Tensor:
        """A tensor like the parameter if it has its shape; else one that every rank has whole."""
        parameter, local = self._parameter, local_part(self._parameter)
        like = entry.shape == tuple(parameter.shape)
        floating = entry.dtype.is_floating_point and parameter.dtype.is_floating_point
        dtype = parameter.dtype if like and floating else entry.dtype
        device = torch.device("cpu") if self._in_host else local.device
        elsewhere = isinstance(parameter, DTensor) and parameter.device_mesh.get_coordinate() is None
        plain = self._on_shards and not (like and (entry.shape or elsewhere))
        if not isinstance(parameter, DTensor) or plain:
            return torch.empty(entry.shape, dtype=dtype, device=device)
        if like:
            own, placements = torch.empty(local.shape, dtype=dtype, device=device), parameter.placements
        else:
            own = torch.empty((0,) if elsewhere else entry.shape, dtype=dtype, device=device)
            placements = (Replicate(),) * parameter.device_mesh.ndim
        return dtensor(own, parameter.device_mesh, placements, entry.shape, contiguous_stride(entry.shape))
