"""State of a parallel module beside its ``state_dict``: random numbers and the scale of the loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

import torch

from autopar.runtime.comm.groups import MeshGroups
from autopar.runtime.execute.randomness import RandomState
from autopar.runtime.state.loss_scale import LossScale
from autopar.runtime.state.parameters import broadcast_first


class CarriedState:
    """A mixin of :class:`~.parallel_module.ParallelModule`, whose attributes it uses."""

    _groups: MeshGroups
    _random: RandomState
    _loss_scale: LossScale | None

    def random_state(self) -> dict[str, int]:
        """The state that determines the random numbers of the model's next call: the ``seed``, the number of training
        calls (``steps``) and of all other calls (``evaluations``), counting only calls that draw. Save it in a
        checkpoint with the ``state_dict``, which has the keys of the original."""
        return asdict(self._random)

    def set_random_state(self, state: Mapping[str, int]) -> None:
        """Restores a state of :meth:`random_state`; rank 0's ``state`` is used. Collective."""
        restored = RandomState(**state)
        values = [torch.tensor([restored.seed, restored.steps, restored.evaluations], device="cpu")]
        self._random.seed, self._random.steps, self._random.evaluations = next(broadcast_first(values, self._groups))[
            1
        ].tolist()

    @property
    def overflowed(self) -> bool:
        """Whether gradients overflowed under fp16 in one of the passes whose gradients are accumulated, so that there
        are none: an optimizer that steps now does nothing. The same on every rank.

        It holds until the first pass after an optimizer's step, or until ``zero_grad`` is called, of the model or of an
        optimizer made by :meth:`optimizer`. A loop that does not step the optimizer after an overflow, to retry the
        batch or to go on to the next, must call ``zero_grad``: until then all passes count as one step, whose gradients
        stay dropped. A warning says so after 256 passes."""
        return self._loss_scale is not None and self._loss_scale.overflowed

    def loss_scale_state(self) -> dict[str, float | int]:
        """The scale of the loss under fp16, in the form of :meth:`torch.amp.GradScaler.state_dict`; empty under other
        policies. Save it in a checkpoint with the ``state_dict``."""
        return {} if self._loss_scale is None else self._loss_scale.state()

    def set_loss_scale_state(self, state: Mapping[str, float | int]) -> None:
        """Restores a state of :meth:`loss_scale_state` or of a :class:`torch.amp.GradScaler`; rank 0's ``state`` is
        used. No effect if it is empty, or if the loss is not scaled. Collective."""
        if self._loss_scale is None:
            return
        own = self._loss_scale.state()
        values = torch.tensor([float({**own, **state}[key]) for key in own], dtype=torch.float64, device="cpu")
        self._loss_scale.load(dict(zip(own, next(broadcast_first([values], self._groups))[1].tolist(), strict=True)))
