"""Whole plain parameters in the original module, for everything that a compiled program does not do: generating text,
saving in the format of a library, any method of the model.

Each DTensor is gathered, and a plain parameter with its values replaces it until the block ends, also by an exception.
The module then has its DTensors again with their old values: changes are lost unless they are written back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError
from autopar.runtime.comm.collectives import Collectives
from autopar.runtime.comm.groups import MeshGroups
from autopar.runtime.pipeline.stage_mesh import whole_everywhere
from autopar.runtime.state.parameters import broadcast_first, local_of
from autopar.runtime.state.weights import Weights
from autopar.torch_internals.modules import flat_weights_of, parameters_of, renew_flat_weights, set_flat_weights

# How long the first ranks to arrive wait for the others.
PATIENCE = timedelta(minutes=10)


@contextmanager
def whole_parameters(weights: Weights, *, rank0_only: bool, writeback: bool) -> Iterator[None]:
    """Gives ``weights.module`` whole plain parameters while the context is open; with ``rank0_only`` on the first rank
    of the mesh only, and meta tensors elsewhere. With ``writeback``, the first rank's values at the end are kept,
    unless an exception ends the block on some rank: then all other ranks raise :class:`AutoparError`. Collective, at
    both ends. Raises :class:`AutoparError` if there are no values yet."""
    module, groups = weights.module, weights.groups
    await_everyone(groups, "full_params()")
    holds = not rank0_only or is_first(groups)
    named = {name: parameter for name, parameter in module.named_parameters() if isinstance(parameter, DTensor)}
    plain = _plain(weights, named, holds)
    before = [(part, dict(parameters_of(part))) for part in module.modules()]
    for part, parameters in before:
        for key, parameter in parameters.items():
            parameters_of(part)[key] = None if parameter is None else plain.get(id(parameter), parameter)
    listed = _flat_weights(module)
    failure: Exception | None = None
    wholes: list[torch.Tensor] = []
    try:
        try:
            yield
            if writeback:
                wholes = _all_changed(named, before, groups, holds)
        except Exception as error:
            failure = error
        if writeback:
            _check_success(failure, groups)
            _write_back(weights, named, wholes)
        elif failure is not None:
            raise failure
    finally:
        for part, parameters in before:
            parameters_of(part).clear()
            parameters_of(part).update(parameters)
        for part, flat in listed:
            set_flat_weights(part, flat)


def is_first(groups: MeshGroups) -> bool:
    """Whether this is the first rank of the mesh."""
    return groups.over(groups.axes).index == 0


def await_everyone(groups: MeshGroups, what: str) -> None:
    """Waits for all ranks of the mesh. On gloo, raises :class:`AutoparError` if some do not arrive, for example because
    only one rank calls."""
    group = groups.over(groups.axes).group
    if group is None:
        return
    if dist.get_backend(group) != "gloo":
        dist.barrier(group)
        return
    try:
        dist.monitored_barrier(group, PATIENCE)
    except RuntimeError as error:
        raise AutoparError(
            f"{what} was not called on every rank of the mesh: it gathers parameters that ranks hold parts of. Call it "
            f"on all ranks, outside of any `if rank == 0:` ({error})"
        ) from error


Members = dict[str, nn.Parameter | None]


def _plain(weights: Weights, named: Mapping[str, nn.Parameter], holds: bool) -> dict[int, nn.Parameter]:
    """A plain parameter for each DTensor, by its id. Gathers one after the other."""
    missing = [name for name, parameter in named.items() if parameter.is_meta]
    if missing:
        raise AutoparError(
            f"{missing[0]} has no values yet: a meta model is initialised at its first batch; run one, pass "
            "example_inputs to parallelize, or load a state_dict"
        )
    plain: dict[int, nn.Parameter] = {}
    for parameter, whole in _wholes(weights, list(named.values())):
        value = whole if holds else torch.empty_like(whole, device="meta")
        plain[id(parameter)] = replacement = nn.Parameter(value, parameter.requires_grad)
        replacement.__dict__.update(parameter.__dict__)
        if replacement.requires_grad:
            replacement.register_hook(_refuse_gradient)
    return plain


def _wholes(weights: Weights, parameters: list[nn.Parameter]) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """Each parameter with its whole value, in separate memory."""
    if not weights.is_placed:  # Other ranks' values are ignored, as in the first placement.
        for index, value in broadcast_first([local_of(parameter) for parameter in parameters], weights.groups):
            yield parameters[index], _own_memory(value, parameters[index])
        return
    for parameter in parameters:
        with torch.no_grad():
            yield parameter, _own_memory(whole_everywhere(parameter.detach(), weights.groups), parameter)


def _own_memory(whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """``whole`` in memory of its own, laid out as the parameter is: random numbers are drawn in the order of memory,
    and torch 2.11 gathers uneven shards with gaps between rows."""
    if whole.stride() != parameter.stride():
        return torch.empty_strided(whole.shape, parameter.stride(), dtype=whole.dtype, device=whole.device).copy_(whole)
    shared = whole.untyped_storage().data_ptr() == local_of(parameter).untyped_storage().data_ptr()
    return whole.clone() if shared else whole


def _refuse_gradient(_gradient: torch.Tensor) -> None:
    raise AutoparError(
        "backward() inside full_params(): its parameters are copies, whose gradients nobody would see. Train outside, "
        "with model.step(...) or model(...)"
    )


def _flat_weights(module: nn.Module) -> list[tuple[nn.RNNBase, list[torch.Tensor | None]]]:
    """Renews the lists of parameters that recurrent layers keep. Returns the old lists."""
    parts = [part for part in module.modules() if isinstance(part, nn.RNNBase)]
    listed = [(part, flat_weights_of(part)) for part in parts]
    for part in parts:
        renew_flat_weights(part)
    return listed


def _check_success(failure: Exception | None, groups: MeshGroups) -> None:
    """Raises ``failure``, or an :class:`AutoparError` if only other ranks have failed, since these will not take part
    in the write-back. Collective."""
    ranks = groups.mesh.mesh.flatten().tolist()
    own = torch.tensor([failure is not None], dtype=torch.uint8, device=groups.device)
    everyone = Collectives(groups).all_gather(own, groups.axes, 0, len(ranks)).wait()
    if failure is not None:
        raise failure
    failed = [rank for rank, flag in zip(ranks, everyone.tolist(), strict=True) if flag]
    if failed:
        raise AutoparError(
            "the block of full_params(writeback=True) ended with an error on rank"
            f"{'s' if len(failed) > 1 else ''} {', '.join(map(str, failed))}, which says why: nothing was written "
            "back, on any rank"
        )


def _all_changed(
    named: Mapping[str, nn.Parameter], before: Sequence[tuple[nn.Module, Members]], groups: MeshGroups, holds: bool
) -> list[torch.Tensor]:
    """The tensors that are now in the places of the parameters."""
    now: dict[int, torch.Tensor | None] = {}
    for part, parameters in before:
        for key, parameter in parameters.items():
            now.setdefault(id(parameter), parameters_of(part).get(key))
    return [_changed(name, p, now[id(p)], groups, holds) for name, p in named.items()]


def _write_back(weights: Weights, named: Mapping[str, nn.Parameter], wholes: list[torch.Tensor]) -> None:
    """Gives every rank its part of the first rank's values."""
    targets = list(named.items())
    with torch.no_grad():
        for index, value in broadcast_first(wholes, weights.groups):
            name, parameter = targets[index]
            local_of(parameter).copy_(weights.own_part(name, value))


def _changed(
    name: str, parameter: nn.Parameter, now: torch.Tensor | None, groups: MeshGroups, holds: bool
) -> torch.Tensor:
    """The new value of a parameter, in its shape and dtype; only the first rank's values matter."""
    if now is None or now.shape != parameter.shape:
        change = "is gone" if now is None else f"has shape {list(now.shape)}"
        raise AutoparError(
            f"inside full_params(writeback=True) the parameter {name} of shape {list(parameter.shape)} {change}: "
            "values can be changed there; change shapes before autopar.parallelize"
        )
    if not holds:
        return torch.empty(parameter.shape, dtype=parameter.dtype, device=groups.device)
    return now.detach().to(parameter.dtype)
