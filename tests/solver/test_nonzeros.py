"""How large a program is, before it is built."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.solver.budget import Budget
from autopar.solver.lp_relaxation import relax
from autopar.solver.milp import build, nonzeros

from .test_solve import forbid, layered, random_problem


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans(), st.booleans())
def test_entries_are_as_many_as_are_written(seed: int, limited: bool, hosted: bool) -> None:
    problem = forbid(replace(random_problem(seed, limited=limited, hosted=hosted), windows=()))
    assert problem is None or nonzeros(problem) == len(build(problem).value)


def test_a_program_too_large_to_relax_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.solver.lp_relaxation.build", lambda _: pytest.fail("built"))
    relaxed = relax(layered(12, 6), Budget(1e-6, counted=True))
    assert relaxed.bound == -np.inf and relaxed.feasible
