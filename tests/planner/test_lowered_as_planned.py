"""Plans of small models on every mesh under every restriction, each made once: their objective is their cost breakdown
is their prediction, their programs communicate what they say, and no baseline beside them is better."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
from torch.distributed.tensor import Partial

from autopar.ir.placements import short
from autopar.ir.reshard import Collective
from autopar.passes.lower.collectives_read_back import collectives_of, difference
from autopar.placement.memory_bound import message_bytes
from autopar.placement.placed_step import PlacedStep
from autopar.placement.prices import local_bytes
from autopar.planner.mesh_solution import MeshSolution
from autopar.planner.solve_mesh import solve_mesh
from autopar.planner.timings import Timings
from autopar.plans.plan import Plan
from autopar.search import without_stages as search
from autopar.search.best_plan import best_plan
from autopar.solver.problem import evaluate, memory_of
from tests.helpers.marks import slow_rows_but
from tests.helpers.models import make
from tests.helpers.planning import Setting, make_request, requested, setting, slow_devices

MESHES = [(4,), (2, 2), (2, 1, 2)]
KINDS: dict[str, dict[str, Any]] = {
    "best": {},
    "zero-0": {"zero": 0},
    "zero-1": {"zero": 1},
    "zero-2": {"zero": 2},
    "zero-3": {"zero": 3},
    "sgd": {"optimizer": "sgd"},
    "slow devices": {"cluster": slow_devices()},
}


def on_meshes(*kinds: str) -> list[Any]:
    """Each of the ``kinds`` on each of the meshes. On more than one axis, those that ask for a stage of ZeRO or another
    optimizer are slow, as is an axis of one device."""
    quick = [(kind, mesh) for kind in kinds for mesh in MESHES[: 2 if kind in ("best", "slow devices") else 1]]
    rows = list(itertools.product(kinds, MESHES))
    return slow_rows_but([rows.index(pair) for pair in quick], rows)


@dataclass(frozen=True)
class Planned:
    """A plan, and the solved program that it was written from."""

    plan: Plan
    best: MeshSolution


@cache
def planned(name: str, mesh: tuple[int, ...], kind: str) -> Planned:
    seen: list[MeshSolution] = []

    def spy(*request: Any) -> Any:
        found = solve_mesh(*request)
        seen.append(found[0])
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "solve_mesh", spy)
        plan = best_plan(requested(name, mesh, **KINDS[kind]), Timings())
    (best,) = seen
    return Planned(plan, best)


@cache
def settled(mesh: tuple[int, ...], slow: bool) -> Setting:
    return setting(requested("stack", mesh, **KINDS["slow devices" if slow else "best"]))


def waiting(step: PlacedStep) -> int:
    """Bytes of the gradients, fewer than a bucket holds, that are computed as partial sums."""
    gradients = {value: step.assignment.placements_of(value) for value in step.graph.gradients.values()}
    return sum(
        local_bytes(step.graph.type_of(value), places, step.prices.mesh)
        for value, places in gradients.items()
        if any(isinstance(place, Partial) for place in places)
    )


@pytest.mark.parametrize(("kind", "mesh"), on_meshes("best", "zero-1", "zero-3", "sgd", "slow devices"))
def test_objective_is_the_cost_breakdown_is_the_prediction(kind: str, mesh: tuple[int, ...]) -> None:
    found = planned("plain" if mesh == (2, 1, 2) else "stack", mesh, kind)
    best, plan = found.best, found.plan
    objective = best.solution.objective
    assert objective > 0
    assert best.breakdown.seconds == pytest.approx(objective, rel=1e-9)
    assert evaluate(best.instance.problem, best.solution.choices) == pytest.approx(objective, rel=1e-9)
    counted = memory_of(best.instance.problem, best.solution.choices)
    assert counted + message_bytes(best.step.placed) == best.breakdown.memory.peak + 2 * waiting(best.step.placed)
    if kind != "slow devices":  # Of "plain", one small weight is gathered, which travels alone.
        has_messages = kind == "zero-3" and mesh != (2, 1, 2)
        assert (message_bytes(best.step.placed) > 0) == has_messages, "only gathered weights travel in messages"
    assert plan.objective == pytest.approx(objective, rel=1e-9)
    assert plan.objective == pytest.approx(plan.predicted.step_seconds, rel=1e-9)
    assert sum(line.seconds for line in plan.lines) == pytest.approx(plan.objective, rel=1e-9)
    p = plan.predicted
    assert p.compute_seconds + p.comm_seconds == pytest.approx(p.step_seconds, rel=1e-9)
    parts = (p.weight_bytes, p.gradient_bytes, p.optimizer_bytes, p.activation_bytes, p.temporary_bytes, p.input_bytes)
    assert sum(parts) == p.peak_bytes
    assert plan.bound <= plan.objective * (1 + 1e-9)


@pytest.mark.parametrize(("kind", "mesh"), on_meshes("best", "slow devices"))
def test_never_worse_than_its_baselines(kind: str, mesh: tuple[int, ...]) -> None:
    plan = planned("stack", mesh, kind).plan
    assert len(plan.baselines) == 3
    for name, other in plan.baselines.items():
        assert other is not None, name
        if other.peak_bytes <= plan.memory_limit:
            assert plan.predicted.step_seconds <= other.step_seconds * (1 + 1e-9), name


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_stages(stage: int) -> None:
    for path, place in planned("stack", (4,), f"zero-{stage}").plan.parameters.items():
        if stage == 0:
            assert place.weight == place.gradient == place.optimizer, path
            continue
        assert short(place.optimizer) != "(R)", path
        assert (place.weight == place.optimizer) or stage < 3, path
        assert (place.gradient == place.optimizer) or stage < 2, path


@pytest.mark.parametrize(("kind", "mesh"), on_meshes(*(kind for kind in KINDS if kind != "sgd")))
def test_plans_do_what_they_say(kind: str, mesh: tuple[int, ...]) -> None:
    plan, found = planned("stack", mesh, kind).plan, settled(mesh, kind == "slow devices")
    assignment = plan.assignment({n.target: n.name for n in found.graph.placeholders("param")})
    done = collectives_of(found.program(assignment))
    said = Counter[Collective]()
    for line in plan.collectives(joined=False):
        said[Collective(line.kind, line.axes, line.bytes)] += line.count
    assert difference(done, said) == ()
    assert done.total() > 0 or kind in ("best", "zero-0")


@pytest.mark.parametrize(("kind", "mesh"), on_meshes("zero-3", "slow devices", "best"))
def test_weights_are_listed_as_they_are_gathered(kind: str, mesh: tuple[int, ...]) -> None:
    """Members of a message together, in as many messages as the program has; their bytes and seconds are the bill's."""
    plan, found = planned("stack", mesh, kind).plan, settled(mesh, kind == "slow devices")
    program = found.program(plan.assignment({n.target: n.name for n in found.graph.placeholders("param")}))
    gathering = [*str(program.forward).splitlines(), *str(program.backward).splitlines()]
    weights = [text for text in gathering if "%weights" in text and "_bucket(" in text]
    together = [lines for lines in plan.sent_together if len(lines) > 1]
    assert sum(len(lines[0].sent) for lines in together) == len(weights)
    assert sorted(len(lines) for lines in together for _ in lines[0].sent) == sorted(
        text.partition("([")[2].partition("]")[0].count("%") for text in weights
    )
    assert together or kind != "zero-3"
    priced = sum(step.bytes * line.times for line in plan.lines for step in line.sent)
    for each in (plan.collectives(), plan.collectives(joined=False)):
        assert sum(c.bytes * c.count for c in each) == priced
    table = plan.table("collective")
    place = table.columns.index("seconds")
    paid = sum(line.seconds for line in plan.lines if line.sent)
    assert sum(float(row[place]) for row in table.rows) == pytest.approx(paid)


def without_times(plan: Plan) -> Plan:
    return replace(plan, solve_seconds=0.0, timings={})


def test_the_same_request_has_the_same_plan() -> None:
    first = planned("stack", (2, 2), "slow devices").plan
    second = best_plan(make_request(*make("stack"), (2, 2), **KINDS["slow devices"]), Timings())
    assert without_times(first) == without_times(second)
    assert without_times(first).to_json() == without_times(second).to_json()


def test_mesh_search_is_never_worse_than_the_mesh_given() -> None:
    fixed = planned("stack", (4,), "slow devices").plan
    free = best_plan(requested("stack", (4,), slow_devices(), mesh_search=True), Timings())
    assert free.predicted.step_seconds <= fixed.predicted.step_seconds * 1.011
