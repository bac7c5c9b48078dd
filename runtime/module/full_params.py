"""Whole plain parameters in the original module, for what a compiled program does not do: generating text, saving in
the format of a library, any method of the model.

Each DTensor is gathered and a plain parameter with its values stands in its place until the block ends, however it
ends. The module then has its DTensors again, with what they had: changes are lost, unless they are to be written back.
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
    """Within, ``weights.module`` has whole plain parameters: on the first rank of the mesh alone with ``rank0_only``,
    and meta tensors elsewhere. With ``writeback``, what the first rank has in them at the end is kept, unless an
    exception ends the block on some rank: then every other rank has an :class:`AutoparError`. Collective, at both ends.
    Raises :class:`AutoparError` if there are no values yet."""
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
    """Returns when all ranks of the mesh are here. Raises :class:`AutoparError` where some do not come, as when only
    one calls, rather than wait for ever (on gloo, which can tell)."""
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
    """A plain parameter for each DTensor, by its identity. Gathered one after the other."""
    missing = [name for name, parameter in named.items() if parameter.is_meta]
    if missing:
        raise AutoparError(
            f"{missing[0]} has no values yet: a meta model is initialised at its first batch; run one, pass "
            "example_inputs to parallelize, or load a state_dict"
        )
    found: dict[int, nn.Parameter] = {}
    for parameter, whole in _wholes(weights, list(named.values())):
        kept = whole if holds else torch.empty_like(whole, device="meta")
        found[id(parameter)] = made = nn.Parameter(kept, parameter.requires_grad)
        made.__dict__.update(parameter.__dict__)
        if made.requires_grad:
            made.register_hook(_refuse_gradient)
    return found


def _wholes(weights: Weights, parameters: list[nn.Parameter]) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """Each parameter with its whole value, which shares no memory with it."""
    if not weights.is_placed:  # Whatever other ranks have: the first rank's values will count.
        for index, value in broadcast_first([local_of(parameter) for parameter in parameters], weights.groups):
            yield parameters[index], _own_memory(value, parameters[index])
        return
    for parameter in parameters:
        with torch.no_grad():
            yield parameter, _own_memory(whole_everywhere(parameter.detach(), weights.groups), parameter)


def _own_memory(whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    shared = whole.untyped_storage().data_ptr() == local_of(parameter).untyped_storage().data_ptr()
    return whole.clone() if shared else whole


def _refuse_gradient(_gradient: torch.Tensor) -> None:
    raise AutoparError(
        "backward() inside full_params(): its parameters are copies, whose gradients nobody would see. Train outside, "
        "with model.step(...) or model(...)"
    )


def _flat_weights(module: nn.Module) -> list[tuple[nn.RNNBase, list[torch.Tensor | None]]]:
    """Has recurrent layers, which keep a list of their parameters, list those that they have now; the old lists."""
    parts = [part for part in module.modules() if isinstance(part, nn.RNNBase)]
    listed = [(part, flat_weights_of(part)) for part in parts]
    for part in parts:
        renew_flat_weights(part)
    return listed


def _check_success(failure: Exception | None, groups: MeshGroups) -> None:
    """Raises ``failure``, and an :class:`AutoparError` where there is none but other ranks have one: they will not take
    part in what follows. Collective."""
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
    """What stands in the places of the parameters."""
    now: dict[int, torch.Tensor | None] = {}
    for part, parameters in before:
        for key, parameter in parameters.items():
            now.setdefault(id(parameter), parameters_of(part).get(key))
    return [_changed(name, p, now[id(p)], groups, holds) for name, p in named.items()]


def _write_back(weights: Weights, named: Mapping[str, nn.Parameter], wholes: list[torch.Tensor]) -> None:
    """Gives every rank its part of what the first one has."""
    targets = list(named.items())
    with torch.no_grad():
        for index, value in broadcast_first(wholes, weights.groups):
            name, parameter = targets[index]
            local_of(parameter).copy_(weights.own_part(name, value))


def _changed(
    name: str, parameter: nn.Parameter, now: torch.Tensor | None, groups: MeshGroups, holds: bool
) -> torch.Tensor:
    """What the parameter is to be: of its shape and dtype on all ranks, though it counts on the first alone."""
    if now is None or now.shape != parameter.shape:
        what = "is gone" if now is None else f"has shape {list(now.shape)}"
        raise AutoparError(
            f"inside full_params(writeback=True) the parameter {name} of shape {list(parameter.shape)} {what}: values "
            "can be changed there; change shapes before autopar.parallelize"
        )
    if not holds:
        return torch.empty(parameter.shape, dtype=parameter.dtype, device=groups.device)
    return now.detach().to(parameter.dtype)
