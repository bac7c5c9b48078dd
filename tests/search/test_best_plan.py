"""The search over stages: its plans hold together, what is fixed is honoured, what cannot be had is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import autopar
from autopar import Options, OptionsError, Plan
from autopar.cluster.description import Cluster
from autopar.cost.pipeline.prices import SharedProcessors
from autopar.errors import InfeasibleError
from autopar.ir.microbatching import Repeats
from autopar.planner.memory_limit import TooSlowError
from autopar.planner.timings import Timings
from autopar.schedule.check import check
from autopar.schedule.named import SCHEDULES
from autopar.search import best_plan as search
from autopar.search import stage_problems as stage_programs
from autopar.search.candidate import RULE, Candidate, Excluded, Tried, why_excluded
from autopar.search.stage_meshes import StageLayout, layout_for, layout_of, layouts, microbatch_counts
from autopar.search.stage_prices.pipeline_breakdown import shared_processors
from tests.helpers.models import Case
from tests.helpers.planning import CLUSTER, planned, requested


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """Four residual blocks; the head is the embedding's weight."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.norm(x) @ self.embed.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@cache
def model_of(batch: int) -> Callable[[], Case]:
    ids = torch.zeros(batch, 6, dtype=torch.long)
    return lambda: (Model(), {"ids": ids, "labels": ids})


def plan(mesh: tuple[int, ...], batch: int = 8, cluster: Cluster | str = CLUSTER, **options: object) -> Plan:
    return planned(model_of(batch), mesh, cluster, **options)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ((4,), {"stages": 4, "microbatches": 4, "schedule": "1f1b"}),
        ((2, 2), {"stages": 2, "microbatches": 2}),
        ((3,), {"stages": 3, "microbatches": 2, "schedule": "gpipe"}),
        ((2, 2), {"stages": 1, "microbatches": 4}),
    ],
)
def test_a_staged_plan_holds_together(mesh: tuple[int, ...], options: dict[str, object]) -> None:
    found = plan(mesh, **options)
    assert found.pipeline is not None
    check(found.pipeline.schedule)
    assert (found.stages, found.microbatches) == (options["stages"], options["microbatches"])
    assert found.pipeline.schedule.stages == found.stages
    assert max(found.pipeline.schedule.placement) == found.stages - 1
    parts = found.predicted
    made = parts.compute_seconds + parts.comm_seconds + parts.bubble_seconds
    assert parts.step_seconds == pytest.approx(made)
    if found.stages == 1:
        assert parts.step_seconds == pytest.approx(found.objective, rel=1e-9) and parts.bubble_seconds == 0.0
    by_stage = [sum(line.seconds for line in found.lines if line.stage == s) for s in range(found.stages)]
    assert max(by_stage) == pytest.approx(parts.compute_seconds + parts.comm_seconds)
    assert sum(h.bytes for h in found.holdings) + parts.temporary_bytes == parts.peak_bytes
    assert Plan.from_json(found.to_json()) == found == Plan.from_text(found.to_text())


def test_stages_that_share_processors() -> None:
    """A stage that computes alone has processors of the waiting ones: the step is quicker than with one for each, and
    its parts, and what simulates it again, still make it up."""
    alone = Cluster.get("dgx-a100-80gb")
    fixed = {"stages": 4, "microbatches": 4, "schedule": "1f1b"}
    apart, shared = (plan((4,), cluster=c, **fixed) for c in (alone, replace(alone, sharing=4, cores=2.0)))
    parts = shared.predicted
    made = parts.compute_seconds + parts.comm_seconds + parts.bubble_seconds - parts.freed_seconds
    assert apart.predicted.freed_seconds == 0.0 < parts.freed_seconds
    assert parts.step_seconds == pytest.approx(made)
    assert parts.step_seconds < apart.predicted.step_seconds
    assert autopar.step_timeline(shared).seconds == pytest.approx(parts.step_seconds)
    assert "quicker on cores that waiting ranks leave free -" in str(shared)
    assert Plan.from_json(shared.to_json()) == shared == Plan.from_text(shared.to_text())


def test_prices_hold_for_all_devices_there_are_at_work() -> None:
    cluster = replace(Cluster.get("dgx-a100-80gb"), sharing=8, cores=2.0)
    assert shared_processors(cluster, (2,) * 4) == SharedProcessors((0, 0, 0, 0), (4.0, 2.0, 4 / 3, 1.0))
    assert shared_processors(cluster, (1,) * 4) == SharedProcessors((0, 0, 0, 0), (2.0, 2.0, 4 / 3, 1.0))
    assert shared_processors(cluster, (8,) * 2) is None
    assert shared_processors(cluster, (4,) * 4) == SharedProcessors((0, 0, 1, 1), (2.0, 1.0))


def test_unequal_stages_count_with_their_own_devices() -> None:
    cluster = replace(Cluster.get("dgx-a100-80gb"), sharing=4, cores=1.0)
    assert shared_processors(cluster, (1, 3)) == SharedProcessors((0, 0), (4.0, 2.0, 4 / 3, 1.0), (1, 3))
    # The third stage begins on the second host.
    found = shared_processors(cluster, (3, 1, 2, 2))
    assert found == SharedProcessors((0, 0, 1, 1), (4.0, 2.0, 4 / 3, 1.0), (3, 1, 2, 2))
    assert shared_processors(cluster, (4, 3)) is None


def test_a_schedule_of_one_chunk_a_stage_saves_memory() -> None:
    options = {"stages": 4, "microbatches": 4, "schedule": "1f1b"}
    peak = plan((4,), batch=32, **options).predicted.peak_bytes
    limit = int(0.9 * peak)
    assert plan((4,), batch=32, memory_limit=limit, **options).predicted.peak_bytes <= limit < peak


def test_a_pin_fixes_the_stage_of_a_module() -> None:
    found = plan((2,), stages=2, microbatches=2, schedule="1f1b", pins={"blocks.2": "stage 0", "blocks.3": "stage 1"})
    where = {line.module: line.stage for line in found.lines if line.kind == "compute" and line.phase == "forward"}
    assert where["blocks.2.up"] == where["blocks.2.down"] == 0
    assert where["blocks.3.up"] == 1


class Chain(nn.Module):
    """The same bytes cross between any two layers; ``norm`` couples the samples of a batch."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.norm = nn.BatchNorm1d(16) if norm else nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        found: torch.Tensor = self.norm(x).pow(2).mean()
        return found


@cache
def chain_of(norm: bool) -> Callable[[], Case]:
    return lambda: (Chain(norm), (torch.randn(8, 16),))


def chained(mesh: tuple[int, ...] = (2,), norm: bool = False, **options: object) -> Plan:
    return planned(chain_of(norm), mesh, **options)


def stages_of(found: Plan) -> dict[str, int]:
    lines = [line for line in found.lines if line.kind == "compute" and line.phase == "forward"]
    return {line.module: line.stage for line in lines if line.module}


def test_a_chain_of_equal_layers_is_cut_in_the_middle() -> None:
    found = chained(stages=2, microbatches=2, schedule="1f1b")
    where = stages_of(found)
    assert [where[f"layers.{i}"] for i in range(4)] == [0, 0, 1, 1]


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_pins_say_where_a_chain_is_cut(cut: int) -> None:
    pins = {f"layers.{cut - 1}": "stage 0", f"layers.{cut}": "stage 1"}
    where = stages_of(chained(stages=2, microbatches=2, schedule="1f1b", pins=pins))
    assert [where[f"layers.{i}"] for i in range(4)] == [int(i >= cut) for i in range(4)]


def test_pins_within_a_layer_are_cut_apart() -> None:
    """Where nothing would be cut of itself."""
    pins = {"blocks.1.up": "stage 0", "blocks.1.down": "stage 1"}
    where = stages_of(plan((2,), stages=2, microbatches=2, schedule="1f1b", pins=pins))
    assert where["blocks.1.up"] == 0 and where["blocks.1.down"] == 1


@pytest.mark.parametrize("pins", [{"layers.0": "stage 1", "layers.3": "stage 0"}, {"*": "stage 1"}])
def test_pins_that_no_cut_keeps(pins: dict[str, str]) -> None:
    with pytest.raises(OptionsError, match="no cut into 2 stages keeps the pins"):
        chained(stages=2, pins=pins, schedule="1f1b")


@pytest.mark.parametrize("options", [{"stages": 2}, {"schedule": "1f1b"}])
def test_what_couples_samples_goes_through_stages_as_one_microbatch(options: dict[str, object]) -> None:
    """Where the number is not fixed; where it is, it cannot be had."""
    assert chained(norm=True, **options).microbatches == 1
    with pytest.raises(OptionsError, match=r"microbatches=2: .*in norm.* couples the samples"):
        chained(norm=True, **options, microbatches=2)


@pytest.mark.slow
def test_the_error_names_a_limit_in_which_the_stages_fit() -> None:
    fixed: dict[str, object] = {"stages": 2, "microbatches": 4}
    with pytest.raises(
        InfeasibleError,
        match=r"fits into 1000 B per device.*twice the devices \(to about",
    ) as caught:
        chained(**fixed, memory_limit=1000)
    named = re.search(r"Options\((.*?)\)", str(caught.value))
    assert named is not None
    words = dict(pair.split("=") for pair in named[1].split(", "))
    assert {name: int(words[name]) for name in fixed} == fixed
    limit = int(words["memory_limit"])
    assert chained(**fixed, memory_limit=limit).predicted.peak_bytes <= limit
    with pytest.raises(InfeasibleError):
        chained(**fixed, memory_limit=limit // 2)


def test_less_memory_than_one_stage_has_is_spread_over_stages() -> None:
    whole = plan((2,), stages=1, zero=0)
    limit = int(whole.predicted.peak_bytes * 0.8)
    found = plan((2,), stages=2, microbatches=4, memory_limit=limit)
    assert found.predicted.peak_bytes <= limit


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"stages": 2, "microbatches": 3}, "does not divide into 3 microbatches"),
        ({"stages": 3}, "does not divide into 3 stages"),
        ({"stages": 2, "schedule": "2f2b"}, "schedule='2f2b' is not known; one of 'gpipe'"),
        ({"microbatches": 0}, "not a positive whole number"),
        ({"stages": 2, "pins": {"nowhere": "stage 1"}}, "matches no"),
        ({"stages": 2, "pins": {"block.0": "stage 1"}}, "did you mean 'blocks.0'"),
        ({"stages": 2, "pins": {"blocks.0.up.bias": "stage 1"}}, "names the parameter .*: pin 'blocks.0.up'"),
        ({"stages": 2, "pins": {"blocks.0": "stag 1"}}, "the pin 'blocks.0': .* or 'stage 1' for the pipeline"),
        ({"stages": 1, "schedule": "zb-v"}, "'zb-v' orders the work of pipeline stages, but stages=1"),
        ({"stages": 2, "pins": {"blocks.0": "stage 7"}}, "there are 2 stages"),
        ({"zero": 1, "pins": {"blocks.0": "stage 0"}}, r"say how many stages there are, Options\(stages=2\)"),
    ],
)
def test_what_cannot_be_had_is_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(OptionsError, match=said):
        plan((2, 2), **options)


def test_a_schedule_needs_several_devices() -> None:
    with pytest.raises(OptionsError, match=r"the mesh \(1,\) has one device"):
        plan((1,), schedule="1f1b")
    with pytest.raises(OptionsError, match=r"the mesh \(1,\) has one device"):
        plan((1,), pins={"blocks.0": "stage 0"})


def test_more_stages_than_regions_names_how_many_there_are() -> None:
    with pytest.raises(OptionsError, match="regions"):
        plan((64,), batch=64, stages=64)


def test_stages_take_the_outermost_devices() -> None:
    assert layout_for((2, 4), 2) == StageLayout(2, (4,), (1,))
    assert layout_for((2, 4), 4) == StageLayout(4, (2,), (1,))
    assert layout_for((4, 2), 2) == StageLayout(2, (2, 2), (0, 1))
    assert layout_for((2, 3), 6) == StageLayout(6, (1,), (1,))
    assert layout_for((4, 3), 3) is None
    assert [found.stages for found in layouts((2, 2), None)] == [2, 4]


def test_microbatches_tried_divide_the_batch() -> None:
    assert microbatch_counts(12, 2, None) == (1, 2, 3, 4, 6, 12)
    assert microbatch_counts(7, 4, None) == (1, 7) and microbatch_counts(7, 4, 3) == (3,)
    assert microbatch_counts(360, 4, None) == (1, 2, 4, 8, 15, 30) and microbatch_counts(2520, 7, None)[:2] == (1, 2)


class Lopsided(nn.Module):
    """The head is far heavier than all the blocks together."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(64) for _ in range(5))
        self.head = nn.Linear(64, 4096)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x), labels)


def heavy_head() -> Case:
    return Lopsided(), {"x": torch.randn(512, 64), "labels": torch.randint(0, 4096, (512,))}


def lopsided(**options: object) -> Plan:
    return planned(heavy_head, (4,), stages=4, microbatches=4, **options)


def test_a_schedule_made_to_measure_is_quicker_in_the_memory_of_1f1b() -> None:
    named = lopsided(schedule="1f1b")
    limit = int(1.25 * named.predicted.peak_bytes)  # the search estimates, plans say what was rehearsed
    solved, searched = (lopsided(schedule=schedule, memory_limit=limit) for schedule in ("solved", None))
    assert solved.pipeline is not None
    check(solved.pipeline.schedule)
    assert solved.schedule == solved.pipeline.schedule.name == "solved"
    assert solved.predicted.step_seconds < 0.95 * named.predicted.step_seconds
    assert solved.predicted.peak_bytes <= limit
    assert Plan.from_json(solved.to_json()) == solved == Plan.from_text(solved.to_text())
    assert searched.predicted.step_seconds == solved.predicted.step_seconds


def test_a_named_schedule_that_nothing_beats_is_kept_and_said() -> None:
    """One microbatch goes there and back, whatever the schedule."""
    found = plan((2,), stages=2, microbatches=1, schedule="solved")
    assert found.schedule in SCHEDULES
    assert any(f"{found.schedule} is kept" in warning for warning in found.warnings)
    assert not any("is kept" in warning for warning in lopsided().warnings)


def test_on_shared_cores_stages_that_nobody_asked_for_must_win_clearly() -> None:
    request = requested("plain", (2,))
    shared = replace(request, options=Options(), cluster=replace(request.cluster, sharing=2, cores=1.0))
    whole = Candidate(1.0, None, Mock(), Mock())
    pipeline = Candidate(0.9, StageLayout(2, (1,), ()), Mock(), Mock())
    assert search._safety_factor(shared, whole) == 1 < search._safety_factor(shared, pipeline)
    assert search._safety_factor(replace(shared, options=Options(stages=2)), pipeline) == 1
    assert search._safety_factor(replace(shared, cluster=request.cluster), pipeline) == 1
    assert "Options(stages=2)" in next(search._rejected([whole, pipeline], whole))
    assert not list(search._rejected([whole, pipeline], pipeline))


@pytest.mark.parametrize("best", [1.7, 1.77])
def test_stages_that_cannot_win_are_not_sought_with_less_memory(monkeypatch: pytest.MonkeyPatch, best: float) -> None:
    """Two stages that take at least 4 s together, 2 s each, beside a plan of ``best`` seconds. Bills were seen 11%
    under their share of the program's bound, so that 1.77 s are no reason yet."""
    solution = Mock(**{"unlimited": 4.0, "breakdown.seconds": 5.0, "prices.devices": 2})
    solution.prices.on_block.return_value = solution.prices
    solve_only = Mock(return_value=solution)
    monkeypatch.setattr(stage_programs, "solve_only", solve_only)
    request = requested("plain", (2,))
    programs = stage_programs.StagePrograms(request, StageLayout(2, (2,), (0,)), best, Timings())
    repeats = Repeats(2, 1, accumulates=True, stages=2)
    # Limits are those of all four devices together; each stage has two.
    assert programs.solve(request.graph, repeats, 200.0, 20.0) == (solution, solution)
    if best * 1.15 < 2.0:
        with pytest.raises(InfeasibleError, match="2 stages take at least about 2 s"):
            programs.solve(request.graph, repeats, 180.0, 20.0)
    else:
        assert programs.solve(request.graph, repeats, 180.0, 20.0) == (solution, solution)
        assert [call.args[0].memory_limit for call in solve_only.call_args_list] == [100.0, 90.0]


def test_only_the_first_search_asks_whether_stages_are_worth_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """With less memory, quicker stages may be missing; and what one of them takes is an estimate."""
    solution = Mock(**{"unlimited": 4.0, "breakdown.seconds": 5.0})
    solve_only = Mock(side_effect=[solution, solution, TooSlowError("plans", 4.6)])
    monkeypatch.setattr(stage_programs, "solve_only", solve_only)
    request, layout = replace(requested("plain", (2,)), worth=1.0), StageLayout(2, (2,), (0,))
    programs = stage_programs.StagePrograms(request, layout, math.inf, Timings())
    repeats = Repeats(2, 1, accumulates=True, stages=2)
    for limit in (200.0, 180.0):
        programs.solve(request.graph, repeats, limit, 20.0)
    assert [call.args[0].worth for call in solve_only.call_args_list] == [pytest.approx(2.3), math.inf]
    with pytest.raises(TooSlowError, match="2 stages take at least about 2") as caught:
        stage_programs.StagePrograms(request, layout, math.inf, Timings()).solve(request.graph, repeats, 200.0, 20.0)
    assert caught.value.seconds == pytest.approx(2.0) and not caught.value.is_proven
    assert why_excluded(Tried(excluded=(Excluded(RULE, caught.value),)), 1)[RULE].startswith("at least about 2")


def test_stages_of_unequal_devices_are_sought_with_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each operation may lie where it takes least, so what the whole step takes on each stage bounds nothing."""
    solution = Mock(**{"unlimited": 4.0, "breakdown.seconds": 5.0})
    solve_only = Mock(return_value=solution)
    monkeypatch.setattr(stage_programs, "solve_only", solve_only)
    request = replace(requested("plain", (3,)), worth=1e-9)
    programs = stage_programs.StagePrograms(request, layout_of((3,), (2, 1)), 1e-9, Timings())
    repeats = Repeats(2, 1, accumulates=True, stages=2)
    for limit in (200.0, 180.0):
        assert programs.solve(request.graph, repeats, limit, 20.0) == (solution, solution)
    assert {call.args[0].worth for call in solve_only.call_args_list} == {math.inf}


def test_stages_need_a_loss() -> None:
    """Without one they are not chosen, and where they are asked for the error says how to give it."""
    batch = (torch.randn(8, 16),)
    blocks = nn.Sequential(*(Block(16) for _ in range(4)))
    free = autopar.plan(blocks, (2,), batch, cluster=CLUSTER)
    assert free.pipeline is None
    for wanted in (Options(stages=2), Options(stages=1, microbatches=2)):
        with pytest.raises(OptionsError, match=r"returns none for this batch: pass the labels .* loss_fn\(output\)"):
            autopar.plan(blocks, (2,), batch, cluster=CLUSTER, options=wanted)
    given = autopar.plan(
        blocks, (2,), batch, cluster=CLUSTER, options=Options(stages=2), loss_fn=lambda out: out.square().mean()
    )
    assert given.stages == 2
