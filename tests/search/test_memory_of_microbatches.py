"""Steps in microbatches where memory is short: what the program counts is more than they hold, and the quickest that
fits is found all the same."""

from __future__ import annotations

from typing import Any

from autopar.options import Options
from autopar.planner.timings import Timings
from autopar.plans.plan import Plan
from autopar.search.best_plan import best_plan
from tests.helpers.models import Case, Stack, text
from tests.helpers.planning import requested


def wide_layers() -> Case:
    return Stack(layers=2, width=64, hidden=128), text(16, 8)


def plan(**asked: Any) -> Plan:
    return best_plan(requested(wide_layers, (2,), **asked), Timings())


def test_the_quickest_step_in_microbatches_is_found_where_it_just_fits() -> None:
    free = plan(stages=1, microbatches=2)
    tight = plan(stages=1, microbatches=2, memory_limit=free.predicted.peak_bytes)
    assert tight.predicted == free.predicted
    assert tight.parameters == free.parameters
    assert tight.status == "optimal"


def test_what_is_counted_proves_nothing_of_what_steps_hold() -> None:
    free = plan(stages=1, microbatches=2)
    tight = plan(stages=1, microbatches=2, memory_limit=int(0.8 * free.predicted.peak_bytes))
    assert tight.objective > 1.01 * free.objective
    assert tight.bound <= (1.0 + 1e-9) * free.objective
    assert (tight.status == "optimal") == (tight.gap <= Options().gap)
