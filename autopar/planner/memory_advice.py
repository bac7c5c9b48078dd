"""Advice for models that do not fit, with and without stages: the texts, the options that follow them, and what the
searches for it may take."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autopar.options import Options
from autopar.plans.views.quantities import size

# What begins the list of changes in an error.
ADVICE = " What would lower it: "
LESS_STATE = "an optimizer with less state"
# How many pipelines or layouts, times operations of the graph, are searched for advice, within two bounds. Their number
# is fixed, so that every machine gives the same advice.
# Chosen, not measured.
EFFORT, LEAST_SEARCHES, MOST_SEARCHES = 4000, 3, 12
# From so many devices on, the fewest. Chosen: on 256, one for a GPT of two layers takes ten seconds.
MANY_DEVICES = 128
# A first guess of a limit in which a pipeline fits, relative to what the program of all stages together, or the first
# of them to fail, needs. Chosen: stages are not all as full.
FULLER = 1.2
# The least share of a time limit that is left for advice. Chosen, not measured.
LEAST_SHARE = 0.25


@dataclass
class AdviceBudget:
    """What all searches for what would fit may take together: so many ``searches``, each of which plans once, and, if
    the user limits time, CPU ``seconds`` from now on. ``skipped``: what was not searched for lack of these."""

    searches: int
    seconds: float = math.inf
    skipped: list[str] = field(default_factory=list)
    begun: float = field(default_factory=time.process_time)

    @staticmethod
    def of(options: Options, nodes: int, devices: int, spent: float) -> AdviceBudget:
        """The budget for a graph of so many ``nodes``; ``spent``: seconds of the time limit that planning took."""
        most = LEAST_SEARCHES if devices >= MANY_DEVICES else MOST_SEARCHES
        searches = max(LEAST_SEARCHES, min(EFFORT // max(nodes, 1), most))
        limit = options.time_limit
        return AdviceBudget(searches, math.inf if limit is None else max(limit - spent, LEAST_SHARE * limit))

    @property
    def is_spent(self) -> bool:
        return self.searches <= 0 or time.process_time() - self.begun >= self.seconds

    def allows(self, what: str, leaving: int = 0) -> bool:
        """Whether another search may begin, which is counted, ``leaving`` so many for others; if none may, ``what`` is
        noted as not searched."""
        if self.is_spent or self.searches <= leaving:
            self.skipped += [what] if what not in self.skipped else []
            return False
        self.searches -= 1
        return True

    @property
    def remark(self) -> str:
        """What was not searched, as a sentence; empty if everything was."""
        return f" Not searched, for lack of time: {', '.join(self.skipped)}." if self.skipped else ""


@dataclass(frozen=True)
class Advice:
    """A change, as ``text``, and the ``bytes`` per device that it leads to, if they are known."""

    text: str
    bytes: float | None
    is_estimate: bool = False
    condition: str = ""

    def __str__(self) -> str:
        if self.bytes is None:
            return self.text
        return f"{self.text} (to {'about ' * self.is_estimate}{size(self.bytes)}{self.condition})"


def listed(advice: Sequence[Advice]) -> str:
    return "; ".join(map(str, advice))


def single_change(advice: Sequence[Advice], limit: float) -> str:
    """Which of some changes fits by itself: a sentence."""
    enough = [each.text for each in advice if each.bytes is not None and each.bytes <= limit]
    if not enough:
        return "By itself none of these is known to be enough, only the larger limit."
    return f"By itself {' or '.join(enough)} is enough{', by this estimate' if _are_estimates(advice, limit) else ''}."


def _are_estimates(advice: Sequence[Advice], limit: float) -> bool:
    return any(each.is_estimate for each in advice if each.bytes is not None and each.bytes <= limit)


def recompute_more(options: Options) -> tuple[str, Options]:
    """The advice to recompute, and ``options`` that follow it."""
    return "recompute=None or 'full'", replace(options, recompute=None)


def offload_more(options: Options) -> tuple[str, Options]:
    """The advice to offload, and ``options`` that follow it."""
    return "offload=None or True", replace(options, offload=None)


def twice_the_devices(least: float) -> Advice:
    """The advice to use more devices. ``least``: bytes per device that are enough with the present ones."""
    return Advice("twice the devices", least / 2, is_estimate=True, condition=" if all divides")
