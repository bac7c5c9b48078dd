"""The scale of the loss under fp16: gradients below 6e-8 would be zero, so those of a multiple of it are computed.

The factor follows the rule of :class:`torch.amp.GradScaler`: halved by a step whose gradients overflow, doubled after
``growth_interval`` steps in a row that did not. Users see gradients of the loss itself: they are divided by the scale
as soon as they are reduced, before they are added to ``.grad``. A step that overflowed on any rank leaves no gradients
on any (``.grad`` is None, also of what was added up before), so that an optimizer of any class skips its step, its
state untouched, and so does clipping.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from .groups import MeshGroups

FIRST, GROWTH, BACKOFF, INTERVAL = 2.0**16, 2.0, 0.5, 2000


@dataclass
class LossScale:
    """See the module docstring. ``tracker`` counts steps since the scale changed; ``overflowed`` tells of the latest
    step. The same on every rank."""

    scale: float = FIRST
    growth_factor: float = GROWTH
    backoff_factor: float = BACKOFF
    growth_interval: int = INTERVAL
    tracker: int = 0
    overflowed: bool = False

    def settle(self, gradients: Iterable[torch.Tensor], groups: MeshGroups) -> bool:
        """Divides the local tensors ``gradients`` by the scale, in place, and moves the scale on; whether all elements
        are finite on every rank of ``groups``. Collective."""
        given = [gradient for gradient in gradients if gradient.numel()]
        self.overflowed = _overflow(given, groups)
        if given and not self.overflowed:
            torch._foreach_mul_(given, 1.0 / self.scale)
        self._move_on()
        return not self.overflowed

    def _move_on(self) -> None:
        if self.overflowed:
            self.scale, self.tracker = self.scale * self.backoff_factor, 0
            return
        self.tracker += 1
        if self.tracker == self.growth_interval:
            self.scale, self.tracker = self.scale * self.growth_factor, 0

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
        largest = torch._foreach_norm(list(gradients), float("inf"))
        found = (~torch.stack([size.to(device, torch.float32) for size in largest]).isfinite().all()).float()
    if everyone.group is not None:
        dist.all_reduce(found, dist.ReduceOp.MAX, group=everyone.group)
    return bool(found)


def drop_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Leaves no gradients, those of earlier passes included."""
    for parameter in parameters:
        parameter.grad = None
