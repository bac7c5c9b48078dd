"""Optimizers that step on local shards.

An optimizer that treats every element by itself (Adam, SGD, ...) does the same on a shard as on the whole: updating the
local tensors gives the same numbers as updating DTensors, without dispatching thousands of small DTensor operations a
step. What the user holds is an instance of the very class asked for, over the DTensor parameters: ``param_groups``,
learning-rate schedulers, ``state_dict`` (state as DTensors, placed like their parameters) and hooks work as always;
only ``step`` is done by an inner optimizer on the shards, which share their memory with the DTensors.

Optimizers that look at a whole tensor (Adafactor, LBFGS, Muon, ...) or that we do not know run on the DTensors
themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

ELEMENTWISE: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.AdamW,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)

OptimizerClass = Callable[..., torch.optim.Optimizer]


def make_optimizer(
    cls: OptimizerClass, named: Iterable[tuple[str, nn.Parameter]], **kwargs: Any
) -> torch.optim.Optimizer:
    """``cls`` over the parameters; stepping on local shards if it is one of :data:`ELEMENTWISE`."""
    if cls not in ELEMENTWISE:
        return cls(named, **kwargs)
    assert isinstance(cls, type)
    return _on_shards(cls)(named, **kwargs)


def _on_shards(cls: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """A subclass of ``cls`` whose ``step`` runs on local shards."""

    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        _step(self, cls)
        return loss

    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        cls.load_state_dict(self, state_dict)
        self._inner = None

    body = {"step": step, "load_state_dict": load_state_dict, "_inner": None, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), body)


def _step(outer: Any, cls: type[torch.optim.Optimizer]) -> None:
    if outer._inner is None or _sizes(outer) != _sizes(outer._inner):
        outer._inner = _inner_optimizer(outer, cls)
    inner = outer._inner
    for group, local_group in zip(outer.param_groups, inner.param_groups, strict=True):
        local_group.update({key: value for key, value in group.items() if key not in ("params", "param_names")})
        for parameter, local in zip(group["params"], local_group["params"], strict=True):
            local.grad = _local_gradient(parameter)
    inner.step()
    for group, local_group in zip(outer.param_groups, inner.param_groups, strict=True):
        for parameter, local in zip(group["params"], local_group["params"], strict=True):
            local.grad = None
            if local in inner.state and parameter not in outer.state:
                outer.state[parameter] = _as_global(inner.state[local], parameter)


def _sizes(optimizer: torch.optim.Optimizer) -> list[int]:
    """How many parameters each group has; it grows with ``add_param_group``."""
    return [len(group["params"]) for group in optimizer.param_groups]


def _inner_optimizer(outer: Any, cls: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """``cls`` over the local tensors of the outer parameters, with the state the outer one has."""
    groups = []
    for group in outer.param_groups:
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        groups.append({**options, "params": [_local(parameter) for parameter in group["params"]]})
    make: OptimizerClass = cls
    inner = make(groups)
    for group, local_group in zip(outer.param_groups, inner.param_groups, strict=True):
        for parameter, local in zip(group["params"], local_group["params"], strict=True):
            if parameter in outer.state:
                state = {k: _placed_like(v, parameter) for k, v in outer.state[parameter].items()}
                outer.state[parameter] = state
                inner.state[local] = {k: _local(v) for k, v in state.items()}
    return inner


def _local(value: Any) -> Any:
    """The local tensor of a DTensor, sharing its memory; anything else as it is."""
    if not isinstance(value, DTensor):
        return value
    local = value.to_local().detach()
    return local.requires_grad_(value.requires_grad) if value.requires_grad else local


def _placed_like(value: Any, parameter: nn.Parameter) -> Any:
    """State made before the first batch lies as parameters lay then: whole. It is cut as the parameter has been
    since."""
    if not isinstance(value, DTensor) or not isinstance(parameter, DTensor):
        return value
    if value.device_mesh == parameter.device_mesh:
        return (
            value if value.placements == parameter.placements else value.redistribute(placements=parameter.placements)
        )
    whole = DTensor.from_local(value.full_tensor(), parameter.device_mesh, run_check=False)
    return whole.redistribute(placements=parameter.placements)


def _local_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    gradient = parameter.grad
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        if gradient.placements != parameter.placements:
            gradient = gradient.redistribute(placements=parameter.placements)
        return gradient.to_local()
    return gradient


def _as_global(state: dict[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
    """State tensors of the shape of the local shard as DTensors placed like the parameter, sharing memory."""
    if not isinstance(parameter, DTensor):
        return state
    shape = parameter.to_local().shape

    def whole(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == shape:
            return DTensor.from_local(
                value,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        return value

    return {key: whole(value) for key, value in state.items()}
