"""How often a step runs a graph, and how many of its runs hold their saved values at once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Repeats:
    """A step runs the graph once for each of ``microbatches``; gradients are added up, reduced once, and the optimizer
    steps once. At most ``in_flight`` microbatches have run forward and not yet backward: each holds its saved values.
    With more than one microbatch (``accumulates``) a gradient is held as backward makes it until it is reduced.
    ``stages`` divide the graph among them."""

    microbatches: int = 1
    in_flight: int = 1
    accumulates: bool = False
    stages: int = 1

    def copies_of(self, placeholder: str) -> int:
        """How many microbatches' parts of a placeholder of this operation rest on the device: all of a cache."""
        return self.microbatches if placeholder == "cache" else 1


ONCE = Repeats()
