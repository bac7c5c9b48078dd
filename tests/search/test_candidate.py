"""What is kept of what a search tried: listed beside the plan, or shown as an error."""

from dataclasses import replace
from unittest.mock import Mock

import pytest

from autopar.errors import InfeasibleError
from autopar.ir.plan_record import Predicted
from autopar.planner.memory_limit import TooSlowError
from autopar.planner.timings import Timings
from autopar.search import best_plan as search
from autopar.search import without_stages
from autopar.search.candidate import NO_STAGES, Candidate, Excluded, Failure, Tried, also_priced, why_excluded
from tests.helpers.planning import requested


def step_of(seconds: float) -> Predicted:
    return Predicted(seconds, seconds, 0.0, 0.0, 0, 0, 0, 0, 0, 0, 0, 0.0)


def test_of_the_baselines_of_excluded_meshes_the_quickest_is_listed() -> None:
    priced = ({"FSDP": step_of(2.0)}, {"FSDP": step_of(1.0), "DDP": None}, {"FSDP": step_of(3.0)}, {"FSDP": None})
    excluded = tuple(Excluded(NO_STAGES, InfeasibleError("too full"), baselines) for baselines in priced)
    best = Candidate(1.0, None, Mock(), Mock())
    assert also_priced(Tried((best,), excluded), best) == {"FSDP": step_of(1.0), "DDP": None}


@pytest.mark.parametrize(("stages", "is_said"), [(1, False), (2, True)])
def test_a_whole_step_in_microbatches_is_a_plan_without_stages(stages: int, is_said: bool) -> None:
    excluded = (Excluded(NO_STAGES, InfeasibleError("too full").needing(2)),)
    found = Candidate(1.0, Mock(stages=stages), Mock(), Mock())
    assert (NO_STAGES in why_excluded(Tried((found,), excluded), limit=1)) == is_said


def test_only_the_error_that_would_be_shown_keeps_what_explains_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What explains an error, and its traceback, hold the program of a mesh."""
    request, raised = requested("plain", (4,), mesh_search=True), list[InfeasibleError]()

    def solve(*_: object) -> None:
        raised.append(InfeasibleError("does not fit").needing(100 - len(raised)))
        raised[-1].explain = Mock()
        raise raised[-1]

    monkeypatch.setattr(without_stages, "solve_mesh", solve)
    arranged = [request, replace(request, mesh=(2, 2)), replace(request, mesh=(4, 1))]
    asked = [replace(own, options=replace(own.options, stages=1, microbatches=1)) for own in arranged]
    assert not search._of_arrangements(asked, {}, Timings()).candidates
    assert len(raised) == 3
    assert [error.explain is None for error in raised] == [True, True, False]
    assert [error.__traceback__ is None for error in raised] == [True, True, False]
    search.keep_shown(Tried((Mock(),), failures=(Failure(raised[-1]),)))
    assert raised[-1].explain is None


@pytest.mark.parametrize(
    ("errors", "said"),
    [
        ([TooSlowError("it", 3.0), TooSlowError("it", 2.0)], "at least 2 s"),
        ([TooSlowError("it", 3.0, is_proven=False)], "about 3 s"),
        ([TooSlowError("it", 3.0, is_proven=False, is_least=True)], "at least about 3 s"),
        ([TooSlowError("it", 3.0), TooSlowError("it", 2.0, is_proven=False)], "at least about 2 s"),
        ([TooSlowError("it", 3.0), TooSlowError("it", 2.0, is_proven=False, is_least=True)], "at least about 2 s"),
    ],
)
def test_why_a_kind_is_excluded_says_what_is_proven_and_what_estimated(errors: list[TooSlowError], said: str) -> None:
    tried = Tried(excluded=tuple(Excluded(NO_STAGES, error) for error in errors))
    assert why_excluded(tried, limit=1) == {NO_STAGES: said}
