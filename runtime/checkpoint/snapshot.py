"""The state of a training at one step: the parts of tensors that this rank writes, and everything else as JSON."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from autopar.errors import CheckpointError
from autopar.runtime.module.parallel_module import ParallelModule

from .boxes import Holders, boxes_to_write, holders_of, holders_on, local_part
from .random_states import random_states
from .ranks import Ranks
from .replica_state import Held, exchanges, holders_in, of_all, prefix_of, replica_of
from .torch_storage import Part
from .tree_json import to_json

# The name of the file of what is not a tensor.
STATE = "state.json"
# What the names of tensors begin with, as in torch's own checkpoints of {"model": ..., "optimizer": ...}.
MODEL, OPTIMIZER = "model.", "optimizer.state."


@dataclass(frozen=True)
class Snapshot:
    """``parts``: of all tensors that this rank writes something of; ``state``: the same on every rank."""

    step: int
    parts: Mapping[str, Part]
    state: Mapping[str, Any]


@dataclass(frozen=True)
class Training:
    """What is saved and loaded together."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    scheduler: Any = None
    dataloader: Any = None


def take_snapshot(training: Training, ranks: Ranks, step: int, extra: Any) -> Snapshot:
    """The state now. The values of its parts are views of the memory that trains. Collective. Raises
    :class:`CheckpointError` for what a checkpoint does not hold."""
    if type(step) is not int or step < 0:
        raise CheckpointError(f"step={step!r} is not a number of steps: give an int from 0 on")
    model = training.model
    tensors: Held = {}
    everyone, prefix = holders_in(model, ranks), prefix_of(replica_of(model)[0])
    own = ranks.together(lambda: _state(training, step, extra, everyone, tensors))
    tensors = {f"{prefix}{name}": held for name, held in tensors.items()}
    exchanging = ranks.together(lambda: exchanges(model, ranks, tensors))
    gathered = ranks.all((own["optimizer"], own["dataloader"], random_states()))
    optimizers, loaders, generators = zip(*gathered, strict=True)
    first = ranks.index - (everyone.index or 0)
    own["optimizer"] = _merged(list(optimizers[first : first + everyone.count]))
    state = {
        **own,
        **of_all(model, ranks, own, exchanging),
        "ranks": ranks.count,
        "dataloader": _by_rank(list(loaders)),
        "random": list(generators),
    }
    parts = {name: part for name, held in tensors.items() if (part := _part(name, *held)) is not None}
    return Snapshot(step, parts, state)


def _state(
    training: Training, step: int, extra: Any, everyone: Holders, tensors: dict[str, tuple[torch.Tensor, Holders]]
) -> dict[str, Any]:
    model = training.model
    state = {
        "step": step,
        "versions": versions(),
        "model": _model(model, everyone, tensors),
        "optimizer": _optimizer(training, everyone, tensors),
        "scheduler": _tree(training.scheduler, "scheduler", everyone, tensors),
        "dataloader": _tree(stateful_of(training.dataloader), "dataloader", everyone, tensors),
        "extra": _json(extra, "extra", everyone, tensors),
    }
    if isinstance(model, ParallelModule):
        state["parallel"] = {
            "mesh": list(model.autopar_parts.weights.groups.shape),
            "plan": model.autopar_parts.plan_text,
            "options": _json(model.autopar_parts.options, "options", everyone, tensors),
            "random": model.random_state(),
            "loss_scale": model.loss_scale_state(),
        }
    return state


def versions() -> dict[str, str]:
    """The versions of what writes a checkpoint."""
    autopar = sys.modules.get("autopar")
    return {
        "autopar": str(getattr(autopar, "__version__", "")),
        "torch": str(torch.__version__),
        "python": sys.version.split()[0],
    }


def _model(model: nn.Module, everyone: Holders, tensors: dict[str, tuple[torch.Tensor, Holders]]) -> dict[str, Any]:
    """Parameters and buffers by the names of ``state_dict``, each once; the other names of tied ones beside."""
    first: dict[int, str] = {}
    tied, others = {}, {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            others[name] = _json(value, f"{MODEL}{name}", everyone, tensors)
        elif id(value) in first:
            tied[name] = first[id(value)]
        elif value.is_meta:
            raise CheckpointError(
                f"{name} is on the meta device still: there is nothing to save before the first batch"
            )
        else:
            first[id(value)] = name
            tensors[f"{MODEL}{name}"] = value, holders_of(value, everyone)
    return {"tied": tied, "others": others}


def names_of(model: nn.Module) -> dict[int, str]:
    """The first name of each parameter, by its identity."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def _optimizer(
    training: Training, everyone: Holders, tensors: dict[str, tuple[torch.Tensor, Holders]]
) -> dict[str, Any] | None:
    """Options by group, and state by the name of the parameter."""
    optimizer = training.optimizer
    if optimizer is None:
        return None
    names = names_of(training.model)
    groups, state = [], {}
    for number, group in enumerate(optimizer.param_groups):
        unknown = [list(p.shape) for p in group["params"] if id(p) not in names]
        if unknown:
            raise CheckpointError(
                f"group {number} of the optimizer has a parameter of shape {unknown[0]} that is not one of the model: "
                "give the model and the optimizer that train together"
            )
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        groups.append(
            {
                "options": _json(options, f"optimizer.group {number}", everyone, tensors),
                "params": [names[id(p)] for p in group["params"]],
            }
        )
        for parameter in group["params"]:
            if optimizer.state.get(parameter):
                name = names[id(parameter)]
                state[name] = _parameter_state(parameter, optimizer.state[parameter], name, everyone, tensors)
    return {"class": type(optimizer).__name__, "groups": groups, "state": state}


def _parameter_state(
    parameter: torch.Tensor,
    state: Mapping[str, Any],
    name: str,
    everyone: Holders,
    tensors: dict[str, tuple[torch.Tensor, Holders]],
) -> dict[str, Any]:
    """Plain tensors, such as counts of steps, are on the ranks that have the parameter."""
    if isinstance(parameter, DTensor):
        everyone = holders_on(parameter.device_mesh, range(parameter.device_mesh.ndim))
    return {key: _json(value, f"{OPTIMIZER}{name}.{key}", everyone, tensors) for key, value in state.items()}


def stateful_of(loader: Any) -> Any:
    """What has the state of a data loader: the loader itself, or its sampler."""
    candidates = (loader, getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None))
    found = next((c for c in candidates if hasattr(c, "state_dict") and hasattr(c, "load_state_dict")), None)
    if loader is not None and found is None:
        raise CheckpointError(
            f"dataloader={type(loader).__name__} has no state_dict, nor has its sampler: pass what knows how far it "
            "is, such as the sampler of model.sampler(...)"
        )
    return found


def _tree(stateful: Any, path: str, everyone: Holders, tensors: dict[str, tuple[torch.Tensor, Holders]]) -> Any:
    return None if stateful is None else _json(stateful.state_dict(), path, everyone, tensors)


def _json(value: Any, path: str, everyone: Holders, tensors: dict[str, tuple[torch.Tensor, Holders]]) -> Any:
    found: dict[str, torch.Tensor] = {}
    encoded = to_json(value, path, found)
    for name, tensor in found.items():
        whole = _without_partial(tensor)
        tensors[name] = whole, holders_of(whole, everyone)
    return encoded


def _without_partial(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor) and any(isinstance(p, Partial) for p in tensor.placements):
        return tensor.redistribute(placements=[Replicate() if isinstance(p, Partial) else p for p in tensor.placements])
    return tensor


def _part(name: str, tensor: torch.Tensor, holders: Holders) -> Part | None:
    local = local_part(tensor)
    boxes = tuple((box, box.of(local)) for box in boxes_to_write(tensor, name, holders))
    return Part(tensor.dtype, tuple(tensor.shape), boxes) if boxes else None


def _merged(optimizers: list[dict[str, Any] | None]) -> dict[str, Any] | None:
    """The optimizer's JSON with the state of all parameters: ranks of other stages may lack some."""
    first = optimizers[0]
    if first is None:
        return None
    return {**first, "state": dict(_states(optimizers))}


def _states(optimizers: list[dict[str, Any] | None]) -> Iterator[tuple[str, Any]]:
    seen = set()
    for optimizer in optimizers:
        for name, state in (optimizer or {}).get("state", {}).items():
            if name not in seen:
                seen.add(name)
                yield name, state


def _by_rank(loaders: list[Any]) -> dict[str, Any]:
    """The state of the data loader: one if it is the same on all ranks."""
    if all(loader == loaders[0] for loader in loaders):
        return {"same": loaders[0]}
    return {"by_rank": loaders}
