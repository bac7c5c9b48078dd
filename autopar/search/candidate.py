"""What the search for a plan tried: candidates that it solved, but did not write as plans yet, and what it excluded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from autopar.errors import InfeasibleError
from autopar.ir.assignment import Assignment
from autopar.ir.graph import Graph
from autopar.ir.plan_record import Predicted
from autopar.ir.searched import TriedDivision
from autopar.layout import Layout
from autopar.placement.axis_names import default_names
from autopar.planner.memory_limit import TooSlowError
from autopar.planner.request import PlanRequest
from autopar.planner.roles.axis_roles import role_names
from autopar.plans.plan import Plan
from autopar.plans.views.quantities import duration, size

from .division_bounds import Division, division_of
from .stage_meshes import StageLayout

# Kinds of plans that people ask for.
NO_STAGES, STAGES, RULE = "no stages", "pipeline stages", "rule of thumb"


@dataclass(frozen=True)
class Candidate:
    """A solved candidate that takes ``seconds`` a step.

    ``make`` writes its plan; ``figures`` gives its name and predictions. Of the candidates of one ``layout`` (None:
    without stages) only the quickest is listed with the plan. ``baselines`` were priced with it. ``improved``, for
    pipelines, solves a schedule for it and returns the improved candidate. ``microbatches``: how many a step has.
    ``divisions``: those that its program covers. ``lacks_memory``: whether it is known that it would be quicker with
    more memory."""

    seconds: float
    layout: StageLayout | None
    make: Callable[[], Plan]
    figures: Callable[[], tuple[str, Predicted]]
    baselines: Mapping[str, Predicted | None] = field(default_factory=dict)
    improved: Callable[[], Candidate] | None = None
    microbatches: int = 1
    divisions: frozenset[Division] = frozenset()
    lacks_memory: bool = False


@dataclass(frozen=True)
class Excluded:
    """Plans of a ``kind`` of which none fits, or none is quick enough, as ``error`` says. ``baselines`` were priced on
    their mesh, whose program covers ``divisions``. ``layout``: what of a kind they are, if there are others."""

    kind: str
    error: InfeasibleError
    baselines: Mapping[str, Predicted | None] = field(default_factory=dict)
    divisions: frozenset[Division] = frozenset()
    layout: str = ""

    @property
    def name(self) -> str:
        return f"{self.kind}: {self.layout}" if self.layout else self.kind


@dataclass(frozen=True)
class Failure:
    """Why there is no plan: ``error``. ``explain``: for pipelines, makes the error that a user is shown, which takes a
    search for what would be possible."""

    error: Exception
    explain: Callable[[], Exception] | None = None


@dataclass(frozen=True)
class Tried:
    """What a search tried. ``rule``: of the candidates, the one that a rule of thumb chooses. ``failures``: of what has
    no candidate. ``estimated``: seconds of the divisions that have an estimate, by their layouts."""

    candidates: tuple[Candidate, ...] = ()
    excluded: tuple[Excluded, ...] = ()
    failures: tuple[Failure, ...] = ()
    rule: Candidate | None = None
    estimated: Mapping[Layout, float] = field(default_factory=dict)

    def __add__(self, other: Tried) -> Tried:
        return Tried(
            self.candidates + other.candidates,
            self.excluded + other.excluded,
            self.failures + other.failures,
            self.rule or other.rule,
            {**self.estimated, **other.estimated},
        )

    @property
    def least(self) -> float:
        """Seconds of the quickest candidate."""
        return min((candidate.seconds for candidate in self.candidates), default=math.inf)

    @property
    def lacks_memory(self) -> bool:
        """Whether the quickest candidate would be quicker with more memory."""
        quickest = min(self.candidates, key=lambda candidate: candidate.seconds, default=None)
        return quickest is not None and quickest.lacks_memory


@dataclass(frozen=True)
class Staged:
    """What a search for pipelines (and gradient accumulation) found: its ``candidates``; those that quick prices
    ``exclude``; of each layout the first that was ``losing``, expected to be too slow; and why others were impossible:
    of those that do not fit, that which needs fewest bytes. That ``failure`` is an error for the user only if nothing
    else was found. ``settled``: layouts with numbers of microbatches that need not be tried again to find what takes at
    most so many seconds."""

    candidates: tuple[Candidate, ...] = ()
    excluded: tuple[Excluded, ...] = ()
    losing: Mapping[StageLayout, Excluded] = field(default_factory=dict)
    failure: Failure | None = None
    settled: Mapping[tuple[StageLayout, int], float] = field(default_factory=dict)

    def __add__(self, later: Staged) -> Staged:
        failure = self.failure if later.failure is None else _nearer(later.failure, self.failure)
        return Staged(
            self.candidates + later.candidates,
            self.excluded + later.excluded,
            {**later.losing, **self.losing},
            failure,
            {**self.settled, **later.settled},
        )

    @property
    def tried(self) -> Tried:
        winning = {candidate.layout for candidate in self.candidates}
        losing = (each for layout, each in self.losing.items() if layout not in winning)
        return Tried(self.candidates, (*self.excluded, *losing))

    def without_quicker_losers(self, seconds: float) -> Staged:
        """Without what was expected to take less than ``seconds``, but lost to seconds that no plan has in the end."""
        kept = {layout: each for layout, each in self.losing.items() if _least(each) >= seconds}
        return replace(self, losing=kept) if math.isfinite(seconds) else self

    @property
    def least(self) -> float:
        """Seconds of the quickest candidate."""
        return self.tried.least


def _least(excluded: Excluded) -> float:
    """Seconds that what is ``excluded`` as too slow is expected to take; infinite if it does not fit."""
    return excluded.error.seconds if isinstance(excluded.error, TooSlowError) else math.inf


def _nearer(last: Failure, before: Failure | None) -> Failure:
    """Which of two failures explains why nothing was found: the later one, but of pipelines that do not fit that which
    is known to need fewest bytes."""
    errors = [each.error for each in (last, before) if each is not None]
    needs = [needed(error) if isinstance(error, InfeasibleError) else math.inf for error in errors]
    return before if before is not None and needs[1] < needs[0] < math.inf else last


def keep_shown(tried: Tried) -> None:
    """Drops what explains the errors of ``tried``, but of the one that would be shown, if there is no candidate: that
    of the plan that needs fewest bytes."""
    errors = [failure.error for failure in tried.failures if failure.explain is None]
    infeasible = [error for error in errors if isinstance(error, InfeasibleError)]
    least = None if tried.candidates else min(infeasible, key=needed, default=None)
    for error in (*infeasible, *(excluded.error for excluded in tried.excluded)):
        if error is not least:
            error.without_explanation()


def needed(error: InfeasibleError) -> float:
    """Bytes that were found to be enough; infinite if none were."""
    return error.needed_bytes or math.inf


def also_priced(tried: Tried, best: Candidate) -> dict[str, Predicted | None]:
    """The alternatives that were priced, by name: the baselines on the best mesh without stages, the quickest
    candidate of every other layout of the devices, and what a rule of thumb chooses."""
    quickest: dict[StageLayout | None, Candidate] = {}
    for candidate in sorted(tried.candidates, key=lambda candidate: candidate.seconds):
        quickest.setdefault(candidate.layout, candidate)
    listed: dict[str, Predicted | None] = {}
    for excluded in tried.excluded:
        for name, priced in excluded.baselines.items():
            listed[name] = _quicker(listed.get(name), priced)
    listed |= {name: priced for candidate in quickest.values() for name, priced in candidate.baselines.items()}
    others = [candidate for candidate in quickest.values() if candidate.layout != best.layout]
    listed.update(candidate.figures() for candidate in others if candidate is not tried.rule)
    if tried.rule is not None:
        name, figures = tried.rule.figures()
        listed[f"{RULE}: {name}"] = figures
    return listed


def _quicker(one: Predicted | None, other: Predicted | None) -> Predicted | None:
    """The quicker of two plans; None is one that is not possible."""
    possible = [plan for plan in (one, other) if plan is not None]
    return min(possible, key=lambda plan: plan.step_seconds, default=None)


def why_excluded(tried: Tried, limit: int) -> dict[str, str]:
    """Why no plan of a kind was priced, for every kind of which there is none. ``limit``: bytes for each device."""
    # A whole step in microbatches has no stages either.
    found = {NO_STAGES for each in tried.candidates if each.layout is None or each.layout.stages == 1}
    found |= {RULE} if tried.rule is not None else set()
    reasons: dict[str, list[InfeasibleError]] = {}
    for excluded in tried.excluded:
        if excluded.kind not in found:
            reasons.setdefault(excluded.name, []).append(excluded.error)
    return {kind: _reason(errors, limit) for kind, errors in reasons.items()}


def tried_divisions(tried: Tried, batch: int) -> Iterator[tuple[TriedDivision, frozenset[Division]]]:
    """What was solved, by name, what its program excluded, and what was estimated and not solved; each with the
    divisions that its program covers."""
    solved: dict[str, tuple[float, frozenset[Division]]] = {}
    for candidate in tried.candidates:
        name = candidate.figures()[0]
        seconds, covered = solved.get(name, (math.inf, frozenset()))
        solved[name] = min(candidate.seconds, seconds), covered | candidate.divisions
    yield from ((TriedDivision(name, "solved", seconds), covered) for name, (seconds, covered) in solved.items())
    for excluded in tried.excluded:
        if excluded.divisions and isinstance(excluded.error, TooSlowError):
            yield TriedDivision(excluded.name, "at least", excluded.error.seconds), excluded.divisions
    every = frozenset().union(*(covered for _, covered in solved.values()))
    for layout, seconds in tried.estimated.items():
        if division_of(layout, batch) not in every:
            yield TriedDivision(str(layout), "estimated", seconds), frozenset()


def _reason(errors: list[InfeasibleError], limit: int) -> str:
    """What ``errors``, of all meshes, have in common."""
    slow = [error for error in errors if isinstance(error, TooSlowError)]
    if slow:
        # The least of several is no more than an estimate of what they take at least.
        how = {each.how for each in slow}
        return f"{how.pop() if len(how) == 1 else 'at least about'} {duration(min(e.seconds for e in slow))}"
    needed = [error.needed_bytes for error in errors if error.needed_bytes is not None]
    return f"does not fit: {size(min(needed))} of {size(limit)}" if needed else "does not fit"


def named_axes(request: PlanRequest, assignment: Assignment, graph: Graph) -> str:
    """The mesh as text: ``(dp=2, tp=2)``."""
    names = request.axis_names or role_names(request.roles, default_names(request.mesh, assignment, graph))
    return f"({', '.join(f'{name}={n}' for name, n in zip(names, request.mesh, strict=True))})"
