"""What is shown of priced plans: a row of figures each, and for a layout the plan that it restricts the search to."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.plan_record import Predicted
from autopar.layout import Layout
from autopar.plans.plan import Plan
from autopar.plans.views.quantities import duration, size

from .figures import bubble_of


@dataclass(frozen=True)
class Row:
    """A plan in a table: what it is, and its figures; ``needed_bytes`` as of :class:`Priced`."""

    described: str
    predicted: Predicted
    memory_limit: int
    notes: tuple[str, ...] = ()
    needed_bytes: int | None = None

    @property
    def excess_bytes(self) -> int:
        """Bytes by which the fullest device exceeds the limit (that of the smallest device, where these differ);
        negative: bytes left free. Of what does not fit, by the smallest plan of its kind that is known: an upper bound,
        and where only the quickest is known (``needed_bytes`` is None), one that may be far too high."""
        peak = self.predicted.peak_bytes
        return min(self.needed_bytes or peak, peak) - self.memory_limit

    @property
    def fits(self) -> bool:
        return self.excess_bytes <= 0


@dataclass(frozen=True)
class Priced:
    """What :func:`autopar.price` found.

    Attributes:
        plan: the plan of the layout; of one that does not fit, the quickest one whatever memory it takes.
        layout: with every field given.
        memory_limit: bytes that a device may use.
        flops_per_second: FLOP/s of the model per device.
        notes: what was assumed because the cluster's description omits it, and the plan's warnings.
        needed_bytes: of a layout that does not fit, what the fullest device holds under the smallest plan of it that is
            known; None if none is known but ``plan``.
    """

    plan: Plan
    layout: Layout
    memory_limit: int
    flops_per_second: float
    notes: tuple[str, ...] = ()
    needed_bytes: int | None = None

    @property
    def predicted(self) -> Predicted:
        """What the plan predicts of a step."""
        return self.plan.predicted

    @property
    def batch(self) -> int:
        """Samples of a step."""
        return self.plan.batch

    @property
    def cluster(self) -> str:
        """The name of the hardware."""
        return self.plan.cluster

    @property
    def row(self) -> Row:
        """The layout in a table."""
        return Row(str(self.layout), self.predicted, self.memory_limit, self.notes, self.needed_bytes)

    @property
    def excess_bytes(self) -> int:
        """As of :class:`Row`: bytes by which it does not fit at most, or, if negative, that are left free."""
        return self.row.excess_bytes

    @property
    def fits(self) -> bool:
        return self.row.fits

    def __str__(self) -> str:
        """The layout, its step and its memory; ``print(priced.plan)`` has the whole plan."""
        predicted, tera = self.predicted, self.flops_per_second / 1e12
        excess = f"{self.excess_bytes} bytes ({size(self.excess_bytes)}) too many"
        if self.needed_bytes is None:
            fits = "fits" if self.fits else f"does not fit: at most {excess}"
        else:
            fits = f"does not fit: the smallest plan found needs {size(self.needed_bytes)}, {excess}"
        return "\n".join(
            (
                f"{self.layout}",
                f"on {self.layout.devices} devices of {self.cluster}, batch {self.batch}, {self.layout.precision}",
                f"step {duration(predicted.step_seconds)}   {tera:.3g} TFLOP/s per device, MFU {predicted.mfu:.1%}   "
                f"communication {duration(predicted.comm_seconds)}, bubble {duration(bubble_of(predicted))}",
                f"peak {size(predicted.peak_bytes)} of {size(self.memory_limit)} per device: {fits}",
                *(f"! {' '.join(note.split())}" for note in self.notes),
                "print(priced.plan) shows the plan",
            )
        )
