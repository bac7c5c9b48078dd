"""The scale of the loss under fp16: gradients below 6e-8 would be zero, so those of a multiple of it are computed.

The factor follows the rule of :class:`torch.amp.GradScaler`: halved by a step whose gradients overflow, doubled after
``growth_interval`` steps in a row that did not. Users see gradients of the loss itself: they are divided by the scale
as soon as they are reduced, before they are added to ``.grad``.

Gradients may be added up over several passes until an optimizer consumes them. If one of these passes overflows on any
rank, the sum would lack a part, so there is no sum on any rank: what was added up before is dropped, and so is whatever
arrives until an optimizer has stepped or ``zero_grad`` was called, of the model or of an optimizer that it made. (That
of another optimizer cannot be told: one made by hand is to step also where the model has overflowed.) ``.grad`` is None
meanwhile, so that an optimizer of any class skips its step, its state untouched, and so does clipping. All passes up to
there count as one step.

A loop that leaves out both after an overflow never trains again. Nor does it with :class:`torch.amp.GradScaler`, whose
``step`` is called in any case: infinite gradients stay in ``.grad`` until ``zero_grad``, and whatever is added to them
is infinite. Here it is told, by a warning on every rank alike, once 256 passes were dropped: a loop that adds up fewer
never is, whatever it asks, and one that adds up more goes on as it should.
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
# Passes in a row whose gradients are dropped before that is called odd, nobody seeming to consume gradients.
# Chosen: no loop accumulates gradients over as many passes.
_PATIENCE = 256
_REMEDY = (
    "step an optimizer also where the model has overflowed (it changes nothing), or call model.zero_grad() where you "
    "leave it out"
)


@dataclass
class LossScale:
    """See the module docstring. ``tracker`` counts steps since the scale changed; ``overflowed`` tells of the passes
    since gradients were last consumed, and keeps telling until the next pass after they are. The same on every rank."""

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
        """Divides the local tensors ``gradients`` of one pass by the scale, in place; whether they may be added up. If
        not, since an element of these or of an earlier pass is not finite on some rank of ``groups``, ``parameters``
        have no gradients, and get none until :meth:`consumed`. Collective. Warns, on all ranks and once a step, if
        nobody seems to consume gradients."""
        if not self._adding:
            self._adding, self.overflowed, self._dropped = True, False, 0
        given = [gradient for gradient in gradients if gradient.numel()]
        overflow = _overflow(given, groups)
        if given:
            multiply_in_place(given, 1.0 / self.scale)
        if overflow and not self.overflowed:
            self.overflowed, self.scale, self.tracker = True, self.scale * self.backoff_factor, 0
        if self.overflowed:
            self._drop(list(parameters))
        return not self.overflowed

    def _drop(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            parameter.grad = None
        if not self._guards:  # Autograd may still be holding what other passes gave.
            wanted = [parameter for parameter in parameters if parameter.requires_grad]
            self._guards = [p.register_post_accumulate_grad_hook(_without_gradient) for p in wanted]
        self._dropped += 1
        # How many passes were dropped is the same on every rank: where a warning is an error, no rank is left waiting.
        if self._dropped == _PATIENCE:
            warnings.warn(
                f"the gradients of {self._dropped} passes were dropped since one of them overflowed, as those of the "
                f"next are: no optimizer has stepped since. If so many are not meant to be added up, {_REMEDY}",
                stacklevel=2,
            )

    def consumed(self) -> None:
        """Gradients have been used, or thrown away: what comes next is another step."""
        for guard in self._guards:
            guard.remove()
        self._guards = []
        if self._adding and not self.overflowed:
            self.tracker += 1
            if self.tracker == self.growth_interval:
                self.scale, self.tracker = self.scale * self.growth_factor, 0
        self._adding = False

    def copied(self) -> LossScale:
        """Another of the same state, which no gradients have been added up with."""
        made = LossScale()
        made.load(self.state())
        return made

    def state(self) -> dict[str, float | int]:
        """In the form of :meth:`torch.amp.GradScaler.state_dict`."""
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
    """Whether any element is infinite or no number, anywhere. The largest magnitude of each tensor tells."""
    everyone, device = groups.over(groups.axes), groups.device
    found = torch.zeros((), device=device)
    if gradients:
        largest = each_norm(gradients, float("inf"))
        found = (~torch.stack([size.to(device, torch.float32) for size in largest]).isfinite().all()).float()
    if everyone.group is not None:
        dist.all_reduce(found, dist.ReduceOp.MAX, group=everyone.group)
    return bool(found)


def _without_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


def watch_optimizers(model: nn.Module, scale: LossScale) -> None:
    """From now on, a step of any torch optimizer that has a parameter of ``model`` consumes its gradients. Such a step
    is told by torch's hook for all optimizers, since users make their own."""
    known = weakref.ref(model)

    def stepped(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        watched = known()
        own = set() if watched is None else set(map(id, watched.parameters()))
        if any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            scale.consumed()

    weakref.finalize(model, register_optimizer_step_post_hook(stepped).remove)


def watch_zero_grad(optimizer: torch.optim.Optimizer, scale: LossScale) -> None:
    """From now on, :meth:`zero_grad` of ``optimizer`` consumes gradients too, as who leaves out the step would have it.
    Of one object, as torch's learning-rate schedulers do it to ``step``."""
    clear = optimizer.zero_grad

    def zero_grad(set_to_none: bool = True) -> None:
        clear(set_to_none)
        scale.consumed()

    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
