"""The bill of few layers of a deep step is the bill of all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest

from autopar.placement.baselines import baselines
from autopar.placement.breakdown import CostBreakdown
from autopar.placement.formulation import Instance
from autopar.planner import solve_mesh
from autopar.planner.mesh_solution import SolvedStep
from autopar.planner.request import PlanRequest
from autopar.planner.steps.few_layer_bill import folded_bill, folded_graph_of
from autopar.solver.problem import Ints
from tests.helpers.models import Case, llama
from tests.helpers.planning import requested

from .test_short_rehearsal import Skips, Turns, skips, solved, turns, two_stacks, within


def placed(request: PlanRequest) -> Iterator[tuple[Instance, Ints]]:
    """The best placements, and those of the baselines."""
    best = solved(request)
    yield best.instance, best.solution.choices
    for line in baselines(best.instance):
        yield line.instance, solve_mesh._solve_baseline(request, line.instance).choices


def seconds_by_kind(bill: CostBreakdown) -> dict[str, float]:
    return {kind: bill.seconds_of(kind) for kind in {line.kind for line in bill.lines}}


@pytest.mark.parametrize("model", [turns, two_stacks, partial(llama, 14)])
@pytest.mark.parametrize("precision", [None, "fp16"])
def test_the_bill_of_few_layers_is_that_of_all(model: Callable[[], Case], precision: str | None) -> None:
    for instance, choices in placed(requested(model, (2, 2), "dgx-a100-80gb", precision=precision)):
        folded, whole = folded_bill(instance, choices), SolvedStep(instance, choices).breakdown
        assert folded is not None and len(folded.lines) < 0.8 * len(whole.lines)
        assert folded.memory == whole.memory
        assert seconds_by_kind(folded) == pytest.approx(seconds_by_kind(whole), rel=1e-12)


def test_the_counts_are_those_of_all_nodes() -> None:
    graph = solved(requested(two_stacks, (2,))).instance.graph
    folded = folded_graph_of(graph)
    assert folded is not None and folded is folded_graph_of(graph)
    assert sum(folded.counts.get(node.name, 1) for node in folded.few) == len(graph)


@pytest.mark.parametrize("model", [lambda: (Turns(4), turns()[1]), lambda: (Skips(24), skips()[1])])
def test_a_step_without_layers_to_leave_out_is_billed_in_full(model: Callable[[], Case]) -> None:
    best = solved(requested(model, (2,)))
    assert folded_bill(best.instance, best.solution.choices) is None


def test_a_step_that_saves_memory_is_billed_in_full() -> None:
    best = solved(within(requested(turns, (2,), offload=False), 0.5))
    assert best.assignment.recomputed and folded_bill(best.instance, best.solution.choices) is None
