"""Optimizers that step on local shards.

An optimizer that updates every element independently (Adam, SGD, ...) does the same on a shard as on the whole:
updating the local tensors gives the same numbers as updating DTensors, without dispatching thousands of small DTensor
operations a step. The user gets an instance of the requested class over the DTensor parameters: ``param_groups``,
learning-rate schedulers, ``state_dict`` (state as DTensors, placed like their parameters) and hooks work as usual. Only
``step`` is run by an inner optimizer on the shards, which share their memory with the DTensors.

State that the plan keeps in host memory is moved to the device a few parameters at a time, with an inner optimizer of
their own: the numbers are the same, and the device needs memory for the largest only (:mod:`.host_visits`). So is state
that rests on a local disk, parameter by parameter, read ahead and written behind (:mod:`.disk_visits`).

Optimizers that need whole tensors (Adafactor, LBFGS, Muon, ...) and unknown ones run on the DTensors themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError, OptionsError
from autopar.offload import tier_of
from autopar.runtime.torch_internals.dtensors import dtensor, local_tensor
from autopar.torch_internals.tensors import storage_key

from .disk import Piece
from .disk_visits import DiskVisits, Visitor
from .host_visits import in_host as moved_to_host
from .host_visits import turns, visit_all

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
# The tier in which the state of a parameter rests, by its path; of booleans True is host memory.
InHost = Callable[[str], object]


def make_optimizer(
    cls: OptimizerClass, params: Iterable[Any], in_host: InHost = lambda path: False, **kwargs: Any
) -> torch.optim.Optimizer:
    """Creates ``cls`` over ``params``, named parameters or groups of them; it steps on local shards if it is one of
    :data:`ELEMENTWISE`. ``in_host(path)``: the tier in which the state of a parameter is kept; it is called at
    every step, since there may be no plan yet. Raises :class:`AutoparError`, here or when it steps, if an optimizer
    that does not step on shards would have to keep state there; :class:`OptionsError` for what makes no optimizer."""
    given: object = cls
    if not callable(given):
        raise OptionsError(
            f"model.optimizer({given!r}): give the class of an optimizer and its options, such as "
            "model.optimizer(torch.optim.AdamW, lr=1e-3)"
        )
    if cls in ELEMENTWISE:
        assert isinstance(cls, type)
        return _on_shards(cls, in_host)(params, **kwargs)
    optimizer = cls(params, **kwargs)

    def refuse(*_: Any) -> None:
        _refuse(cls, [path for _, path, _ in _named(optimizer) if in_host(path)])

    refuse()
    optimizer.register_step_pre_hook(refuse)
    return optimizer


def _refuse(cls: OptimizerClass, offloaded: list[str]) -> None:
    if offloaded:
        supported = ", ".join(sorted(elementwise.__name__ for elementwise in ELEMENTWISE))
        raise AutoparError(
            f"the plan keeps the optimizer state of {offloaded[0]} and {len(offloaded) - 1} more off the device, which "
            f"{getattr(cls, '__name__', cls)} cannot: it does not treat every element by itself. Plan with "
            f"Options(offload=False), or use one of {supported}"
        )


def _on_shards(cls: type[torch.optim.Optimizer], in_host: InHost) -> type[torch.optim.Optimizer]:
    """A subclass of ``cls`` whose ``step`` runs on local shards."""

    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        _step(self, cls, in_host)
        return loss

    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        cls.load_state_dict(self, state_dict)
        self.autopar_inner = None
        # torch has moved all state to the device.
        for parameter, path, _ in _named(self):
            # That on a disk gets there at the next step.
            if parameter in self.state and tier_of(in_host(path)) == "host":
                resting = moved_to_host({key: _local(value) for key, value in self.state[parameter].items()})
                self.state[parameter] = _as_global(resting, parameter)

    body = {"step": step, "load_state_dict": load_state_dict, "autopar_inner": None, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), body)


def _step(outer: Any, cls: type[torch.optim.Optimizer], in_host: InHost) -> None:
    if outer.autopar_inner is None or _resting(outer, in_host) != outer.autopar_inner.resting:
        outer.autopar_inner = _ShardOptimizer(outer, cls, in_host)
    outer.autopar_inner.step(outer)


class _ShardOptimizer:
    """Steps on the shards: one optimizer for all parameters whose state is on the device, in the groups of the outer
    one, one for each turn of parameters whose state is in host memory, and one for each whose state is on a disk."""

    def __init__(self, outer: Any, cls: type[torch.optim.Optimizer], in_host: InHost) -> None:
        self.resting = _resting(outer, in_host)
        self.local = {parameter: _local(parameter) for parameter, _, _ in _named(outer)}
        tiers = {parameter: tier_of(in_host(path)) for parameter, path, _ in _named(outer)}
        positions = {parameter: index for parameter, _, index in _named(outer)}

        def make(*groups: tuple[int, Iterable[nn.Parameter]]) -> torch.optim.Optimizer:
            of: OptimizerClass = cls
            return of([{**_options(outer.param_groups[i]), "params": [self.local[p] for p in ps]} for i, ps in groups])

        elsewhere = ("host", "nvme")
        groups = [[p for p in group["params"] if tiers[p] not in elsewhere] for group in outer.param_groups]
        self.resident = make(*enumerate(groups))
        in_host_memory = [(positions[p], p) for p in self.local if tiers[p] == "host"]
        self.in_turns = [(i, make((i, ps)), ps) for i, ps in turns(in_host_memory, lambda p: self.local[p].nbytes)]
        self.on_disk = {p: (positions[p], make((positions[p], [p]))) for p in self.local if tiers[p] == "nvme"}
        self.optimizers = {p: optimizer for _, optimizer, ps in self.in_turns for p in ps}
        self.optimizers |= {p: optimizer for p, (_, optimizer) in self.on_disk.items()}
        self.visitors: dict[nn.Parameter, Visitor] = {}
        self.disk = DiskVisits() if self.on_disk else None
        for parameter in self.local:
            self._take_state(outer, parameter)

    def _take_state(self, outer: Any, parameter: nn.Parameter) -> None:
        """Takes over the state of the outer optimizer, for example from a checkpoint."""
        if parameter not in outer.state:
            return
        placed = {key: _placed_like(value, parameter) for key, value in outer.state[parameter].items()}
        state = {key: _local(value) for key, value in placed.items()}
        if parameter in self.on_disk and self.disk is not None:
            visitor = self._visitor(parameter)
            self.disk.rest(visitor, state)
            placed = _as_global(visitor.resting, parameter)
        else:
            if parameter in self.optimizers:
                state = moved_to_host(state)
                placed = _as_global(state, parameter)
            self._optimizer_of(parameter).state[self.local[parameter]] = state
        outer.state[parameter] = placed

    def _optimizer_of(self, parameter: nn.Parameter) -> torch.optim.Optimizer:
        return self.optimizers.get(parameter, self.resident)

    def step(self, outer: Any) -> None:
        for group, inner_group in zip(outer.param_groups, self.resident.param_groups, strict=True):
            inner_group.update(_options(group))
        # With gradients enabled, ``to_local`` would record each for autograd.
        with torch.no_grad():
            for parameter, local in self.local.items():
                local.grad = _local_gradient(parameter)
        self.resident.step()
        for index, optimizer, _ in self.in_turns:
            optimizer.param_groups[0].update(_options(outer.param_groups[index]))
        visit_all([(optimizer, [self.local[p] for p in parameters]) for _, optimizer, parameters in self.in_turns])
        if self.disk is not None:
            self._step_on_disk(outer, self.disk)
        for parameter, local in self.local.items():
            local.grad = None
            state = self._optimizer_of(parameter).state
            if local in state and parameter not in outer.state:
                outer.state[parameter] = _as_global(state[local], parameter)

    def _step_on_disk(self, outer: Any, disk: DiskVisits) -> None:
        for index, optimizer in self.on_disk.values():
            optimizer.param_groups[0].update(_options(outer.param_groups[index]))
        moving = [parameter for parameter in self.on_disk if self.local[parameter].grad is not None]
        disk.step([self._visitor(parameter) for parameter in moving])
        for parameter in moving:
            resting = self._visitor(parameter).resting
            if resting and parameter not in outer.state:
                outer.state[parameter] = _as_global(resting, parameter)

    def _visitor(self, parameter: nn.Parameter) -> Visitor:
        if parameter not in self.visitors:
            optimizer, local = self._optimizer_of(parameter), self.local[parameter]

            def update(piece: Piece, state: dict[str, Any]) -> dict[str, Any]:
                return _update_piece(optimizer, local, piece, state)

            self.visitors[parameter] = Visitor(local.device, local.shape, update)
        return self.visitors[parameter]


def _update_piece(
    optimizer: torch.optim.Optimizer, local: torch.Tensor, piece: Piece, state: dict[str, Any]
) -> dict[str, Any]:
    """Steps the elements ``piece`` of ``local``, whose ``state`` is flat; returns the new state. Each element is
    updated by itself, so it makes no difference that the others are not there."""
    assert local.grad is not None
    whole = local.detach().reshape(-1)
    own = whole[slice(*piece)]
    own.grad = local.grad.reshape(-1)[slice(*piece)]
    optimizer.param_groups[0]["params"] = [own]
    if state:
        optimizer.state[own] = state
    optimizer.step()
    if not local.is_contiguous():  # Then ``whole`` is a copy.
        local.detach().copy_(whole.view(local.shape))
    updated: dict[str, Any] = optimizer.state.pop(own, {})
    return updated


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _named(optimizer: torch.optim.Optimizer) -> Iterator[tuple[nn.Parameter, str, int]]:
    """Each parameter with its path, empty if it has none, and the position of its group."""
    for index, group in enumerate(optimizer.param_groups):
        names: list[str] = group.get("param_names", [])
        for position, parameter in enumerate(group["params"]):
            yield parameter, names[position] if position < len(names) else "", index


def _resting(optimizer: torch.optim.Optimizer, in_host: InHost) -> list[tuple[int, int, str]]:
    """What an inner optimizer depends on: the memory of each shard, which changes when the first batch brings a plan,
    and where its state rests. It grows with ``add_param_group``."""
    shards = ((_shard(parameter), tier_of(in_host(path))) for parameter, path, _ in _named(optimizer))
    return [(storage_key(shard.untyped_storage()), shard.numel(), tier) for shard, tier in shards]


def _shard(parameter: nn.Parameter) -> torch.Tensor:
    return local_tensor(parameter) if isinstance(parameter, DTensor) else parameter


def _local(value: Any) -> Any:
    """The local tensor of a DTensor, sharing its memory; other values unchanged."""
    if not isinstance(value, DTensor):
        return value
    local = value.to_local().detach()
    return local.requires_grad_(value.requires_grad) if value.requires_grad else local


def _placed_like(value: Any, parameter: nn.Parameter) -> Any:
    """Shards state that was created before the first batch, when parameters were replicated, like its parameter."""
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
    """Wraps state tensors of the shape of the local shard as DTensors placed like the parameter, sharing memory."""
    if not isinstance(parameter, DTensor):
        return state
    shape = parameter.to_local().shape

    def whole(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == shape:
            return _dtensor(value, parameter)
        return value

    return {key: whole(value) for key, value in state.items()}


def _dtensor(shard: torch.Tensor, parameter: DTensor) -> DTensor:
    """``shard`` as a DTensor placed like the parameter."""
    mesh, places, shape, stride = parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride()
    if shard.device.type == mesh.device_type:
        return DTensor.from_local(shard, mesh, places, run_check=False, shape=shape, stride=stride)
    # ``from_local`` would move host memory to the device.
    return dtensor(shard, mesh, places, shape, stride)
