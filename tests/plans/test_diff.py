"""What two plans do differently."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.errors import OptionsError
from autopar.ir.assignment import ParameterPlacement
from autopar.ir.placements import REPLICATE, Placements, Shard, short
from autopar.plans.plan import Plan
from tests.helpers.plan_model import PIN, pinned_plan, solved


@pytest.fixture(scope="module")
def plan() -> Plan:
    return solved()[0]


@pytest.fixture(scope="module")
def pinned() -> Plan:
    return pinned_plan()


def test_diff(plan: Plan, pinned: Plan) -> None:
    assert plan.diff(plan).same and str(plan.diff(plan)) == "both plans choose the same"
    found = plan.diff(pinned)
    assert not found.same
    changed = {(change.path, change.what): (change.before, change.after) for change in found.placements}
    was = short(plan.parameters[PIN].weight)
    assert changed[PIN, "weight"] == (was, "(S(0),S(1))")
    assert ("pin " + PIN) in {change.path for change in found.settings}
    step = next(figure for figure in found.figures if figure.name == "step")
    assert (step.before, step.after) == (plan.predicted.step_seconds, pinned.predicted.step_seconds)
    assert PIN in str(found)
    back = pinned.diff(plan)
    assert {(c.path, c.what): (c.after, c.before) for c in back.placements} == changed


def test_a_diff_is_with_a_plan(plan: Plan) -> None:
    with pytest.raises(OptionsError, match=r"'a\.plan' is a str; autopar\.Plan\.load\('a\.plan'\) reads one"):
        plan.diff("a.plan")  # type: ignore[arg-type]


def test_diff_of_other_meshes_and_models(plan: Plan) -> None:
    other = replace(plan, mesh=(4, 1), model="Other", parameters={}, outputs={}, strategies={}, baselines={})
    found = plan.diff(other)
    assert {change.path for change in found.settings} == {"mesh", "model"}
    assert all(change.after == "-" for change in found.placements)
    assert found.operations == len(plan.strategies) and all(b is None for _, b in found.baselines.values())
    assert str(found)


def test_diff_leaves_out_what_differs_in_the_number_of_axes_alone(plan: Plan) -> None:
    def on_one_more(place: Placements) -> Placements:
        return (*place, place[-1])

    first = next(path for path, place in plan.parameters.items() if len(set(place.weight)) == 1)
    resting = {
        path: ParameterPlacement(*(on_one_more(each) for each in (place.weight, place.gradient, place.optimizer)))
        for path, place in plan.parameters.items()
    }
    mesh = (*plan.mesh[:-1], plan.mesh[-1] // 2, 2)
    alike = replace(
        plan,
        mesh=mesh,
        axis_names=("x", "y", "z")[: len(mesh)],
        parameters=resting,
        outputs={path: on_one_more(place) for path, place in plan.outputs.items()},
        strategies={
            name: replace(own, inputs=tuple(map(on_one_more, own.inputs)), outputs=tuple(map(on_one_more, own.outputs)))
            for name, own in plan.strategies.items()
        },
    )
    found = plan.diff(alike)
    assert [change.path for change in found.settings] == ["mesh"]
    assert found.placements == () and found.operations == 0 and not found.same
    assert found.other_axes == 3 * len(plan.parameters) + len(plan.outputs)
    assert f"{found.other_axes} placements differ in the number of axes alone" in str(found)
    other = (*[Shard(0)] * (len(mesh) - 1), REPLICATE)
    changed = plan.diff(replace(alike, parameters={**resting, first: ParameterPlacement(other, other, other)}))
    assert {(c.path, c.what, c.after) for c in changed.placements} == {
        (first, what, short(other)) for what in ("weight", "gradient", "optimizer")
    }
    moved = plan.diff(replace(alike, parameters={**resting, first: replace(resting[first], offload="host")}))
    assert [(c.path, c.what) for c in moved.placements] == [(first, "optimizer")]


def test_diff_of_precision_and_of_state_on_the_host(plan: Plan) -> None:
    (found,) = plan.diff(replace(plan, precision="bf16")).settings
    assert (found.path, found.before, found.after) == ("precision", "fp32", "bf16")
    place = replace(plan.parameters[PIN], offload="host")
    changed = plan.diff(replace(plan, parameters={**plan.parameters, PIN: place}))
    (moved,) = changed.placements
    assert not changed.same and (moved.path, moved.what) == (PIN, "optimizer")
    assert (moved.before, moved.after) == (short(place.optimizer), f"{short(place.optimizer)} in host memory")
