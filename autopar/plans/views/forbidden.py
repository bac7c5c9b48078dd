"""What a plan becomes when one of its choices is forbidden, beside the plan."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from .page_width import page_width
from .quantities import duration, signed_duration, signed_size


@dataclass(frozen=True)
class Forbidden:
    """The plan solved again without a choice: ``choice`` in the ``together`` places that chose alike, ``instead``
    chosen then, and how many ``seconds`` a step and ``bytes`` at its peak change. ``error`` says why there is no such
    plan, and is empty where there is one.
    """

    choice: str
    together: int
    instead: str = ""
    seconds: float = 0.0
    bytes: int = 0
    error: str = ""

    def lines(self, step_seconds: float) -> Iterator[str]:
        """The lines of an explanation; ``step_seconds`` are those of the plan."""
        where = f" in all {self.together} layers" if self.together > 1 else ""
        if self.error:
            text = f"solved again, {self.choice} forbidden{where}: no plan. {self.error}"
        else:
            relative = f", {self.seconds / step_seconds:+.1%}" if step_seconds else ""
            memory = f", memory {signed_size(self.bytes)}" if self.bytes else ""
            text = (
                f"solved again, {self.choice} forbidden{where}: {signed_duration(self.seconds)}{relative}{memory}, "
                f"with {self.instead} (a step of {duration(step_seconds + self.seconds)})"
            )
        yield from textwrap.wrap(text, page_width() - 4, subsequent_indent="  ")
