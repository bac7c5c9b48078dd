"""Gradients under pipeline stages that work with torch's functions over several gradients.

Gradients of different stages are DTensors on different meshes. torch's operations over lists of tensors refuse these,
and only ranks of a gradient's mesh would get its norm or the whole tensor. These gradients know all ranks: their norm
is that of the whole gradient on every rank, and operations that change a list of them change the local tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar.runtime.comm.groups import MeshGroups
from autopar.runtime.state.gradient_norm import norms
from autopar.runtime.state.parameters import local_of
from autopar.runtime.torch_internals.dtensors import dtensor_like, local_tensor, subclass_like
from autopar.runtime.torch_internals.tensor_lists import FOREACH_NORM, allow_in_lists, changes_list
from autopar.torch_internals.modes import without_torch_function

from .stage_mesh import whole_everywhere

_NORMS = (torch.linalg.vector_norm, torch.norm, torch.Tensor.norm)


class StageGradient(DTensor):
    """A gradient of a model on ``everyone``, the mesh (stages, \\*inside a stage). Norms and :meth:`full_tensor` are
    collective over all of it."""

    everyone: MeshGroups

    @staticmethod
    def like(parameter: torch.Tensor, local: torch.Tensor, everyone: MeshGroups) -> StageGradient:
        """``local`` as the gradient of ``parameter``, with its placements."""
        assert isinstance(parameter, DTensor)
        gradient = subclass_like(StageGradient, local, parameter)
        gradient.everyone = everyone
        return gradient

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        return whole_everywhere(dtensor_like(local_tensor(self), self), self.everyone)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        with without_torch_function():
            if func is FOREACH_NORM and _ours(args[0]):
                return list(_norms(args[0], *args[1:], **options).unbind())
            if func in _NORMS and isinstance(args[0], StageGradient) and _is_full_norm(args, options):
                return _norms([args[0]], *args[1:], *(options[name] for name in ("p", "ord") if name in options))[0]
            if changes_list(func) and _ours(args[0]):
                return func(*([local_of(t) for t in a] if isinstance(a, (list, tuple)) else a for a in args), **options)
            return func(*args, **options)


# Registered like DTensor itself: clipping then takes one message for all gradients instead of one for each.
allow_in_lists(StageGradient)


def _ours(tensors: Any) -> bool:
    return isinstance(tensors, (list, tuple)) and all(isinstance(t, StageGradient) for t in tensors)


def _is_full_norm(args: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
    """Whether the norm is over all elements, in their dtype."""
    others = [value for name, value in options.items() if name not in ("p", "ord")]
    return len(args) <= 2 and all(value is None or value is False for value in others)


def _norms(
    gradients: list[StageGradient], ord: float | str | None = 2.0, dtype: torch.dtype | None = None
) -> torch.Tensor:
    each = norms(list(gradients), gradients[0].everyone, 2.0 if ord in (None, "fro") else float(ord))
    return each if dtype is None else each.to(dtype)
