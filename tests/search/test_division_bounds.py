"""What is said of divisions that were not solved is proven: no plan of a division is quicker than its bound."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import autopar
from autopar.cluster.description import Cluster, Group
from autopar.errors import InfeasibleError, OptionsError
from autopar.ir.searched import Searched
from autopar.layout import Layout
from autopar.planner.request import PlanRequest, Proposals, kernels_of
from autopar.planner.roles.axis_roles import AxisRole
from autopar.planner.step_graphs import pipelined_step_of, step_of
from autopar.planner.timings import Timings
from autopar.plans.plan import Plan
from autopar.plans.views.coverage import coverage
from autopar.search import attempts, best_plan, division_bounds
from autopar.search.candidate import Candidate, Tried
from autopar.search.division_bounds import Bounds, Division, all_divisions, bounds_of, covered, divides, searched
from autopar.search.proposed import ProposedSearch
from autopar.search.stage_meshes import layout_of
from tests.helpers.marks import slow_rows_but
from tests.helpers.planning import CLUSTER, planned, requested, slow_devices
from tests.search.test_stage_devices import FAST, SLOW
from tests.search.test_unequal_stages import mixed

BATCH = 8
CLUSTERS = {
    "fast": Cluster.get(CLUSTER),
    "slow": slow_devices(),
    "shared": replace(Cluster.get(CLUSTER), sharing=4, cores=2.0),
}


def bounds(source: str, cluster: Cluster, devices: int) -> Bounds:
    asked = requested(source, (devices,), cluster)
    return bounds_of(asked, pipelined_step_of(asked))


@pytest.mark.parametrize(
    ("source", "cluster"),
    slow_rows_but([0, 4], [(m, c) for m in ("gpt2", "stack", "llama") for c in ("fast", "shared", "slow")]),
)
def test_no_plan_is_quicker_than_the_bound_of_its_division(source: str, cluster: str) -> None:
    hardware = CLUSTERS[cluster]
    limits, tried = bounds(source, hardware, 4), 0
    for stages in (1, 2, 4):
        for microbatches in (1, 2, 8):
            for schedule in ("1f1b", "zb-h1", "zb-v") if stages > 1 and microbatches > 1 else (None,):
                fixed = {"stages": stages, "microbatches": microbatches, "schedule": schedule, "recompute": "none"}
                try:
                    plan = planned(source, (2, 2), hardware, **fixed)
                except (InfeasibleError, OptionsError):
                    continue
                tried += 1
                for data in (1, 2, 4):
                    if 4 // stages % data == 0:
                        division = Division(stages, data, 4 // stages // data, microbatches, 1)
                        assert limits.seconds(division) <= plan.predicted.step_seconds, division
    assert tried >= 9


class Repeated(nn.Module):
    """One layer over and over: the parts of its gradient are added up, which a plan in microbatches does once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(9):
            x = torch.relu(self.layer(x))
        return x.square().mean()


def repeated() -> tuple[nn.Module, tuple[torch.Tensor]]:
    return Repeated(), (torch.ones(BATCH, 6),)


LAUNCHES = replace(slow_devices(), device=replace(slow_devices().device, launch_seconds=1e-3))
ONE_CORE = replace(slow_devices(), sharing=4, cores=1.0)
UNEQUAL = [
    (repeated, LAUNCHES, (3, 1), 8, "gpipe"),
    ("stack", ONE_CORE, (1, 3), 1, "1f1b"),
    ("gpt2", ONE_CORE, (3, 1), 1, "1f1b"),
    ("gpt2", mixed(Group(1, FAST), Group(3, SLOW)), (1, 3), 8, "zb-v"),
    ("llama", slow_devices(), (2, 1, 1), 4, "1f1b"),
    ("stack", mixed(Group(2, SLOW), Group(2, FAST)), (1, 3), 8, "zb-h1"),
    (repeated, LAUNCHES, (1, 1, 2), 4, "1f1b"),
]


@pytest.mark.parametrize(("source", "cluster", "stages", "count", "schedule"), slow_rows_but([0, 1], UNEQUAL))
def test_no_plan_of_unequal_stages_is_quicker_than_their_bound(
    source: Any, cluster: Cluster, stages: tuple[int, ...], count: int, schedule: str
) -> None:
    asked = requested(source, (4,), cluster)
    limit = attempts.least_seconds(asked, pipelined_step_of(asked), layout_of((4,), stages))
    fixed = {"stages": stages, "microbatches": count, "schedule": schedule, "recompute": "none"}
    plan = planned(source, (4,), cluster, **fixed)
    assert plan.stage_meshes.sizes == stages
    assert 0.0 < limit(count) <= plan.predicted.step_seconds


def test_equal_blocks_are_bounded_as_equal_divisions() -> None:
    limits = bounds("stack", slow_devices(), 4)
    for stages, count in ((1, 1), (2, 4), (4, 2)):
        inside = 4 // stages
        blocks = [range(stage * inside, (stage + 1) * inside) for stage in range(stages)]
        expected = limits.seconds(Division(stages, 1, inside, count, 1))
        assert limits.seconds_of_blocks(blocks, count) == pytest.approx(expected)


Taken = dict[str, tuple[float, float]]


def two_kinds(monkeypatch: pytest.MonkeyPatch, slow: Taken, fast: Taken) -> Bounds:
    """The bounds of two devices that take so many seconds to compute and to launch each operation."""
    takes = {SLOW.name: slow, FAST.name: fast}
    monkeypatch.setattr(
        division_bounds,
        "_operations",
        lambda kind, *_: {name: division_bounds._Seconds(*own) for name, own in takes[kind.device.name].items()},
    )
    return bounds("stack", mixed(Group(1, SLOW), Group(1, FAST)), 2)


def test_equal_stages_of_unequal_devices_are_bounded_as_unequal_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slow device may have all launches, and the quick one all else: each then takes 0.1 s."""
    limits = two_kinds(monkeypatch, {"a": (1.0, 0.1)}, {"a": (0.1, 0.1)})
    least = limits.seconds(Division(2, 1, 1, 1, 1))
    assert least == pytest.approx(0.1) == limits.seconds_of_blocks([range(1), range(1, 2)], 1)


def test_each_kind_may_do_what_it_is_best_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one device of either kind the step takes 11 s, on two of them with an operation each one second."""
    limits = two_kinds(monkeypatch, {"a": (1.0, 0.0), "b": (10.0, 0.0)}, {"a": (10.0, 0.0), "b": (1.0, 0.0)})
    assert limits.seconds(Division(2, 1, 1, 1, 1)) == pytest.approx(1.0)


@pytest.mark.parametrize("seed", range(8))
def test_no_division_of_the_operations_among_kinds_is_under_the_bound(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    computing, launches = draw.uniform(0.1, 3.0, (2, 5)) ** 3, draw.uniform(0.0, 1.0, 5)
    kinds = [{str(o): (float(row[o]), float(launches[o])) for o in range(5)} for row in computing]
    least = two_kinds(monkeypatch, *kinds).seconds(Division(2, 1, 1, 1, 1))
    assert least > 0.0
    for first in itertools.product((0.0, 0.5, 1.0), repeat=5):
        parts = np.array([first, 1.0 - np.array(first)])
        assert least <= max((parts * (computing + launches)).sum(axis=1)) * (1 + 1e-9)


def test_where_computing_is_all_that_counts_a_bound_is_near() -> None:
    """Nothing else takes time there, so a plan without stages takes little more than its bound."""
    limits = bounds("gpt2", slow_devices(), 2)
    plan = planned("gpt2", (2,), slow_devices(), stages=1, microbatches=1)
    assert limits.seconds(Division(1, 2, 1, 1, 1)) > 0.5 * plan.predicted.step_seconds


def test_few_microbatches_in_many_stages_are_bounded_by_the_longest_chain() -> None:
    limits = bounds("gpt2", slow_devices(), 4)
    at = [limits.seconds(Division(4, 1, 1, microbatches, 1)) for microbatches in (1, 2, 4, 8)]
    assert at[0] > at[1] > at[2] and at[0] > 2.0 * at[3]


def test_every_launch_counts() -> None:
    cluster = slow_devices()
    slower = replace(cluster, device=replace(cluster.device, launch_seconds=1.0))
    # One by one: of a kernel, operations have parts of the launch.
    limits, division = replace(bounds("stack", slower, 4), fused=None), Division(2, 2, 1, 4, 1)
    each = limits.seconds(replace(division, microbatches=8)) - limits.seconds(division)
    operations = each / 4 * 2
    assert operations == pytest.approx(round(operations)) and operations > 10


def test_divisions_are_all_ways_to_divide() -> None:
    found = list(all_divisions(12, 6, 100, 3))
    assert len(found) == len(set(found))
    assert all(d.pipeline * d.data * d.tensor == 12 and 6 % d.microbatches == 0 for d in found)
    assert Division(3, 2, 2, 6, 3) in found and Division(1, 12, 1, 1, 1) in found
    assert {d.interleave for d in found if d.pipeline == 1} == {1}
    assert all(d.pipeline * d.interleave <= 4 for d in all_divisions(12, 6, 4, 3))
    assert divides(Division(3, 2, 2, 3, 1), 6) and not divides(Division(3, 2, 2, 6, 1), 6)


def test_axes_that_may_be_for_anything_cover_every_degree() -> None:
    asked = requested("stack", (2, 4))
    roles = tuple(AxisRole(name, frozenset((name,)), frozenset()) for name in ("data", "tensor"))
    assert covered(replace(asked, roles=roles), 3, 5, (1, 2)) == {Division(3, 2, 4, 5, v) for v in (1, 2)}
    degrees = {(d.data, d.tensor) for d in covered(asked, 1, 1, (1,))}
    assert degrees == {(8, 1), (2, 4), (4, 2), (1, 8)}


def test_what_is_solved_excluded_and_left() -> None:
    limits = bounds("stack", slow_devices(), 4)
    solved = {Division(1, 4, 1, 1, 1), Division(2, 2, 1, 4, 1)}
    least = limits.seconds(Division(1, 4, 1, 1, 1))
    found = searched(limits, BATCH, 2, solved, 1.3 * least)
    assert found.solved == 2 and found.left > 0 and found.first
    assert 0 < found.excluded < found.divisions and found.indivisible > 0
    assert found.bound <= least and found.gap(1.3 * least) >= 1 - 1 / 1.3 - 1e-9
    everything = searched(limits, BATCH, 2, solved, 1e-9 * least)
    assert everything.left == 0 and everything.first == ""


def test_where_everything_is_solved_the_bound_is_the_least() -> None:
    limits, only = bounds("stack", slow_devices(), 1), Division(1, 1, 1, 1, 1)
    known = limits.seconds(only)
    found = searched(limits, 1, 1, {only}, 2.0 * known)
    assert found == Searched(1, 0, 1, 0, known)
    assert found.gap(2.0 * known) == pytest.approx(0.5)


@pytest.fixture
def _four_devices_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "MANY_DEVICES", 4)


def request(layout: Layout, source: str = "stack", cluster: str = "slow", **options: Any) -> PlanRequest:
    open_ones = {"mesh_search": True, "stages": None, "microbatches": None}
    asked = requested(source, (2, 2), CLUSTERS[cluster], **{**open_ones, **options})
    return replace(asked, propose=lambda _: Proposals((layout,)))


@pytest.mark.usefixtures("_four_devices_are_many")
def test_a_plan_says_what_was_searched() -> None:
    plan = best_plan.best_plan(request(Layout(pipeline=2, tensor=2, data=1, microbatch=1)), Timings())
    found, seconds = plan.searched, plan.predicted.step_seconds
    assert found is not None and found.solved >= 2
    assert 0 < found.bound <= seconds
    assert coverage(found, seconds).split(":")[0].split(";")[0].split(",")[0] in " ".join(str(plan).split())
    assert Plan.from_json(plan.to_json()) == plan == Plan.from_text(plan.to_text())
    wrong = replace(plan, searched=replace(found, excluded=found.divisions))
    with pytest.raises(OptionsError, match="searched counts"):
        wrong.validate()


@pytest.mark.slow
@pytest.mark.parametrize(("source", "cluster"), [("stack", "fast"), ("gpt2", "slow")])
@pytest.mark.usefixtures("_four_devices_are_many")
def test_what_was_excluded_is_not_quicker(source: str, cluster: str) -> None:
    """Every division of four devices that its bound excludes, solved nevertheless."""
    asked = request(Layout(pipeline=2, tensor=2, data=1, microbatch=1), source, cluster)
    plan = best_plan.best_plan(asked, Timings())
    limits, seconds = bounds(source, CLUSTERS[cluster], 4), plan.predicted.step_seconds
    excluded = [d for d in all_divisions(4, BATCH, 100, 1) if divides(d, BATCH) and limits.seconds(d) >= seconds]
    assert excluded
    for division in excluded:
        layout = Layout(pipeline=division.pipeline, data=division.data, tensor=division.tensor)
        options = autopar.Options(layout=layout, microbatches=division.microbatches)
        try:
            other = best_plan.best_plan(replace(asked, propose=None, options=options), Timings())
        except (InfeasibleError, OptionsError):
            continue
        assert other.predicted.step_seconds >= seconds * (1 - 1e-9), division


def microbatches(quick: Mapping[Layout, float], without: float = math.inf) -> list[int]:
    """The microbatches that are tried for one of two samples, which takes 10 s, where a plan without stages takes
    ``without`` seconds."""
    asked, tried = request(Layout()), list[int]()

    def solve(own: PlanRequest) -> Tried:
        layout = own.options.layout
        assert layout is not None and layout.microbatch is not None
        tried.append(layout.microbatch)
        return known({1: 12.0, 2: 10.0, 4: 9.0, 8: 9.5}[layout.microbatch])

    search = ProposedSearch(asked, Proposals((TWO,), None, quick), Timings(), solve)
    search.solve_first()
    search.tried += known(without)
    search.solve_other_microbatches()
    return tried[1:]


def known(seconds: float) -> Tried:
    return Tried((Candidate(seconds * 1e9, None, _never, _never),))


TWO = Layout(pipeline=2, tensor=2, data=1, microbatch=2)


def test_other_microbatches_are_tried_while_they_are_quicker() -> None:
    assert microbatches({}) == [4, 8, 1]
    quick = {TWO: 10e9, replace(TWO, microbatch=4): 9.5e9, replace(TWO, microbatch=8): 9.6e9}
    assert microbatches(quick) == [4, 1], "quick prices put 8 behind, and have none of 1"
    assert microbatches(quick, without=9.4) == [1], "4 would take 9.5 s"


def test_microbatches_whose_bound_is_no_better_are_not_tried() -> None:
    assert microbatches({}, without=0.0) == []


def _never(*_: object) -> Any:
    raise AssertionError("not asked for")


def test_a_gap_of_nothing() -> None:
    assert Searched(0, 0, 0, 0, 0.0).gap(0.0) == 0.0
    assert math.isclose(Searched(1, 0, 1, 0, 0.75).gap(1.0), 0.25)


@pytest.mark.parametrize("source", ["gpt2", "stack", "llama"])
def test_the_kernels_of_bounds_are_those_of_the_step_that_is_cut(source: str) -> None:
    """They are taken from the step with saved activations, whose kernels a plan without stages needs as well."""
    asked = requested(source, (4,))
    graph = pipelined_step_of(asked)
    known, own = bounds_of(asked, graph), Bounds(asked.cluster, 4, graph, kernels_of(asked, graph))
    for division in (Division(1, 1, 4, 1, 1), Division(2, 1, 2, 4, 1), Division(4, 1, 1, 8, 1)):
        assert known.seconds(division) == own.seconds(division)


def test_gradients_of_inputs_are_no_part_of_the_step_that_is_cut() -> None:
    """A step in microbatches does not return them, so neither does a bound count them."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    asked = requested(lambda: (model, {"input": torch.randn(8, 16, requires_grad=True)}), (4,))
    graph = pipelined_step_of(asked)
    assert any(output.kind == "input_gradient" for output in step_of(asked).outputs)
    assert all(output.kind != "input_gradient" for output in graph.outputs)
    own = Bounds(asked.cluster, 4, graph, kernels_of(asked, graph))
    assert bounds_of(asked, graph)._launches == own._launches
