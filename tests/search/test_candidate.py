"""What is listed beside the plan that a search chose."""

from unittest.mock import Mock

from autopar.errors import InfeasibleError
from autopar.ir.plan_record import Predicted
from autopar.search.candidate import NO_STAGES, Candidate, Excluded, Tried, also_priced


def step_of(seconds: float) -> Predicted:
    return Predicted(seconds, seconds, 0.0, 0.0, 0, 0, 0, 0, 0, 0, 0, 0.0)


def test_of_the_baselines_of_excluded_meshes_the_quickest_is_listed() -> None:
    priced = ({"FSDP": step_of(2.0)}, {"FSDP": step_of(1.0), "DDP": None}, {"FSDP": step_of(3.0)}, {"FSDP": None})
    excluded = tuple(Excluded(NO_STAGES, InfeasibleError("too full"), baselines) for baselines in priced)
    best = Candidate(1.0, None, Mock(), Mock())
    assert also_priced(Tried((best,), excluded), best) == {"FSDP": step_of(1.0), "DDP": None}
