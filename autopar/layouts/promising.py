"""The quickest layouts of a space, found without solving placement programs that cannot have one of them.

Tensor ranks share the work of one rank at best. A layout takes at least as many seconds, and about as many bytes
(:data:`SPARE`), as if each of its tensor ranks had its share of the sections that there are without tensor ranks
(:func:`divided`): nothing is sent between them then, nothing computed twice, and no operation is less efficient for
being smaller. Without tensor ranks placements have no alternatives, so these bounds are quick to have. They ignore what
experts cost; for models with experts all programs are solved.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from autopar.errors import OptionsError
from autopar.layout import Layout
from autopar.layouts.sections.section import Seconds, Section, Sections

from .price import Priced, Quick, quick_price
from .space import RECOMPUTE, degrees_of
from .trials import SIMULATED, LayoutSearch

# By how much the bytes of a bound may exceed the limit. With a given limit a layout's bytes are those of the rank that
# is fullest with what fragmentation loses, which may be another rank than the bound's: in 2 of 4911 layouts of GPTs
# and Llamas the bound was higher then, by up to 1.2%.
SPARE = 1.02
# What a placement program is of: the number of tensor ranks, and the samples of a microbatch.
Program = tuple[int, int]


def divided(sections: Sections, ranks: int) -> Sections:
    """The sections with an equal share of their work for each of ``ranks``."""
    before, *layers, after = (_share(one, ranks) for one in (sections.before, *sections.layers, sections.after))
    return Sections(before, tuple(layers), after, sections.priced_as)


def _share(section: Section, ranks: int) -> Section:
    shares = dict[str, Any]()
    for name in (one.name for one in fields(section)):
        whole = getattr(section, name)
        if isinstance(whole, Seconds):
            shares[name] = Seconds(whole.compute / ranks)
        elif type(whole) is int:
            shares[name] = whole // ranks
    weights = tuple(replace(weight, elements=weight.elements // ranks) for weight in section.weights)
    return replace(section, **shares, weights=weights, accumulating=section.accumulating / ranks)


@dataclass
class PromisingLayouts:
    """A search on so many devices whose programs are solved as needed. ``solved``: the layouts of those that are."""

    search: LayoutSearch
    devices: int
    solved: dict[Program, list[Quick]] = field(default_factory=dict)
    _least: dict[Program, float] = field(default_factory=dict)

    @cached_property
    def layouts(self) -> dict[Program, list[Layout]]:
        """The layouts of each program."""
        layouts: dict[Program, list[Layout]] = {}
        for layout in self.search.candidates(self.devices):
            layouts.setdefault((layout.tensor, layout.microbatch), []).append(layout)
        return layouts

    @cached_property
    def bounds(self) -> dict[Program, list[Quick]]:
        """The layouts of each program, with what they take at least."""
        return {program: self._bounds(layouts) for program, layouts in self.layouts.items()}

    def _bounds(self, layouts: list[Layout]) -> list[Quick]:
        search, bounds, ranks = self.search, list[Quick](), layouts[0].tensor
        whole = replace(layouts[0], tensor=1, sequence_parallel=False)
        with suppress(OptionsError):
            shares = divided(search.model.sections(whole, search.cluster, search.batch), ranks)
            for layout in layouts:
                with suppress(OptionsError):
                    bounds.append(quick_price(shares, layout, search.batch, search.cluster))
        return bounds

    def least(self, program: Program) -> float:
        """The least bound of the layouts of a program that may fit."""
        if program not in self._least:
            self._least[program] = min((quick.seconds for quick in self._leanest(program)), default=math.inf)
        return self._least[program]

    def _leanest(self, program: Program) -> Iterable[Quick]:
        """Those of the layouts that may fit that recompute least of all that are alike otherwise: the quicker ones."""
        found: dict[object, Quick] = {}
        for quick in self.bounds[program]:
            if self.may_fit(quick):
                layout = quick.layout
                alike = layout.pipeline, layout.data, layout.interleave, layout.zero
                known = found.setdefault(alike, quick)
                if RECOMPUTE.index(layout.recompute) < RECOMPUTE.index(known.layout.recompute):
                    found[alike] = quick
        return found.values()

    def may_fit(self, quick: Quick) -> bool:
        """Whether a layout may fit, by its bound."""
        return quick.peak <= SPARE * (self.search.limit or quick.limit)

    def solve(self, program: Program) -> None:
        self.solved[program] = self.search.priced(self.layouts[program])

    @property
    def known(self) -> list[Quick]:
        """The layouts of programs that are solved."""
        return [quick for program in self.layouts for quick in self.solved.get(program, ())]

    def quickest(self, near: float) -> tuple[list[Quick], list[Priced]]:
        """All layouts, those of programs that are not solved with their bounds, and the quickest, as
        :meth:`LayoutSearch.quickest` has them. Layouts of the degrees of the quickest have bounds only if they take
        more than ``near`` times as long as the quickest with stages."""
        waiting = sorted(self.layouts, key=self.least) if not self.search.model.experts else []
        for program in self.layouts.keys() - set(waiting):
            self.solve(program)
        while waiting and self.least(waiting[0]) <= self._reach():
            self.solve(waiting.pop(0))
        priced = self.search.quickest(self.known)
        while waiting and self.least(waiting[0]) <= self._reached(priced):
            self.solve(waiting.pop(0))
            priced = self.search.quickest(self.known)
        for program in waiting:
            if self._is_near(program, priced, near):
                self.solve(program)
        bounded = (quick for program in self.layouts if program not in self.solved for quick in self.bounds[program])
        return [*self.known, *bounded], priced

    def _reach(self) -> float:
        """Seconds within which there are as many layouts that fit as are simulated."""
        seconds = sorted(quick.seconds for quick in self.known if self.search.fits(quick))
        return seconds[SIMULATED - 1] if len(seconds) >= SIMULATED else math.inf

    def _reached(self, priced: list[Priced]) -> float:
        """The bound of the last layout that was simulated: more than :meth:`_reach` if others did not fit after all."""
        simulated = {one.layout for one in priced}
        seconds = [quick.seconds for quick in self.known if quick.layout in simulated]
        return max(seconds) if len(seconds) >= SIMULATED else math.inf

    def _is_near(self, program: Program, priced: list[Priced], near: float) -> bool:
        staged = [one for one in priced if one.layout.pipeline > 1]
        degrees = {degrees_of(one.layout) for one in staged}
        limit = near * min((one.predicted.step_seconds for one in staged), default=0.0)
        return any(
            degrees_of(quick.layout) in degrees and self.may_fit(quick) and quick.seconds <= limit
            for quick in self.bounds[program]
        )
