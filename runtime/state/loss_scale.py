"""Loss scaling under fp16: gradients below 6e-8 would be zero, so those of a multiple of the loss are computed.

The scale follows the rule of :class:`torch.amp.GradScaler`: it is halved by a step whose gradients overflow, and
doubled after ``growth_interval`` steps in a row without overflow. Users see gradients of the loss itself: they are
divided by the scale as soon as they are reduced, before they are added to ``.grad``.

Gradients may be accumulated over several passes until an optimizer consumes them. If one of these passes overflows on
any rank, the sum would lack a part, so all ranks drop it: the gradients accumulated so far, and those of later passes
until an optimizer steps or ``zero_grad`` is called, on the model or on an optimizer that it made. (``zero_grad`` of
other optimizers cannot be observed, so an optimizer made by hand must also step after an overflow.) Meanwhile ``.grad``
is None, so that optimizers of any class skip their step and keep their state, and clipping does nothing. All passes
until then count as one step.

A loop that does neither after an overflow never trains again. The same holds for :class:`torch.amp.GradScaler`, whose
``step`` is always called: infinite gradients stay in ``.grad`` until ``zero_grad``, and sums with them are infinite.
Here every rank warns once 256 passes were dropped: loops that accumulate fewer passes never get the warning, and loops
that accumulate more continue correctly.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from autopar.runtime.comm.groups import MeshGroups
from autopar.runtime.torch_internals.tensor_lists import each_norm, multiply_in_place

# The defaults of torch.amp.GradScaler.
FIRST, GROWTH, BACKOFF, INTERVAL = 2.0**16, 2.0, 0.5, 2000
# The number of dropped passes in a row after which to warn that nothing seems to consume gradients.
# Chosen: no loop accumulates gradients over as many passes.
_PATIENCE = 256
_REMEDY = (
    "step an optimizer also where the model has overflowed (it changes nothing), or call model.zero_grad() where you "
    "leave it out"
)


@dataclass
class LossScale:
    """See the module docstring. ``tracker``: the number of steps since the scale changed; ``overflowed``: whether a
    pass since gradients were last consumed overflowed; it stays set until the next pass after they are consumed. The
    same on every rank."""

    scale: float = FIRST
    growth_factor: float = GROWTH
    backoff_factor: float = BACKOFF
    growth_interval: int = INTERVAL
    tracker: int = 0
    overflowed: bool = False
    _adding: bool = field(default=False, repr=False)
    _dropped: int = field(default=0, repr=False)
    _guards: list[RemovableHandle] = field(default_factory=list, repr=False)

    def settle(self, gradients: Iterable[torch.Tensor], parameters: Iterable[nn.Parameter], groups: MeshGroups) -> bool:
        """Divides the local tensors ``gradients`` of one pass by the scale, in place. Returns whether they may be
        accumulated. If not, because an element of this or of an earlier pass is not finite on some rank of ``groups``,
        drops the gradients of ``parameters`` until :meth:`consumed`. Collective. Warns, on all ranks and once a step,
        if nothing seems to consume gradients."""
        if not self._adding:
            self._adding, self.overflowed, self._dropped = True, False, 0
        nonempty = [gradient for gradient in gradients if gradient.numel()]
        overflow = _overflow(nonempty, groups)
        if nonempty:
            multiply_in_place(nonempty, 1.0 / self.scale)
        if overflow and not self.overflowed:
            self.overflowed, self.scale, self.tracker = True, self.scale * self.backoff_factor, 0
        if self.overflowed:
            self._drop(list(parameters))
        return not self.overflowed

    def _drop(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            parameter.grad = None
        if not self._guards:  # Autograd may still add gradients of other passes.
            wanted = [parameter for parameter in parameters if parameter.requires_grad]
            self._guards = [p.register_post_accumulate_grad_hook(_without_gradient) for p in wanted]
        self._dropped += 1
        # All ranks have dropped the same number of passes, so if warnings are errors all of them raise.
        if self._dropped == _PATIENCE:
            warnings.warn(
                f"the gradients of {self._dropped} passes were dropped since one of them overflowed, as those of the "
                f"next are: no optimizer has stepped since. If so many are not meant to be added up, {_REMEDY}",
                stacklevel=2,
            )

    def consumed(self) -> None:
        """Called when gradients have been used or dropped: the next pass begins a new step."""
        for guard in self._guards:
            guard.remove()
        self._guards = []
        if self._adding and not self.overflowed:
            self.tracker += 1
            if self.tracker == self.growth_interval:
                self.scale, self.tracker = self.scale * self.growth_factor, 0
        self._adding = False

    def copied(self) -> LossScale:
        """A copy with the same state, without accumulated gradients."""
        scale = LossScale()
        scale.load(self.state())
        return scale

    def state(self) -> dict[str, float | int]:
        """The state in the form of :meth:`torch.amp.GradScaler.state_dict`."""
        return {
            "scale": self.scale,
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "_growth_tracker": self.tracker,
        }

    def load(self, state: Mapping[str, float | int]) -> None:
        """The inverse of :meth:`state`."""
        self.scale, self.growth_factor = float(state["scale"]), float(state["growth_factor"])
        self.backoff_factor, self.growth_interval = float(state["backoff_factor"]), int(state["growth_interval"])
        self.tracker = int(state["_growth_tracker"])


def _overflow(gradients: Sequence[torch.Tensor], groups: MeshGroups) -> bool:
    """Whether any element on any rank is infinite or nan, by the largest magnitude of each tensor."""
    everyone, device = groups.over(groups.axes), groups.device
    overflow = torch.zeros((), device=device)
    if gradients:
        largest = each_norm(gradients, float("inf"))
        overflow = (~torch.stack([size.to(device, torch.float32) for size in largest]).isfinite().all()).float()
    if everyone.group is not None:
        dist.all_reduce(overflow, dist.ReduceOp.MAX, group=everyone.group)
    return read_flag(overflow)


def read_flag(flag: torch.Tensor) -> bool:
    """The truth of ``flag``, for which a GPU is waited for: the only value that a step reads from it, as every step of
    torch.amp.GradScaler does. Whether ``.grad`` is None is known on the host."""
    return bool(flag)


def _without_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


def watch_optimizers(model: nn.Module, scale: LossScale) -> None:
    """From now on, a step of any torch optimizer with a parameter of ``model`` consumes its gradients. Uses torch's
    hook for all optimizers, since users create their own."""
    model_ref = weakref.ref(model)

    def stepped(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        watched = model_ref()
        own = set() if watched is None else set(map(id, watched.parameters()))
        if any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            scale.consumed()

    weakref.finalize(model, register_optimizer_step_post_hook(stepped).remove)


def watch_zero_grad(optimizer: torch.optim.Optimizer, scale: LossScale) -> None:
    """From now on, :meth:`zero_grad` of ``optimizer`` consumes gradients too, for loops that skip the step. Replaces
    the method of this object, as torch's learning-rate schedulers do with ``step``."""
    clear = optimizer.zero_grad

    def zero_grad(set_to_none: bool = True) -> None:
        clear(set_to_none)
        scale.consumed()

    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
