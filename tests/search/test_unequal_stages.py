"""Stages of unequal numbers of devices: which are tried, what they cost, and that their plans compute what one device
does, all ranks simulated in one process."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import Options
from autopar.cluster.description import Cluster, Group
from autopar.compiler.calls import Compiler
from autopar.cost.pipeline.prices import SharedProcessors
from autopar.cost.pipeline.simulate import simulate
from autopar.errors import OptionsError, PlanMismatchError
from autopar.ir.pipeline_program import PipelineProgram
from autopar.plans.page.page import render
from autopar.plans.plan import Plan
from autopar.plans.views.step_timeline import pipeline_prices
from autopar.runtime.calls.compiled import Request
from autopar.runtime.comm.groups import AxisGroup
from autopar.search.stage_meshes import StageLayout, layout_of, unequal_layouts
from tests.helpers.planning import slow_devices
from tests.helpers.run_plan import Bench
from tests.search.test_stage_devices import FAST, SLOW, at_speed

BATCH, WIDTH, VOCABULARY = 24, 12, 18


class Tied(nn.Module):
    """Blocks between an embedding and a head that share a weight; ``loss`` is the mean over all rows."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(blocks)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = h + block(h)
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())


@cache
def bench() -> Bench:
    torch.manual_seed(0)
    x = torch.randint(VOCABULARY, (BATCH, 5))
    return Bench(Tied(), {"x": x, "labels": x.roll(1, 1)})


def plan(devices: int, cluster: Cluster | None = None, batch: int = BATCH, **options: Any) -> Plan:
    own = bench()
    given = {name: value[:batch] for name, value in own.batch.items()}
    return autopar.plan(own.model, (devices,), given, cluster=cluster or slow_devices(), options=Options(**options))


def mixed(*groups: Group) -> Cluster:
    return slow_devices().with_groups(*groups)


def check_computes_the_same(found: Plan, own: Bench | None = None) -> None:
    own = own or bench()
    expected, computed = own.expected(), own.run(found)
    assert computed.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(computed[name], value, rtol=1e-5, atol=1e-6, msg=name)


def check_whole(found: Plan) -> None:
    """The plan is valid, survives its text forms, and its figures are those of its simulated step."""
    found.validate()
    assert Plan.from_json(found.to_json()) == found == Plan.from_text(found.to_text())
    assert autopar.step_timeline(found).seconds == pytest.approx(found.predicted.step_seconds)
    assert str(found) and str(found.table(by="stage")) and found.tree()


ASKED = [
    ((1, 3), {"microbatches": 3, "schedule": "1f1b"}),
    pytest.param((1, 2), {"microbatches": 4, "schedule": "gpipe", "zero": 1}, marks=pytest.mark.slow),
    ((1, 3), {"microbatches": 3, "schedule": "1f1b", "recompute": "full"}),
    pytest.param((3, 1), {"microbatches": 3, "schedule": "interleaved"}, marks=pytest.mark.slow),
    pytest.param((2, 4), {"microbatches": 6, "schedule": "zb-v"}, marks=pytest.mark.slow),
    pytest.param((2, 1, 3), {"microbatches": 4, "schedule": "zb-h1", "zero": 3}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("stages", "options"), ASKED, ids=str)
def test_asked_for_they_compute_what_one_device_does(stages: tuple[int, ...], options: dict[str, Any]) -> None:
    found = plan(sum(stages), stages=stages, **options)
    assert found.stage_meshes.sizes == stages
    check_whole(found)
    check_computes_the_same(found)


def test_plans_that_count_stages_on_a_host_can_still_be_shown() -> None:
    """Before speeds were by the number of devices at work, they were by that of stages, each of the average size."""
    found = plan(4, replace(slow_devices(), sharing=4, cores=1.0), stages=(1, 3), microbatches=3, schedule="1f1b")
    check_whole(found)
    data = json.loads(found.to_json())
    assert (data["pipeline"]["hosts"], data["pipeline"]["speeds"]) == ([0, 0], [4.0, 2.0, pytest.approx(4 / 3), 1.0])
    data["pipeline"]["speeds"] = [2.0, 1.0]
    data["version"] = 9
    del data["written"]
    former = Plan.from_json(json.dumps(data))
    assert former.pipeline is not None
    prices = pipeline_prices(former.pipeline)
    assert prices.shared == SharedProcessors((0, 0), (2.0, 1.0))
    assert autopar.step_timeline(former).seconds == simulate(former.pipeline.schedule, prices).seconds > 0
    assert "stage 1" in render(former)
    data["pipeline"]["speeds"] = [1.0]
    with pytest.raises(OptionsError, match=r"speeds \(1.0,\) are too few"):
        Plan.from_json(json.dumps(data))


def test_a_tied_weight_lies_on_both_meshes() -> None:
    """Its state rests with the embedding; the head has it as its own mesh does."""
    found = plan(4, stages=(1, 3), microbatches=3, schedule="1f1b")
    assert found.pipeline is not None and {path for _, path in found.pipeline.borrowed} == {"embed.weight"}
    updated = [line.stage for line in found.lines if line.kind == "optimizer" and line.name == "embed_weight"]
    assert len(set(updated)) <= 1


def test_each_stage_follows_the_speed_of_all_its_devices() -> None:
    """Three devices compute three times as much in the same seconds."""
    found = plan(4, stages=(1, 3), microbatches=8, schedule="1f1b")
    busy = [0.0, 0.0]
    for line in found.lines:
        busy[line.stage] += line.seconds if line.kind == "compute" else 0.0
    first, second = busy
    assert found.stage_meshes.sizes == (1, 3) and second * 3 > 1.3 * first


@pytest.mark.slow
def test_the_search_divides_devices_of_two_kinds_unequally() -> None:
    """Of one fast device and three slow ones, with so slow links that rows and weights stay within a kind."""
    links = tuple(replace(link, rates={}, bandwidth=2e5, latency=1e-3) for link in slow_devices().links)
    cluster = replace(mixed(Group(1, FAST), Group(3, SLOW)), links=links)
    found = plan(4, cluster, microbatches=8)
    check_whole(found)
    check_computes_the_same(found)
    stages_of = {name: figures for name, figures in found.baselines.items() if figures is not None}
    assert found.stage_meshes.sizes == (1, 3) or any(name.startswith("stages of 1 + 3") for name in stages_of)


def test_layouts_between_kinds() -> None:
    def counts(*groups: Group) -> list[tuple[int, ...]]:
        return [layout.counts for layout in unequal_layouts(mixed(*groups), sum(group.count for group in groups))]

    assert counts(Group(1, FAST), Group(3, SLOW)) == [(1, 3)]
    assert counts(Group(2, FAST), Group(4, SLOW)) == [(2, 4), (1, 1, 4), (1, 1, 2, 2), (2, 1, 1, 1, 1)]
    # Neighbours of one kind make one block; equal stages are the ordinary ones.
    assert counts(Group(1, FAST), Group(1, SLOW), Group(2, SLOW)) == [(1, 3)]
    assert counts(Group(2, FAST), Group(2, SLOW)) == [(1, 1, 2), (2, 1, 1)]
    assert unequal_layouts(slow_devices(), 4) == ()


def test_numbers_of_devices_make_a_layout() -> None:
    assert layout_of((4,), (1, 3)) == StageLayout(2, (3,), (), (1, 3))
    assert layout_of((4,), (2, 2)) == StageLayout(2, (2,), (0,))
    assert layout_of((4,), (1, 3)).blocks == (range(1), range(1, 4))


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ((1, 2), r"stages=(1, 2) are 3 devices in all, but the mesh (4,) has 4: .*; stages=(1, 3) would"),
        ((3, 3), r"stages=(3, 3) are 6 devices in all, but the mesh (4,) has 4: .*; stages=(3, 1) would"),
        ((5, 1), r"stages=(5, 1) are 6 devices in all, but the mesh (4,) has 4: they take every device"),
        ((4,), r"stages=(4,) gives the devices of one stage: stages=1 has all of them"),
        ((0, 4), r"stages=(0, 4) are not numbers of devices, at least 1 for each stage"),
    ],
    ids=str,
)
def test_numbers_that_are_not_those_of_the_mesh_are_explained(stages: tuple[int, ...], message: str) -> None:
    pattern = re.escape(message).replace(re.escape(".*"), ".*")
    with pytest.raises(OptionsError, match=pattern):
        plan(4, stages=stages)


def test_what_needs_equal_stages_is_explained() -> None:
    with pytest.raises(OptionsError, match=r"pins name shares of rows, .*ask for stages=2"):
        plan(4, stages=(1, 3), pins={"blocks": "S(0:3+1)"})
    with pytest.raises(OptionsError, match="a layout divides every stage alike"):
        Options(stages=(1, 3), layout=autopar.Layout(tensor=1))


def test_another_plan_is_not_what_the_options_ask_for() -> None:
    from autopar.planner.options_of_plan import options_under

    found = plan(4, stages=(1, 3), microbatches=3, schedule="1f1b")
    options_under(Options(stages=(1, 3)), found)
    with pytest.raises(PlanMismatchError, match=r"stages=\(3, 1\).*stages=\(1, 3\)"):
        options_under(Options(stages=(3, 1)), found)


def test_the_first_part_of_the_model_on_the_larger_mesh_is_a_valid_plan() -> None:
    """The tied weight's gradient is computed on both meshes, and rests on the larger one, in shards."""
    found = plan(4, stages=(1, 3), microbatches=3, schedule="1f1b", memory_limit=70000)
    check_whole(found)


def test_offload_of_a_borrowed_weight_survives_json() -> None:
    found = plan(4, stages=(1, 3), microbatches=3, schedule="1f1b", offload=True)
    assert Plan.from_json(found.to_json()) == found


@pytest.mark.slow
def test_evaluation_where_a_tied_weight_lies_on_equal_meshes_of_two_kinds() -> None:
    """Its state is in shards, which both stages must store alike."""
    kinds = Group(2, at_speed(3.0, "first")), Group(1, SLOW), Group(2, at_speed(2.0, "third"))
    pins = {"embed": "stage 0", "blocks.2": "stage 1", "blocks.3": "stage 2"}
    asked = {"stages": (2, 1, 2), "microbatches": 3, "schedule": "1f1b", "zero": 1, "pins": pins}
    found, own = plan(5, mixed(*kinds), **asked), bench()
    for rank in range(5):
        compiler = Compiler(
            model=own.model, mesh=(5,), axis_names=(), cluster=mixed(*kinds), options=Options(),
            device=torch.device("cpu"), ranks=AxisGroup(None, 1, rank), plan=found,
        )  # fmt: skip
        compiled = compiler(Request((), own.batch, training=False, grad=False, outputs="loss"))
        assert isinstance(compiled.program, PipelineProgram)
        (tied,) = (each for each in compiled.program.parameters if len(each.chunks) > 1)
        assert tied.slot.target == "embed.weight" and not tied.elsewhere
    check_computes_the_same(found)


def test_a_stage_of_several_kinds_says_that_its_devices_have_equal_rows() -> None:
    cluster = mixed(Group(2, FAST), Group(2, SLOW))
    found = plan(4, cluster, stages=(1, 3), microbatches=3, schedule="1f1b")
    (note,) = (warning for warning in found.warnings if "equal rows" in warning)
    assert "share stage 1" in note and "stages=(1, 1, 2) keeps kinds apart" in note
    apart = plan(4, cluster, stages=(1, 1, 2), microbatches=3, schedule="1f1b")
    assert not any("equal rows" in warning for warning in apart.warnings)
    check_computes_the_same(found)


def test_a_tied_weight_may_be_placed_otherwise_on_equal_meshes_of_two_kinds() -> None:
    """On slow devices in shards, on quick ones, for which messages take longest, whole: each program has it as its own
    stage was solved and priced."""
    kinds = Group(2, SLOW), Group(1, SLOW), Group(2, at_speed(1e4, "quick"))
    pins = {"embed": "stage 0", "blocks.2": "stage 1", "blocks.3": "stage 2"}
    found = plan(5, mixed(*kinds), stages=(2, 1, 2), microbatches=3, schedule="1f1b", pins=pins)
    assert found.pipeline is not None
    lent = {chunk: place for (chunk, path), place in found.pipeline.borrowed.items() if path == "embed.weight"}
    here = found.parameters["embed.weight"]
    assert any(found.mesh_of(chunk) == found.mesh_of(0) and place != here for chunk, place in lent.items())
    check_whole(found)
    check_computes_the_same(found)
