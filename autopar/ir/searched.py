"""What a search over divisions of the devices covered, as the plan records it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class TriedDivision:
    """What was looked at, as ``described``: its program was ``"solved"``, and its step takes ``seconds``; or proved
    that it takes ``"at least"`` so long; or these are ``"estimated"`` (docs/layouts.md, "Pipelines on many devices").
    ``divisions``: how many of those that count as solved its program covers, and none before it; 0 where only
    estimated."""

    described: str
    how: Literal["solved", "at least", "estimated"]
    seconds: float
    divisions: int = 0


@dataclass(frozen=True, slots=True)
class Searched:
    """The divisions of the devices into pipeline stages, data and tensor ranks, with the numbers of microbatches and of
    chunks a stage.

    Attributes:
        divisions: how many there are.
        indivisible: how many more there would be, if the batch divided so.
        solved: for how many the placement program was solved, or proved that it has nothing quicker than another plan.
        excluded: how many others cannot be quicker than the plan, by their bounds.
        bound: seconds that none of all divisions can beat, by these prices.
        first: of those that are neither solved nor excluded, the one that is bounded least; "" if there is none.
        first_bound: seconds that it takes at least.
        tried: what was solved, and what was only estimated, the quickest first. An estimate proves nothing, so what it
            is of counts as excluded or left.
    """

    divisions: int
    indivisible: int
    solved: int
    excluded: int
    bound: float
    first: str = ""
    first_bound: float = 0.0
    tried: tuple[TriedDivision, ...] = ()

    @property
    def left(self) -> int:
        """How many are neither solved nor excluded."""
        return self.divisions - self.solved - self.excluded

    def gap(self, seconds: float) -> float:
        """By how much less than ``seconds``, those of the plan, a division could take at most; a share of them."""
        return max(0.0, 1.0 - self.bound / seconds) if seconds > 0 else 0.0
