"""The parameters of one module for its programs: stored parameters, and their gradients."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from autopar.errors import PlanMismatchError
from autopar.ir.program import TensorSlot
from autopar.runtime.comm.groups import MeshGroups
from autopar.runtime.torch_internals.dtensors import dtensor_like, is_placed_like
from autopar.torch_internals.module_walk import Walk
from autopar.torch_internals.modules import buffers_of
from autopar.torch_internals.tensors import gradient_hooks

from .gradient_hooks import run_hooks, run_post_hooks
from .parameters import (
    Stored,
    laid_out_like,
    local_of,
    make_dtensor,
    swap_parameter,
    take_own,
    wrap,
    wrap_parameters,
)
from .placing import Values, check_placed, place_parameters

_APART = (
    "parameters of this copy lie on different pipeline stages, and torch's functions over lists of tensors skip those "
    "of other stages: average them one by one, AveragedModel(model, avg_fn=lambda average, new, n: 0.99 * average + "
    "0.01 * new), say, rather than by multi_avg_fn or by default"
)


class Weights:
    """Parameters and buffers of ``module``, placed by the first program that calls :meth:`settle`.

    A program may refer to a tied parameter by any of its names; ``names`` maps each to the one in ``named_parameters``.
    """

    def __init__(self, module: nn.Module, groups: MeshGroups, seed: int | None) -> None:
        self.module, self.walk = module, Walk(module)
        self.groups = groups
        self._seed = seed
        self._stored: dict[str, Stored] | None = None
        self._copies: list[Weights] = []
        self._values: Values | None = None
        self._waiting: list[Callable[[], None]] = []
        wrap_parameters(module, groups)

    def copied_for(self, module: nn.Module) -> Weights:
        """The weights of ``module``, a copy of this module: placed like these, now or once these are placed."""
        copied = copy.copy(self)
        copied.module, copied.walk, copied._copies, copied._waiting = module, Walk(module), [], []
        # Referenced, since placing it is collective, and ranks collect garbage at different times.
        self._copies.append(copied)
        self._place_copies()
        return copied

    @property
    def names(self) -> Mapping[str, str]:
        first = {id(parameter): name for name, parameter in self.module.named_parameters()}
        return {n: first[id(p)] for n, p in self.module.named_parameters(remove_duplicate=False)}

    def check_own(self) -> None:
        """Raises :class:`PlanMismatchError` for parameters that came into the module after it was made parallel."""
        plain = [n for n, p in self.module.named_parameters() if not isinstance(p, DTensor)]
        if plain:
            more = f" and {len(plain) - 1} more" if len(plain) > 1 else ""
            raise PlanMismatchError(
                f"the parameter {plain[0]}{more} came into the model after autopar.parallelize, which places those "
                "that are there: replace or add modules first. Now, parallelize a new instance of the plain model "
                "that has them; to take the other weights along: `with parallel.full_params(): "
                "new.load_state_dict(parallel.state_dict(), strict=False)`"
            )

    def settle(self, stored: Sequence[Stored]) -> None:
        """Places the parameters as in ``stored``, or checks that they are placed so. Collective the first time."""
        names = self.names
        unknown = [slot.target for slot, _ in stored if slot.target not in names]
        if unknown:
            raise PlanMismatchError(f"the program has parameters that the model has not: {', '.join(unknown)}")
        by_name = {names[slot.target]: (slot, place) for slot, place in stored}
        if self._stored is None:
            place_parameters(self.module, by_name, self.groups, self._seed, self._values)
            self._stored, self._values = by_name, None
            self._place_copies()
            waiting, self._waiting = self._waiting, []
            for function in waiting:
                function()
        else:
            check_placed(self.module, by_name)

    def take_values(self, values: Values) -> None:
        """Parameters and buffers on the meta device will have ``values`` where it has them, instead of their own
        initialisation."""
        self._values = values

    def when_placed(self, function: Callable[[], None]) -> None:
        """Calls ``function`` once the parameters are placed; now, if they are."""
        if self.is_placed:
            function()
        else:
            self._waiting.append(function)

    def _place_copies(self) -> None:
        if self._stored is None:
            return
        for copied in self._copies:
            if not copied.is_placed:
                copied.groups = self.groups
                copied.settle(list(self._stored.values()))
        if self._copies and any(place.coordinate is None for _, place in self._stored.values()):
            warnings.warn(_APART, stacklevel=2)
        self._copies = []

    def parameters(self, slots: Sequence[TensorSlot]) -> list[nn.Parameter]:
        """The parameters in the order of ``slots``."""
        by_name = dict(self.module.named_parameters(remove_duplicate=False))
        return [by_name[slot.target] for slot in slots]

    def whole_to_own(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Converts a whole ``value`` of the parameter ``name`` (any of its names) to a DTensor with its placements. A
        meta parameter that is not placed yet takes the value at once, since nothing can be copied into it."""
        parameter = self.module.get_parameter(name)
        if value.shape != parameter.shape:
            return value
        if self._stored is None:
            return self._replicated(name, parameter, value)
        slot, place = self._place(self.names[name], value)
        return make_dtensor(take_own(value.to(self.groups.device), slot, place), slot, place)

    def take_buffers(self, values: Mapping[str, Any]) -> None:
        """Buffers on the meta device become their ``values``, since nothing can be copied into them."""
        for path, part in self.module.named_modules():
            for key, buffer in buffers_of(part).items():
                value = values.get(f"{path}.{key}" if path else key)
                if buffer is None or not buffer.is_meta or not isinstance(value, torch.Tensor) or value.is_meta:
                    continue
                if value.shape == buffer.shape:
                    buffers_of(part)[key] = value.detach().to(buffer.dtype, copy=True)

    @property
    def is_placed(self) -> bool:
        """Whether a program has placed the parameters."""
        return self._stored is not None

    def own_part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a ``whole`` value of the parameter whose first name is ``name``."""
        return take_own(whole, *self._place(name, whole))

    def _place(self, name: str, whole: torch.Tensor) -> Stored:
        everywhere = (Replicate(),) * len(self.groups.shape)
        slot = TensorSlot(name, "param", name, tuple(whole.shape), everywhere)
        return (self._stored or {}).get(name, (slot, self.groups))

    def _replicated(self, name: str, parameter: nn.Parameter, value: torch.Tensor) -> torch.Tensor:
        local = value.detach().to(parameter.dtype)
        if not parameter.is_meta:
            return wrap(local, self.groups)
        swap_parameter(parameter, nn.Parameter(wrap(local.clone(), self.groups), parameter.requires_grad), name)
        return parameter.detach()


def gradient_like(parameter: nn.Parameter, local: torch.Tensor) -> torch.Tensor:
    """``local`` as the gradient of ``parameter``, with its placements. Uses the bare constructor, because
    ``from_local`` takes twice as long and there are hundreds a step."""
    assert isinstance(parameter, DTensor)
    return dtensor_like(laid_out_like(local, parameter), parameter)


def add_gradient(parameter: nn.Parameter, local: torch.Tensor) -> bool:
    """Adds ``local`` to the gradient of ``parameter``, which has no hooks, and returns True; False if only autograd
    can, because the user has frozen the parameter since forward, or put something else into ``.grad``."""
    if not parameter.requires_grad:
        return False
    assert isinstance(parameter, DTensor)
    gradient = parameter.grad
    if gradient is None:
        parameter.grad = gradient_like(parameter, local)
        return True
    if not is_placed_like(gradient, parameter):
        return False
    local_of(gradient).add_(local)
    return True


MakeGradient = Callable[[nn.Parameter, torch.Tensor], torch.Tensor]


def accumulate(parameter: nn.Parameter, local: torch.Tensor, make: MakeGradient = gradient_like) -> None:
    """Adds ``local`` to the gradient of ``parameter``, which is created by ``make`` if there is none. Runs the hooks
    that autograd would run."""
    if gradient_hooks(parameter):
        local = local_of(run_hooks(parameter, make(parameter, local)))
    if parameter.grad is None:
        parameter.grad = make(parameter, local)
    else:
        local_of(parameter.grad).add_(local)
    run_post_hooks(parameter)
