"""Models that another library has wrapped, or that are parallel already: which module to give to autopar instead."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError, OptionsError

from .delegation import Delegating

_PLANS = "autopar plans data parallelism and sharding of weights itself"
# By the names of torch's classes, so that nothing is imported for them: what to give instead.
_WRAPPERS: Mapping[str, str] = {
    "DistributedDataParallel": f"{_PLANS}: give the model inside, {{path}}.module",
    "DataParallel": f"{_PLANS}, for one process on each device: give the model inside, {{path}}.module",
    "FullyShardedDataParallel": f"{_PLANS}, and FSDP has flattened the parameters: give a new instance of the plain "
    "model",
    "FSDPModule": f"{_PLANS}, and fully_shard has sharded the parameters: leave fully_shard out, and give a new "
    "instance of the plain model",
}
# Inside of a model torch.compile changes neither results nor names, and autopar traces through it.
_COMPILED = "OptimizedModule"
# Names in an error. Chosen: enough to recognise the module they are of.
_LISTED = 5


def check_plain(module: nn.Module) -> None:
    """Raises :class:`AutoparError` if ``module``, or a part of it, is already parallel, and :class:`OptionsError` if
    another library has wrapped it."""
    if isinstance(module, Delegating):
        raise AutoparError(
            "the model is parallel already: it takes batches of any shape, so it needs no second autopar.parallelize. "
            "For another mesh or other options, parallelize a new instance of the plain model; its plan is model.plan"
        )
    for path, part in module.named_modules():
        _check_wrapper(f"model.{path}" if path else "model", part)
    if _COMPILED in _torch_classes(module):
        raise OptionsError(
            "the model is a torch.compile(...) of another, whose name _orig_mod would be part of every parameter's, "
            "and whose kernels would not be used: give the model before torch.compile (model._orig_mod). autopar "
            "compiles its own programs, Options(compile=True), on GPUs without being asked"
        )
    _check_sharded(module)


def _check_wrapper(path: str, part: nn.Module) -> None:
    found = next((name for name in _torch_classes(part) if name in _WRAPPERS), None)
    if found is not None:
        raise OptionsError(f"{path} is wrapped by torch's {found}: {_WRAPPERS[found].format(path=path)}")


def _torch_classes(module: nn.Module) -> list[str]:
    return [cls.__name__ for cls in type(module).__mro__ if cls.__module__.partition(".")[0] == "torch"]


def _check_sharded(module: nn.Module) -> None:
    taken = [name for name, parameter in module.named_parameters() if isinstance(parameter, DTensor)]
    if taken:
        more = f" and {len(taken) - 1} more parameters" if len(taken) > 1 else ""
        raise AutoparError(
            f"{taken[0]}{more} of this model are DTensors already: it was parallelized before, by autopar or by "
            "torch's parallelize_module. A parallel model takes batches of any shape and needs no second "
            "autopar.parallelize. For another mesh or other options, parallelize a new instance of the plain model; "
            "to take the weights of a parallel one along: `with parallel.full_params(): "
            "new.load_state_dict(parallel.state_dict())`"
        )


def check_whole(model: nn.Module) -> None:
    """Raises :class:`OptionsError` if some parameters have values and others are on the meta device: which of the two
    was meant is not known, and new values for the rest would spoil a model that was loaded."""
    named = dict(model.named_parameters())
    lost = [name for name, parameter in named.items() if parameter.is_meta]
    if lost and len(lost) < len(named):
        listed = ", ".join(lost[:_LISTED]) + (f" and {len(lost) - _LISTED} more" if len(lost) > _LISTED else "")
        raise OptionsError(
            f"{len(lost)} of {len(named)} parameters are on the meta device, without values, and the others have "
            f"some: {listed}. Load or initialise these too (module.to_empty(device='cpu'), then reset_parameters()), "
            "or build the whole model under torch.device('meta') and give parallelize(weights=folder) or "
            "load_state_dict what it starts from"
        )
