"""The rounds of a search whose pipelines are within their limits by what their rehearsed stages hold.

That is less than what is counted of them, by up to half, and how much less depends on the placements. So what a program
may count is sought, as it is without stages (:mod:`autopar.planner.memory_limit`): first what the quickest pipeline
counts, less what it holds too much, then less until one fits, then more while that is quicker. Cuts may count as much
more than the limits of their ranks as the pipeline of the round before did. Before placements save memory, the quickest
are cut anew, which may be enough, and is all that helps where devices have unequal memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from autopar.errors import InfeasibleError
from autopar.planner.infeasible import check_host
from autopar.planner.memory_limit import MORE_ROUNDS, SPARE, Needed, ShortOfMemoryError, TooSlowError, next_limit
from autopar.planner.mesh_solution import MeshSolution

from .pipeline_solution import PipelineSolution
from .rehearsed_memory import INFINITE, Overfull, counted_beyond, peaks_of
from .rounds import LESS, MISSED, ROUNDS, UNCUT, Program, Round, Sought, quickest_of, too_full

# The share of its seconds that a limit may cost a pipeline without being worth another solve. Chosen: as Options.gap.
COSTS_LITTLE = 0.01


@dataclass(frozen=True)
class _State:
    """What some rounds led to: the best that was ``found``; ``free``: seconds of the quickest without limits;
    ``recut``: what fits of their placements in other cuts; ``beyond`` and ``within``: what programs count, and
    pipelines hold on the fullest rank, by device, of the last round that is to be made to fit and of the last that
    does; ``choices``: of the latter; ``worst``: how far what does not fit is from it at best; ``failed`` and
    ``fitted``: how many rounds did not fit, and did; ``is_last``: whether one was for schedules that just do not fit;
    ``has_retried``: whether one was after a program without solution."""

    found: PipelineSolution | None = None
    free: float = math.inf
    beyond: Needed | None = None
    within: Needed | None = None
    choices: tuple[bytes, ...] = ()
    worst: Overfull = INFINITE
    recut: PipelineSolution | None = None
    failed: int = 0
    fitted: int = 0
    is_last: bool = False
    has_retried: bool = False


Following = tuple[_State, Program | None]


def best_of_rehearsed(sought: Sought, slowest: float, quickest: tuple[MeshSolution, ...] | None) -> PipelineSolution:
    """The quickest pipeline that is found. ``slowest``: seconds of a program that is of no use; ``quickest``: the
    solutions of the program without limits, if they are known. Raises :class:`InfeasibleError`."""
    state, program = _after_free(sought, last := _free(sought, quickest))
    for _ in range(ROUNDS + MORE_ROUNDS):
        if program is None:
            break
        try:
            last = _round(sought, program, sought.solve(program, slowest))
        except ShortOfMemoryError:
            program = sought.as_fullest(program)
        except InfeasibleError as error:
            state, program = _after_infeasible(sought, state, program, error)
        else:
            state, program = _after(sought, replace(state, found=quickest_of(state.found, last.fits)), last)
    found = quickest_of(state.found, state.recut)
    if found is not None:
        return found
    check_host(last.solved[0].prices.cluster, last.host_bytes, sought.request.host_limit)
    raise too_full(sought.request, state.worst)


def _round(sought: Sought, program: Program, solved: tuple[MeshSolution, ...]) -> Round:
    return sought.round(program, solved, replace(sought.request, aims=program.aims), nearest=True)


def _free(sought: Sought, quickest: tuple[MeshSolution, ...] | None) -> Round:
    """The round without limits of memory."""
    program = replace(sought.first, limit=math.inf, aims=(math.inf,) * sought.request.layout.stages)
    return _round(sought, program, quickest or sought.solve(program))


def _after_free(sought: Sought, own: Round) -> Following:
    """After the round without limits, whose solution costs nothing but time: done if what fits is about as quick, as it
    is or in other cuts."""
    if not own.priced:
        return _State(), sought.first
    free = min(solution.seconds for solution in own.priced)
    if own.fits is not None:
        state = _State(own.fits, free)
        return (state, None) if free >= MISSED * own.fits.seconds else _too_much(sought, state, own)
    again, limits = _recut(sought, own), sought.request.limits
    worst = min((Overfull.of(solution, limits) for solution in again.priced), default=INFINITE)
    state = _State(free=free, recut=again.fits, worst=worst)
    if again.fits is not None and again.fits.seconds <= (1.0 + COSTS_LITTLE) * free:
        return state, None
    return _too_much(sought, state, own)


def _recut(sought: Sought, own: Round) -> Round:
    """A round with the same placements, cut so that ranks are expected to hold what they may. Other placements would
    not help where devices have unequal memory: all ranks have the same."""
    aims = _aims(sought, own)
    asked = replace(sought.request, aims=aims)
    return sought.round(replace(own.program, aims=aims), own.solved, asked, nearest=False)


def _after(sought: Sought, state: _State, own: Round) -> Following:
    """The program to solve after a round; none if there is none that promises more."""
    if own.fits is None and own.host_bytes > sought.request.host_limit:
        return state, sought.with_less_host(own)
    if not own.priced:
        return state, replace(own.program, limit=UNCUT * min(own.program.limit, sought.held(own.solved)))
    return _too_much(sought, state, own) if _leading(own) is not own.fits else _enough(sought, state, own)


def _leading(own: Round) -> PipelineSolution:
    """The pipeline of a round that those that follow are to make fit or to exceed: the quickest that fits, unless one
    that does not is much quicker; the nearest to it if there are several."""
    missed = [each for each in own.priced if own.fits is None or each.seconds < MISSED * own.fits.seconds]
    if own.fits is not None and not missed:
        return own.fits
    return min(missed, key=lambda solution: Overfull.of(solution, own.tried.request.limits))


def _too_much(sought: Sought, state: _State, own: Round) -> Following:
    """After a round whose leading pipeline does not fit: with less, if that promises more than what was found."""
    leading = _leading(own)
    worst = min(state.worst, Overfull.of(leading, sought.request.limits))
    state = replace(state, beyond=_needed(sought, own, sought.held(own.solved)), worst=worst)
    if state.found is not None and leading.seconds >= MISSED * state.found.seconds and state.within is None:
        return state, None
    return _aimed(sought, state, own)


def _enough(sought: Sought, state: _State, own: Round) -> Following:
    """After a round whose leading pipeline fits: with more, if that promises more."""
    choices = tuple(each.solution.choices.tobytes() for each in own.solved)
    if choices == state.choices:
        return state, None  # A still higher limit mostly has the same solution.
    # Nothing that the program counts within its limit is quicker.
    counted = own.program.limit if math.isfinite(own.program.limit) else sought.held(own.solved)
    state = replace(state, choices=choices, within=_needed(sought, own, counted), fitted=state.fitted + 1)
    assert state.found is not None
    seconds = MISSED * state.found.seconds
    share = None if state.is_last or state.free >= seconds else own.tried.fullness_of_quicker(seconds)
    if share is None:
        return _aimed(sought, state, own)
    limit = LESS * min(own.program.limit, sought.held(own.solved)) / share
    return replace(state, is_last=True), replace(own.program, limit=limit)


def _needed(sought: Sought, own: Round, counted: float) -> Needed:
    """The bytes that the program of a round has ``counted``, and what the fullest rank of its leading pipeline
    holds."""
    limits, devices = sought.request.limits, sought.devices
    over = max(held - limit for held, limit in zip(peaks_of(_leading(own)), limits, strict=True))
    return Needed(min(counted, own.program.limit) / devices, min(limits) + over)


def _aimed(sought: Sought, state: _State, own: Round) -> Following:
    """The program whose pipelines hold about as much as they may, as ``own`` shows; none if nothing is left that would
    make them quicker."""
    allowed = min(sought.request.limits)
    limit = next_limit(allowed, state.beyond, state.within)
    if state.within is not None:
        costs = state.found is not None and state.found.seconds > (1.0 + COSTS_LITTLE) * state.free
        if not costs or state.fitted > MORE_ROUNDS or limit - state.within.counted < SPARE * allowed:
            return state, None
    elif state.beyond is not None:
        limit, state = _lower(state, state.beyond, limit, allowed), replace(state, failed=state.failed + 1)
    return state, replace(own.program, limit=limit * sought.devices, aims=_aims(sought, own))


def _aims(sought: Sought, own: Round) -> tuple[float, ...]:
    """By rank, the bytes that a cut may count if it may count as much more than it holds as the leading pipeline."""
    more = counted_beyond(_leading(own))
    return tuple(limit + extra for limit, extra in zip(sought.request.limits, more, strict=True))


def _lower(state: _State, beyond: Needed, limit: float, allowed: float) -> float:
    """A limit to try while nothing fits. What is saved may be saved by other ranks than the fullest: then more and more
    is, but no more than in proportion to what it holds too much."""
    less = beyond.counted - 2.0**state.failed * (beyond.counted - limit)
    return min(limit, max(less, LESS * beyond.counted * allowed / beyond.peak))


def _after_infeasible(sought: Sought, state: _State, program: Program, error: InfeasibleError) -> Following:
    """After a program that has no solution: where less cannot be counted, as much may still be held."""
    if quickest_of(state.found, state.recut) is not None:
        return state, None
    if isinstance(error, TooSlowError):
        raise error
    if state.beyond is None or state.has_retried:  # What was priced is known to need less than the program counts.
        raise too_full(sought.request, state.worst) if math.isfinite(state.worst.share) else error
    counted = state.beyond.counted * sought.devices
    limit, least = (program.limit + counted) / 2, (error.needed_bytes or 0) * max(sought.request.layout.sizes)
    if limit <= least < counted:  # In which nothing is possible, or just placements that nobody wants.
        limit = (least + counted) / 2
    return replace(state, has_retried=True), replace(program, limit=limit)
