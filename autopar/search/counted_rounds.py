"""The rounds of a search whose pipelines are within their limits by what is counted of them: those that take too long
to rehearse, or have unequal stages, and steps without stages, of which whole ones are measured. (Pipelines that count
near their limits are rehearsed nevertheless, and must hold no more.)

The memory of the uncut graph is taken as that of all stages together. If a stage turns out too full, the program is
solved again with less memory, a few times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from autopar.errors import InfeasibleError
from autopar.planner.infeasible import check_host
from autopar.planner.memory_limit import ShortOfMemoryError
from autopar.planner.steps.exact_memory import is_rehearsed

from .pipeline_solution import PipelineSolution
from .rehearsed_memory import INFINITE, Overfull
from .rounds import LESS, MISSED, ROUNDS, UNCUT, Program, Round, Sought, quickest_of, too_full, without_limits


@dataclass(frozen=True)
class _State:
    """What some rounds led to: the ``program`` to solve next, None if none promises more; the best that was ``found``;
    how far what does not fit is from it at best (``worst``); whether the program of the ``last`` round was the one for
    schedules that just do not fit."""

    program: Program | None
    found: PipelineSolution | None = None
    worst: Overfull = INFINITE
    is_last: bool = False


def best_of_counted(sought: Sought, slowest: float) -> PipelineSolution:
    """The quickest pipeline that is found. ``slowest``: seconds of a program that is of no use. Raises
    :class:`InfeasibleError`."""
    state, last = _State(sought.first), None
    for _ in range(ROUNDS):
        if state.program is None:
            break
        try:
            last = _round(sought, state.program, slowest)
        except ShortOfMemoryError:
            state = replace(state, program=sought.as_fullest(state.program))
        except InfeasibleError:
            if state.found is None:
                raise
            break
        else:
            state = _after(sought, state, last)
    if state.found is not None:
        return state.found
    if last is not None:
        check_host(last.solved[0].prices.cluster, last.host_bytes, sought.request.host_limit)
    raise too_full(sought.request, state.worst)


def _round(sought: Sought, program: Program, slowest: float) -> Round:
    request, solved = sought.request, sought.solve(program, slowest)
    # What a whole step holds is measured: what is counted rules out nothing.
    is_whole = request.layout.stages == 1 and is_rehearsed(solved[0].instance)
    # How much is too much matters in the last rounds alone.
    nearest = program.repeats == sought.in_flight(fullest=True)
    return sought.round(program, solved, without_limits(request) if is_whole else request, nearest)


def _after(sought: Sought, state: _State, own: Round) -> _State:
    request, program = sought.request, sought.as_fullest(own.program)
    found = quickest_of(state.found, own.fits)
    if found is not None:
        return _quicker(sought, replace(state, program=program, found=found), own)
    if own.host_bytes > request.host_limit:
        return replace(state, program=sought.as_fullest(sought.with_less_host(own)))
    worst = min([state.worst, *(Overfull.of(solution, request.limits) for solution in own.priced)])
    if own.program.repeats == program.repeats:  # Otherwise memory binds: the first stage decides, which has most.
        # Less than this solution has, lest it be found again.
        share = LESS * min(1.0, 1.0 / worst.share) if math.isfinite(worst.share) else UNCUT
        program = replace(program, limit=share * min(program.limit, sought.held(own.solved)))
    return replace(state, program=program, worst=worst)


def _quicker(sought: Sought, state: _State, own: Round) -> _State:
    """With the program that may let schedules fit which would be quicker than what was found, or none. That of
    ``state`` has more in flight, as these may have."""
    assert state.found is not None and state.program is not None
    seconds = MISSED * state.found.seconds
    share = None if state.is_last else own.tried.fullness_of_quicker(seconds)
    if share is not None:
        limit = LESS * min(own.program.limit, sought.held(own.solved)) / share
        return replace(state, program=replace(state.program, limit=limit), is_last=True)
    has_more = own.program.repeats == sought.in_flight() != state.program.repeats
    return state if has_more and own.tried.is_any_quicker(seconds) else replace(state, program=None)
