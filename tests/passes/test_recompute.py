"""Recomputation: the pass, the choice, its price, and that nothing changes but memory and time."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import OptionsError
from autopar.ir.assignment import Assignment
from autopar.ir.graph import Graph
from autopar.ir.node import SAVED_ACTIVATION
from autopar.ir.reshard import Collective
from autopar.options import Options
from autopar.passes.lower.collectives_read_back import collectives_of, difference
from autopar.passes.recompute.attention import inside_attention
from autopar.passes.recompute.recomputable import recomputable
from autopar.passes.recompute.recompute import Recompute, recomputed
from autopar.placement.prices import BUCKET_BYTES
from autopar.planner import peaks
from autopar.planner.memory_limit import widened
from autopar.planner.request import PlanRequest
from autopar.planner.shared_work import SharedWork
from autopar.planner.timings import Timings
from autopar.plans.plan import Plan
from autopar.search.best_plan import best_plan
from autopar.solver.problem import evaluate
from tests.helpers.marks import slow_but
from tests.helpers.models import Case, Stack, text
from tests.helpers.pass_text import check
from tests.helpers.planning import CLUSTER, Setting, make_request, requested, setting
from tests.helpers.simulate import World
from tests.passes.test_lower import programs, random_assignment

CHAIN = """\
graph()
%x: f32[4, 4] = input("x")
%w: f32[4, 4] = param("w")
%d: f32[4, 4] = tangent("0")
%h: f32[4, 4] = aten.mm.default(%x, %w)
%h_rest: f32[4, 4] = autopar.saved(%h)
%y: f32[4, 4] = aten.tanh.default(%h_rest)
%y_rest: f32[4, 4] = autopar.saved(%y)
backward %g: f32[4, 4] = aten.mul.Tensor(%d, %y_rest)
backward %k: f32[4, 4] = aten.mul.Tensor(%g, %h_rest)
return output "0" = %y_rest
return gradient "w" = %k
"""


def body(graph: Graph) -> list[str]:
    return [line.strip() for line in graph.to_text().splitlines() if "_recomputed" in line or "backward" in line]


def test_copies_stand_before_their_first_use() -> None:
    everything = Recompute(frozenset(("h", "h_rest", "y", "y_rest")))
    check(
        everything,
        CHAIN,
        """
        graph()
        %x: f32[4, 4] = input("x")
        %w: f32[4, 4] = param("w")
        %d: f32[4, 4] = tangent("0")
        %h: f32[4, 4] = aten.mm.default(%x, %w)
        %h_rest: f32[4, 4] = autopar.saved(%h)
        %y: f32[4, 4] = aten.tanh.default(%h_rest)
        %y_rest: f32[4, 4] = autopar.saved(%y)
        backward %h_recomputed: f32[4, 4] = aten.mm.default(%x, %w)
        backward %h_rest_recomputed: f32[4, 4] = autopar.saved(%h_recomputed)
        backward %y_recomputed: f32[4, 4] = aten.tanh.default(%h_rest_recomputed)
        backward %y_rest_recomputed: f32[4, 4] = autopar.saved(%y_recomputed)
        backward %g: f32[4, 4] = aten.mul.Tensor(%d, %y_rest_recomputed)
        backward %k: f32[4, 4] = aten.mul.Tensor(%g, %h_rest_recomputed)
        return output "0" = %y_rest
        return gradient "w" = %k
        """,
    )
    assert everything(Graph.from_text(CHAIN)).kept == frozenset()


def test_a_copy_reads_what_is_kept() -> None:
    graph = Graph.from_text(CHAIN)
    made = Recompute(recomputable(graph).chain(frozenset(("y_rest",))))(graph)
    assert body(made)[0] == "backward %y_recomputed: f32[4, 4] = aten.tanh.default(%h_rest)"
    assert made.kept == {"h_rest"}


def test_what_nothing_keeps_gets_a_rest() -> None:
    lines = [line for line in CHAIN.splitlines() if "h_rest: " not in line and "%k: " not in line]
    graph = Graph.from_text("\n".join(lines).replace("%h_rest", "%h").replace("= %k", "= %g") + "\n")
    made = Recompute(frozenset(("y", "y_rest")))(graph)
    assert body(made)[0] == "backward %y_recomputed: f32[4, 4] = aten.tanh.default(%h_rest)"
    assert made.kept == {"h_rest"}


def layers() -> Case:
    return Stack(layers=3, hidden=64), text(8, 8)


@cache
def stack(mesh: tuple[int, ...]) -> tuple[PlanRequest, Setting]:
    request = requested(layers, mesh)
    return request, setting(request)


@pytest.mark.parametrize("mesh", slow_but([(2,)], [(2,), (2, 2)]))
def test_any_choice_of_values_gives_the_same_bits_and_does_what_its_cost_breakdown_says(mesh: tuple[int, ...]) -> None:
    request, found = stack(mesh)
    torch.manual_seed(0)
    model = Stack(layers=3, hidden=64)
    values: dict[str, Any] = {**dict(model.named_parameters()), **text(8, 8)}
    values = {name: value.detach() for name, value in values.items()}
    tangents = {node.target: torch.ones(()) for node in found.graph.placeholders("tangent")}
    possible = recomputable(found.graph)
    rests = sorted(name for name in possible.nodes if found.graph[name].op == SAVED_ACTIVATION)
    assert len(rests) > 8 and possible.full
    for seed in range(2):
        kept = random_assignment(found.graph, mesh, seed)
        dropped = frozenset(random.Random(seed).sample(rests, len(rests) // (2 - seed)))
        again = replace(kept, recomputed=possible.chain(dropped))
        graph, whole = recomputed(found.graph, again)
        assert not dropped & graph.kept
        plain = World(programs(found.graph, kept, found.prices)).step(values, tangents)
        other = World(programs(graph, whole, found.prices)).step(values, tangents)
        for before, after in zip(plain, other, strict=True):
            assert all(torch.equal(before[name], after[name]) for name in before)
        changed = Setting(graph, found.prices)
        assert difference(collectives_of(changed.program(whole, bucket=BUCKET_BYTES)), priced(changed, whole)) == ()
        instance = widened(instance_of(request, found), Options(offload=False))
        chosen = instance.chosen(again)
        assert evaluate(instance.problem, chosen) == pytest.approx(changed.breakdown(whole).seconds, rel=1e-9)


def priced(found: Setting, assignment: Assignment) -> Counter[Collective]:
    return Counter(wire for line in found.breakdown(assignment).lines for wire in line.collectives)


def instance_of(request: PlanRequest, found: Setting) -> Any:
    from autopar.placement.formulation import build_instance

    return build_instance(found.graph, found.prices, optimizer="adamw", memory_limit=1e12)


def planned(request: PlanRequest, **options: Any) -> Plan:
    return best_plan(replace(request, options=replace(request.options, **options)), Timings())


@pytest.mark.slow
def test_policies_trade_seconds_for_bytes() -> None:
    request, _ = stack((2,))
    none, full = planned(request, recompute="none"), planned(request, recompute="full")
    assert none.recomputed == () and full.recomputed
    assert full.predicted.activation_bytes < none.predicted.activation_bytes
    assert full.predicted.step_seconds > none.predicted.step_seconds
    assert full.objective == pytest.approx(sum(line.seconds for line in full.lines), rel=1e-9)
    assert Plan.from_json(full.to_json()) == full == Plan.from_text(full.to_text())
    assert planned(request).recomputed == ()


class Wide(nn.Module):
    """Blocks whose hidden values are most of what a step holds."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
            for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.pow(2).mean()


def wide() -> Case:
    return Wide(), (torch.randn(512, 8),)


@cache
def wide_and_free() -> tuple[PlanRequest, Plan]:
    request = requested(wide, (2,), time_limit=8.0)
    return request, planned(request, recompute="none")


@pytest.mark.slow
def test_what_does_not_fit_is_recomputed() -> None:
    request, free = wide_and_free()
    limit = int(0.7 * free.predicted.peak_bytes)
    found = planned(request, memory_limit=limit)
    assert found.recomputed and found.predicted.peak_bytes <= limit
    assert found.predicted.step_seconds > free.predicted.step_seconds
    assert sum(h.bytes for h in found.holdings) + found.predicted.temporary_bytes == found.predicted.peak_bytes


@pytest.mark.slow
def test_recomputation_is_tried_where_only_the_rehearsed_peak_exceeds_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the program deems to fit, and the rehearsal of the step not, fits with values recomputed."""
    request, free = wide_and_free()
    rehearsed = peaks.peak_bytes
    more = int(0.3 * free.predicted.peak_bytes)
    monkeypatch.setattr(peaks, "peak_bytes", lambda found: rehearsed(found) + more)
    own = replace(request, shared=SharedWork())  # Without what was measured already.
    found = planned(own, memory_limit=int(1.1 * free.predicted.peak_bytes))
    assert found.recomputed and found.predicted.peak_bytes + more <= found.memory_limit


class Written(nn.Module):
    """Attention written out, in layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"qkv": nn.Linear(8, 24), "out": nn.Linear(8, 8)}) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            q, k, v = layer["qkv"](x).chunk(3, -1)  # type: ignore[index]
            x = x + layer["out"]((q @ k.transpose(1, 2)).softmax(-1) @ v)  # type: ignore[index]
        return x.pow(2).mean()


def test_selective_is_the_inside_of_attention() -> None:
    found = setting(make_request(Written(), (torch.randn(2, 6, 8),), (1,)))
    possible = recomputable(found.graph)
    sizes = {tuple(map(int, found.graph[name].type.shape)) for name in possible.selective}
    assert possible.selective < possible.full or not possible.full
    assert sizes and all(shape[-2:] in ((6, 6), (6, 1)) for shape in sizes)


class Scores(nn.Module):
    """Scores of attention, in modules of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.normalised, self.scale = nn.Softmax(-1), nn.ReLU()

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return self.normalised(self.scale(q @ k.transpose(1, 2)))  # type: ignore[no-any-return]


class Crossed(nn.Module):
    """Two attentions one after the other, the second to what the first read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Scores(), Scores()
        self.between = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.between(self.first(x, x) @ x).tanh()
        return (self.second(y, x) @ x).pow(2).mean()


def test_the_inside_of_attention_may_be_in_other_modules() -> None:
    """Nothing between the two attentions is inside of one."""
    graph = setting(make_request(Crossed(), (torch.randn(2, 6, 8),), (1,))).graph
    names = recomputable(graph).selective
    assert {graph[name].module.rpartition(".")[2] for name in names} == {"normalised", "scale"}
    assert all(graph[name].type.shape[-1] in (6, 1) for name in names)
    assert {graph[name].op for name in inside_attention(graph)}.isdisjoint({"aten.tanh.default", "aten.mm.default"})


class Masked(Written):
    """Every layer masks its scores; the mask is one constant of the graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer["mask"](layer["out"](x))  # type: ignore[index]
        return x.pow(2).mean()

    class Mask(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores = x @ x.transpose(1, 2)
            ahead = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            return scores.masked_fill(ahead, float("-inf")).softmax(-1) @ x

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer["mask"] = Masked.Mask()  # type: ignore[index,operator]


def test_layers_that_share_a_constant_can_all_be_recomputed() -> None:
    """The causal mask is computed in the first layer alone, and may be computed again for each."""
    graph = setting(make_request(Masked(), (torch.randn(2, 6, 8),), (1,))).graph
    possible = recomputable(graph)
    chosen = {possible.layers[name] for name in possible.selective}
    assert chosen == {"layers.0", "layers.1"}


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(OptionsError, match=r"recompute='half' is not known"):
        Options(recompute="half")  # type: ignore[arg-type]


PIPELINE = {"stages": 2, "microbatches": 2, "schedule": "1f1b"}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"stages": 1}, PIPELINE], ids=str)
def test_processes_agree_with_one(options: dict[str, Any]) -> None:
    settings = Options(recompute="full", mesh_search=False, **options)
    report = autopar.verify(Stack(), (2,), text(8, 8), cluster=CLUSTER, timeout=120, options=settings)
    assert report.ok and report.plan.recomputed and report.unpriced == ()
