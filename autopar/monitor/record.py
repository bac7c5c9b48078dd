"""The figures of a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class StepRecord:
    """The figures of one step; what is not known is None.

    Attributes:
        step: the number of the step, from 0 on.
        loss: as given to :meth:`~autopar.monitor.Monitor.step`.
        seconds: since the step before, what the loop does between two steps included; the median rank's.
        predicted_seconds: what the plan says that a step takes.
        tokens_per_second: tokens (or samples, whatever is counted) of all ranks together.
        mfu: FLOPs of the model over what all devices could do in ``seconds``, by the plan's cluster.
        memory_bytes: the peak of the rank with most: allocated on a GPU, resident in a process on CPUs (with the
            libraries, some 0.5 GB).
        predicted_bytes: the peak that the plan says.
        gradient_norm: as given.
        loss_scale: of fp16.
        waiting_seconds: for each rank of the mesh, the part of ``seconds`` that it waited for others' messages; None
            where waits do not block the process (NCCL).
        first_of_run: True of the first record that a monitor writes: its ``seconds`` include planning and compiling.
        straggler: the rank that the others wait for, if they wait more than a tenth of the step longer than it.
    """

    step: int
    loss: float | None
    seconds: float
    predicted_seconds: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    memory_bytes: int | None = None
    predicted_bytes: int | None = None
    gradient_norm: float | None = None
    loss_scale: float | None = None
    waiting_seconds: tuple[float, ...] | None = None
    straggler: int | None = None
    first_of_run: bool | None = None

    def to_dict(self) -> dict[str, Any]:
        """The figures that are known, as JSON has them."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def scalars(self) -> Iterator[tuple[str, float]]:
        """Yields the figures that are single numbers, but the step."""
        for name, value in self.to_dict().items():
            if name not in ("step", "first_of_run") and isinstance(value, int | float):
                yield name, float(value)
