"""How replicas of a plan stay together, as the plan records it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PlannedSync:
    """The exchange between ``replicas`` of the model, each of which runs the plan. It is not part of the plan's step.

    Attributes:
        method: the text of ``Options(sync=...)``.
        every: optimizer steps in which each parameter is exchanged once.
        bytes: that a rank sends in these steps, on average over the ranks of a replica.
        seconds: that these exchanges take, if nothing else is sent.
        hidden: whether steps go on meanwhile.
        gradient_seconds: that the sum of the gradients over replicas would take, which ``"every-step"`` sends at each
            step over the same links.
    """

    method: str
    replicas: int
    every: int
    bytes: int
    seconds: float
    hidden: bool
    gradient_seconds: float

    @property
    def bytes_per_step(self) -> float:
        return self.bytes / self.every

    @property
    def seconds_per_step(self) -> float:
        return self.seconds / self.every
