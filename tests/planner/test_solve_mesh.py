"""Plans: their price is what the solver minimised, they fit into memory, and nothing they list beside them is
better."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from autopar.cluster.description import Cluster
from autopar.cost import collective_seconds
from autopar.errors import InfeasibleError, OptionsError
from autopar.ir.graph import Graph
from autopar.ir.placements import parse_placements, short
from autopar.options import Options
from autopar.passes.annotate.annotate import annotate
from autopar.passes.annotate.fold import fold_layers
from autopar.placement.baselines import Baseline
from autopar.placement.formulation import Instance, build_instance
from autopar.placement.prices import Prices
from autopar.planner import solve_mesh as planner
from autopar.planner.memory_limit import TooSlowError
from autopar.planner.mesh_solution import peak_bytes
from autopar.planner.request import PlanRequest, memory_limit_of, mesh_candidates
from autopar.planner.shared_work import SharedWork
from autopar.planner.solve_mesh import priced_baselines, solve_mesh
from autopar.planner.step_graphs import step_graph
from autopar.planner.timings import Timings
from autopar.planner.within_memory import WithinMemory
from autopar.plans.plan import Plan
from autopar.search.best_plan import best_plan
from autopar.solver.problem import Problem, Solution, evaluate, memory_of
from autopar.solver.solve import solve
from tests.helpers.marks import slow_but
from tests.helpers.models import Case, Stack, text
from tests.helpers.planning import make_request, requested, setting, slow_devices


def planned(name: str, mesh: tuple[int, ...], **changes: Any) -> Plan:
    return best_plan(requested(name, mesh, **changes), Timings())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_objective_is_the_cost_breakdown_for_real_models(name: str) -> None:
    plan = planned(name, (2, 2))
    assert sum(line.seconds for line in plan.lines) == pytest.approx(plan.objective, rel=1e-9)
    assert plan.predicted.step_seconds == pytest.approx(plan.objective, rel=1e-9)


@pytest.mark.parametrize("frozen", [0, 1])
def test_objective_is_the_cost_breakdown_where_a_layer_is_frozen(frozen: int) -> None:
    """Though equal layers choose alike, a frozen one reduces no gradients and is not updated."""
    model, batch = Stack(layers=3, width=16, hidden=32), text(8, 8)
    model.layers[frozen].requires_grad_(False)
    plan = best_plan(make_request(model, batch, (2, 2)), Timings())
    assert plan.predicted.step_seconds == pytest.approx(plan.objective, rel=1e-9)


def test_the_time_limit_is_that_of_the_whole_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Solvers that take all they are given: each gets half of what is left. Baselines are solved with counted work."""
    given: list[float] = []

    def at_once(problem: Problem, **arguments: Any) -> Solution:
        assert arguments["counted"]
        return replace(solve(problem, **arguments), seconds=0.0)

    def exhausting(problem: Problem, *, time_limit: float, **arguments: Any) -> Solution:
        given.append(time_limit)
        return replace(solve(problem, time_limit=20, **arguments), seconds=time_limit)

    monkeypatch.setattr("autopar.solver.solve.solve", exhausting)
    monkeypatch.setattr(planner, "solve", at_once)
    plan = planned("plain", (8,), mesh_search=True, time_limit=64.0, cluster=slow_devices())
    assert given == [64.0 / 2 ** (n + 1) for n in range(len(given))] and len(given) > 1
    assert any("solving took all of time_limit=64 s" in warning for warning in plan.warnings) == (given[-1] <= 1.0)


def test_without_time_there_is_still_a_plan_that_says_so() -> None:
    plan = planned("stack", (2, 2), time_limit=0.0)
    assert math.isfinite(plan.predicted.step_seconds) and plan.predicted.step_seconds > 0
    assert any("solving took all of time_limit=0 s" in warning for warning in plan.warnings)


def objectives(request: PlanRequest) -> tuple[float, float, float]:
    """Folded and unfolded objective, and the bound of the unfolded."""
    graph = annotate(step_graph(request.graph, request.loss, request.batch), request.mesh)
    prices = Prices.of(request.cluster, request.mesh, graph)
    found = []
    for folded in (fold_layers(graph), graph):
        instance = build_instance(folded, prices, optimizer="adamw", memory_limit=float(memory_limit_of(request)))
        found.append(solve(instance.problem, time_limit=20, gap=0.01, seed=0))
    return found[0].objective, found[1].objective, found[1].bound


@pytest.mark.parametrize("unequal", slow_but([False], [False, True]), ids=["equal layers", "first layer wider"])
def test_folding_costs_no_more_than_the_gap(unequal: bool) -> None:
    model = Stack(layers=4, unequal=unequal)
    folded, whole, bound = objectives(make_request(model, text(8, 8), (2, 2), slow_devices()))
    assert folded <= whole * 1.01
    assert folded <= bound * 1.02


def test_folding_makes_the_problem_smaller_not_another() -> None:
    model, batch = Stack(layers=6), text(8, 8)
    request = make_request(model, batch, (4,))
    graph = annotate(step_graph(request.graph, request.loss, request.batch), (4,))
    prices = Prices.of(request.cluster, (4,), graph)
    whole = build_instance(graph, prices, optimizer="adamw", memory_limit=1e12)
    folded = build_instance(fold_layers(graph), prices, optimizer="adamw", memory_limit=1e12)
    assert len(folded.names) < 0.5 * len(whole.names)
    solution = solve(folded.problem, time_limit=20, gap=0.01, seed=0)
    assignment = folded.assignment(solution.choices)
    assert (folded.chosen(assignment) == solution.choices).all()
    unfolded = whole.chosen(assignment)
    assert evaluate(whole.problem, unfolded) == pytest.approx(solution.objective, rel=1e-9)
    assert memory_of(whole.problem, unfolded) == memory_of(folded.problem, solution.choices)


def test_a_small_model_pays_whole_meetings() -> None:
    """Gradients that fill no bucket travel in one: together they cost what one collective of their bytes does."""
    cluster = replace(Cluster.get("dgx-a100-80gb"), synchronisation_seconds=1.0)
    request = make_request(Stack(layers=2), text(8, 8), (2, 2), cluster)
    graph = annotate(step_graph(request.graph, request.loss, request.batch), (2, 2))
    prices = Prices.of(request.cluster, (2, 2), graph)
    partial, whole = parse_placements("P,P"), parse_placements("R,R")
    sent = [node.type for node in graph.placeholders("param")]
    apart = sum(prices.table(kind, sent="bucketed").cost(partial, whole) for kind in sent)
    together = collective_seconds(cluster, (2, 2), "all_reduce", (0, 1), sum(int(kind.bytes) for kind in sent))
    assert together > 1.0
    assert apart == pytest.approx(together)


def wide() -> Case:
    return Stack(layers=3, width=32, hidden=128), text(8, 8)


@pytest.mark.slow
def test_memory_limit_is_kept_and_costs_time() -> None:
    free = best_plan(requested(wide, (4,)), Timings())
    least = smallest_limit(requested(wide, (4,), memory_limit=1))
    tight = best_plan(requested(wide, (4,), memory_limit=least, time_limit=16.0), Timings())
    assert tight.predicted.peak_bytes <= least == tight.memory_limit < free.predicted.peak_bytes
    assert tight.predicted.step_seconds > free.predicted.step_seconds
    sharded = [sum("S" in short(place.optimizer) for place in one.parameters.values()) for one in (tight, free)]
    assert sharded[0] > sharded[1]


class SoughtError(Exception):
    """Raised instead of tying layers only within stretches of depth."""


@pytest.mark.slow
def test_layers_that_differ_are_sought_only_where_the_limit_costs_more_than_the_gap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = requested(wide, (4,))
    graph = step_graph(request.graph, request.loss, request.batch)
    monkeypatch.setattr(planner, "untie_layers", Mock(side_effect=SoughtError))
    free, _ = solve_mesh(request, graph, Timings())
    needed = memory_of(free.instance.problem, free.solution.choices)
    for share in (1.01, 0.5):
        limited = replace(request, options=replace(request.options, memory_limit=int(share * needed)))
        if share > 1:
            near, _ = solve_mesh(limited, graph, Timings())
            assert near.solution.objective == free.solution.objective
        else:
            with pytest.raises(SoughtError):
                solve_mesh(limited, graph, Timings())


@pytest.mark.parametrize("limited", [False, True])
def test_what_is_not_worth_while_is_not_searched_further(limited: bool) -> None:
    """Where the program proves it, without and under a limit of memory that binds."""
    request = requested(wide, (4,))
    graph = step_graph(request.graph, request.loss, request.batch)
    free, _ = solve_mesh(request, graph, Timings())
    needed = memory_of(free.instance.problem, free.solution.choices)
    asked = replace(request, options=replace(request.options, memory_limit=int(0.6 * needed))) if limited else request
    best, priced = solve_mesh(asked, graph, Timings())
    same, _ = solve_mesh(replace(asked, worth=1.01 * best.solution.objective), graph, Timings())
    assert same.solution.objective == best.solution.objective
    short = 0.5 * free.solution.bound
    with pytest.raises(TooSlowError, match="take at least") as caught:
        solve_mesh(replace(asked, worth=short), graph, Timings())
    assert short <= caught.value.seconds <= best.solution.objective
    assert priced_baselines(replace(asked, worth=short), graph, Timings()) == priced


def test_a_program_with_less_memory_than_allowed_proves_nothing() -> None:
    request = replace(requested(wide, (4,)), worth=1e-12)
    graph = step_graph(request.graph, request.loss, request.batch)
    _, program = planner._formulate(request, graph, Timings())
    allowed, solve = float(memory_limit_of(request)), planner._solver(request, Timings())

    def within(limit: float) -> Instance:
        return replace(program, problem=replace(program.problem, memory_limit=limit))

    for limit in (allowed, math.inf):
        with pytest.raises(TooSlowError, match=r"take at least \d"):
            solve(within(limit), ())
    with pytest.raises(TooSlowError, match="take at least about") as caught:
        solve(within(allowed - 1.0), ())
    assert not caught.value.is_proven
    request = replace(
        request, worth=1.01 * planner._solver(replace(request, worth=math.inf), Timings())(program, ()).objective
    )
    assert planner._solver(request, Timings())(within(allowed - 1.0), ()).status != "infeasible"


@pytest.mark.parametrize("proven", [False, True])
def test_what_fits_is_not_lost_where_a_search_is_given_up(monkeypatch: pytest.MonkeyPatch, proven: bool) -> None:
    """By an estimate: if it is proven that nothing takes as little as is worth while, nothing is kept."""
    request = requested(wide, (4,))
    graph = step_graph(request.graph, request.loss, request.batch)
    free, _ = solve_mesh(request, graph, Timings())
    asked = replace(request, memory_limit=0.8 * peak_bytes(free))
    best, _ = solve_mesh(asked, graph, Timings())

    def given_up(own: WithinMemory, instance: Instance, *_: Any) -> Any:
        own.solve(instance, [instance.chosen(best.assignment)])
        raise TooSlowError("plans", 1.0, is_proven=proven)

    monkeypatch.setattr(WithinMemory, "best", given_up)
    monkeypatch.setattr(planner, "mix_layers", lambda _, __, solved, *___: solved)
    again = replace(asked, worth=2.0 * best.solution.objective, shared=SharedWork())
    if proven:
        with pytest.raises(TooSlowError):
            solve_mesh(again, graph, Timings())
        return
    kept, _ = solve_mesh(again, graph, Timings())
    assert peak_bytes(kept) <= 0.8 * peak_bytes(free)
    assert kept.solution.bound <= kept.solution.objective < again.worth


def smallest_limit(request: PlanRequest) -> int:
    with pytest.raises(InfeasibleError) as caught:
        best_plan(request, Timings())
    found = re.search(r"Options\(memory_limit=(\d+)\)", str(caught.value))
    assert found is not None
    return int(found[1])


def test_infeasible_limit_names_tensors() -> None:
    request = requested("stack", (2,), memory_limit=1000)
    with pytest.raises(
        InfeasibleError, match=r"(?s)mesh \(2,\) fits into 1000 B.*Largest tensors: .*embed\.weight f32\[257, 16\]"
    ):
        best_plan(request, Timings())


def test_default_limit_is_the_device_less_a_reserve() -> None:
    plan = planned("plain", (2,))
    memory = Cluster.get("dgx-a100-80gb").device.memory_bytes
    assert 0.8 * memory < plan.memory_limit < memory


def test_mesh_search_splits_one_axis_but_not_what_is_named_pinned_or_fixed() -> None:
    request = requested("plain", (8,), mesh_search=True)
    assert set(mesh_candidates(request)) == {(2, 4), (4, 2)}
    assert mesh_candidates(replace(request, axis_names=("dp",))) == [(8,)]
    assert mesh_candidates(replace(request, options=Options(mesh_search=False))) == [(8,)]
    assert mesh_candidates(replace(request, options=Options(pins={"*": "R"}))) == [(8,)]
    assert mesh_candidates(replace(request, mesh=(2, 1, 2))) == [(2, 1, 2)]
    assert mesh_candidates(replace(request, mesh=(3,))) == [(3,)]


@pytest.mark.parametrize(
    ("pins", "path", "place"),
    [
        ({"embed.weight": "S(0),R"}, "embed.weight", "(S(0),R)"),
        pytest.param({"layers.*.1.weight": "R,S(0)"}, "layers.2.1.weight", "(R,S(0))", marks=pytest.mark.slow),
        pytest.param({"layers.0": "S(0),S(1)"}, "layers.0", "(S(0),S(1))", marks=pytest.mark.slow),
    ],
)
def test_pins_are_honoured(pins: dict[str, str], path: str, place: str) -> None:
    plan = planned("stack", (2, 2), pins=pins)
    assert short(plan.placements[path]) == place
    assert plan.pinned == pins


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"embed.weight": "S(0)"}, r"'S\(0\)' has 1 placements, but the mesh \(2, 2\) has 2 axes; write one for each"),
        ({"emebd.weight": "R,R"}, r"'emebd.weight' matches no parameter and no module"),
        (
            {"embed.weight": "S(2),R"},
            r"cannot be met: no strategy of embed.weight, f32\[257, 16\].*possible are .*\(S\(0\),R\)",
        ),
        ({"embed.weight": "S(0),X"}, r"'X' is not a placement"),
        ({"layers.0": "S(0),P(max)"}, r"cannot be met: no strategy of layers.0"),
    ],
)
def test_pins_that_cannot_be_met(pins: dict[str, str], message: str) -> None:
    with pytest.raises(OptionsError, match=message):
        planned("stack", (2, 2), pins=pins)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stages": 0}, "stages=0 is not a positive whole number"),
        ({"precision": "int8"}, "precision=.int8. is not known; one of fp32, bf16, fp16"),
        ({"recompute": "all"}, "recompute='all' is not known"),
        ({"optimizer": "adamv"}, "unknown optimizer 'adamv'.*adamw"),
        ({"zero": 4}, "zero=4 is not a ZeRO stage"),
        ({"memory_limit": 0}, "memory_limit=0 is not a positive number"),
        ({"memory_limit": "80 gigs"}, "memory_limit='80 gigs' is not a size in bytes; write 10GiB"),
        ({"schedule": "2f2b"}, "schedule='2f2b' is not known; one of 'gpipe'.*'solved'"),
        ({"time_limit": -1.0}, "time_limit=-1.0: not seconds"),
        ({"gap": float("nan")}, "gap=nan: not a relative distance"),
        ({"seed": 0.5}, "seed=0.5 is not a seed: a whole number"),
        ({"seed": True}, "seed=True is not a seed"),
        ({"seed": 2**64}, f"seed={2**64} is not a seed"),
        ({"pins": ["a"]}, r"pins=\['a'\] is not a dict of strings"),
        ({"pins": {"a": 1}}, "is not a dict of strings"),
    ],
)
def test_options_that_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionsError, match=message):
        Options(**change)


class Odd(nn.Module):
    """Has an operation nobody has a rule for."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.linalg.matrix_exp(self.linear(x)).sum()
        return found


def test_an_operation_without_a_rule_is_reported_with_its_price() -> None:
    request = make_request(Odd(), (torch.randn(8, 8),), (4,))
    plan = best_plan(request, Timings())
    found: Graph = setting(request).graph
    ops = {n.op for n in found.nodes if "matrix_exp" in n.op}
    assert ops and ops <= set(plan.fallbacks)
    for op in ops:
        assert any(op in warning and "ms a step" in warning for warning in plan.warnings)


def test_many_axes_are_joined_or_refused() -> None:
    request = requested("plain", (2, 2, 1, 2, 2), mesh_search=True)
    assert mesh_candidates(request) == [(2, 2, 4), (2, 4, 2), (4, 2, 2)]
    with pytest.raises(OptionsError, match=r"has 5 axes, and names, pins.*Join axes, as in the mesh \(4, 2, 2\)"):
        mesh_candidates(replace(request, options=Options(mesh_search=False)))


@pytest.mark.slow
def test_a_plan_for_many_axes_has_fewer() -> None:
    plan = planned("plain", (2, 2, 2, 2), mesh_search=True)
    assert len(plan.mesh) <= 3 and plan.mesh != (2, 2, 2, 2)


def one_layer_llama() -> Case:
    """A Llama of one wide layer, without storage."""
    config = LlamaConfig(hidden_size=1024, intermediate_size=2816, num_hidden_layers=1, num_attention_heads=16)
    with torch.device("meta"):
        tokens = torch.empty((128, 4096), dtype=torch.int64)
        return LlamaForCausalLM(config), {"input_ids": tokens, "labels": tokens}


def test_baselines_in_16_bits_are_solved_to_within_their_gap() -> None:
    request = requested(one_layer_llama, (4, 4), precision="bf16")
    graph, timings = step_graph(request.graph, request.loss, request.batch), Timings()
    _, program = planner._formulate(request, graph, timings)
    gaps = {line.name: solution.gap for line, solution in planner._solve_baselines(request, program, timings)}
    assert list(gaps) == ["data parallel", "FSDP", "tensor parallel 4 x data parallel"]
    assert max(gaps.values()) <= planner.BASELINE_GAP


def test_a_baseline_that_was_solved_poorly_says_what_it_takes_at_least() -> None:
    line, solution = Baseline("FSDP", Mock(spec=Instance)), Solution(np.zeros(1, np.int64), 0.8, 0.3, "feasible", 1.0)
    assert planner._named(line, solution) == "FSDP: solved to within 62% only, at least 300 ms"
    assert planner._named(line, replace(solution, bound=0.79)) == "FSDP"
