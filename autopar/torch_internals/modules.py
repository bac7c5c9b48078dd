"""The tables of ``nn.Module`` themselves, with entries that are None, to read and to write.

The public methods (``named_parameters`` and the like) leave out what is None or tied, and only read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

# The base class of every batch norm (2.11).
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

# Parameters and buffers without a shape yet (2.11).
from torch.nn.parameter import is_lazy

__all__ = [
    "BUFFERS",
    "CHILDREN",
    "PARAMETERS",
    "SKIPPED_ON_META",
    "STATE",
    "STATE_DICT_HOOKS",
    "BatchNorm",
    "blank_copy",
    "buffers_of",
    "check_batch_norm_input",
    "children_of",
    "flat_weights_of",
    "initialiser_of",
    "is_about_flat_weights",
    "is_flat_weights",
    "is_lazy",
    "is_persistent",
    "parameters_of",
    "renew_flat_weights",
    "set_children",
    "set_flat_weights",
]

PARAMETERS, BUFFERS, CHILDREN = "_parameters", "_buffers", "_modules"
"""The names of a module's tables in its ``__dict__`` (2.11)."""
STATE = (PARAMETERS, BUFFERS, CHILDREN, "_non_persistent_buffers_set")
"""The names of everything in a module's ``__dict__`` about its parameters, buffers and children (2.11)."""
STATE_DICT_HOOKS = (
    *("_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
"""The names of the tables of hooks that run when a state dict is made or loaded (2.11)."""
SKIPPED_ON_META = ("_no_grad_trunc_normal_", "orthogonal_", "dirac_", "sparse_")
"""The functions of ``torch.nn.init`` that skip meta tensors, because they read values (2.11)."""


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The module's own parameters. Relies on ``nn.Module._parameters`` (2.11)."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """The module's own buffers. Relies on ``nn.Module._buffers`` (2.11)."""
    return module._buffers


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The modules directly inside. Relies on ``nn.Module._modules`` (2.11)."""
    return module._modules


def set_children(module: nn.Module, children: Mapping[str, nn.Module | None]) -> None:
    """Gives ``module`` a new table of children; the old table is left unchanged. Relies on ``nn.Module._modules``
    (2.11)."""
    module._modules = dict(children)


def is_persistent(module: nn.Module, buffer: str) -> bool:
    """Whether the module's own ``buffer`` is part of its state dict. Relies on
    ``nn.Module._non_persistent_buffers_set`` (2.11)."""
    return buffer not in module._non_persistent_buffers_set


def check_batch_norm_input(module: BatchNorm, x: Tensor) -> None:
    """Raises ValueError for a number of dims that ``module`` does not take. Relies on ``_check_input_dim`` (2.11)."""
    module._check_input_dim(x)


def flat_weights_of(layer: nn.RNNBase) -> list[Tensor | None]:
    """The list of its parameters that a recurrent layer hands to its kernel. Relies on ``_flat_weights`` (2.11)."""
    return layer._flat_weights


def is_flat_weights(owner: object, name: str) -> bool:
    """Whether attribute ``name`` of ``owner`` is that list. Relies on ``_flat_weights`` (2.11)."""
    return name == "_flat_weights" and isinstance(owner, nn.RNNBase)


def is_about_flat_weights(owner: object, name: str) -> bool:
    """Whether attribute ``name`` of ``owner`` is that list, their names, or references to them. Relies on
    ``_flat_weights``, ``_flat_weights_names`` and ``_flat_weight_refs`` (2.11)."""
    return name.startswith("_flat_weight") and isinstance(owner, nn.RNNBase)


def initialiser_of(module: nn.Module) -> Callable[[], None] | None:
    """The method that initialises the module's own parameters, if there is one. Relies on ``reset_parameters``, which
    torch asks writers of modules to define, or ``_reset_parameters``, its name in some of torch's modules (2.11)."""
    initialiser = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return initialiser if callable(initialiser) else None


def blank_copy(module: nn.Module) -> nn.Module:
    """A module of the same class and attributes, with empty tables of its own. Relies on the names of the tables
    (2.11)."""
    copy: nn.Module = object.__new__(type(module))
    copy.__dict__.update(module.__dict__, **{table: {} for table in (PARAMETERS, BUFFERS, CHILDREN)})
    return copy


def set_flat_weights(layer: nn.RNNBase, weights: list[Any]) -> None:
    """Sets the list of :func:`flat_weights_of`. Relies on ``_flat_weights`` (2.11)."""
    layer._flat_weights = weights


def renew_flat_weights(layer: nn.RNNBase) -> None:
    """Rebuilds the list from the parameters that ``layer`` has now. Relies on ``_flat_weights`` and
    ``_flat_weights_names`` (2.11)."""
    layer._flat_weights = [getattr(layer, name, None) for name in layer._flat_weights_names]
