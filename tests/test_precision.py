"""Mixed precision: what is cast, what it costs, and that any plan computes what one process under the policy does."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.cost import collective_seconds
from autopar.errors import OptionsError, PlanMismatchError, TraceError
from autopar.ir.graph import Graph
from autopar.options import Options
from autopar.passes.annotate.annotate import annotate
from autopar.passes.lower.collectives_read_back import collectives_of, difference
from autopar.passes.recompute.recomputable import recomputable
from autopar.passes.recompute.recompute import recomputed
from autopar.placement.prices import Prices
from autopar.planner.step_graphs import step_graph
from autopar.planner.timings import Timings
from autopar.plans.plan import Plan
from autopar.search.best_plan import best_plan
from autopar.verification.tolerance import Closeness, distance
from tests.helpers.eager_draws import STATE
from tests.helpers.interpret import Results, interpret
from tests.helpers.lowering import plain
from tests.helpers.marks import slow_but
from tests.helpers.models import make, pictures, text
from tests.helpers.planning import CLUSTER, make_request, requested, setting, slow_devices
from tests.helpers.simulate import World
from tests.ops.test_experts import make as make_experts
from tests.passes.test_collectives_read_back import any_assignment, priced
from tests.passes.test_lower import programs, random_assignment
from tests.zoo.check import widened


class Convolutions(nn.Module):
    """Odd sizes, batch norm in training mode, and a frozen parameter that is multiplied with."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm2d(5)
        self.head, self.frozen = nn.Linear(5, 7), nn.Linear(7, 7)
        self.frozen.weight.requires_grad_(False)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.conv(pixel_values[:, :, ::4, ::4])))
        return nn.functional.cross_entropy(self.frozen(self.head(x.mean((2, 3)))), labels % 7)


def _case(name: str) -> tuple[nn.Module, Any]:
    if name == "convolutions":
        return Convolutions(), pictures(6)
    if name == "bert":
        from transformers import BertConfig, BertForMaskedLM

        config = BertConfig(
            hidden_size=48, num_hidden_layers=1, num_attention_heads=4, intermediate_size=96, vocab_size=257,
        )  # fmt: skip
        return BertForMaskedLM(config), text(6, 5)
    return make_experts(name) if name == "mixtral" else make(name, layers=1)


@cache
def _expected(name: str, precision: str) -> tuple[Graph, dict[str, torch.Tensor], Results, Results]:
    """The step graph, its values, what one device makes of it, and what it makes of it in float64."""
    torch.manual_seed(0)
    model, batch = _case(name)
    request = make_request(model, batch, (2,), precision=precision)
    graph = step_graph(request.graph, request.loss, request.batch)
    values = {n: v.detach().clone() for n, v in (*model.named_parameters(), *model.named_buffers())}
    inputs = [node.target for node in graph.placeholders("input")]
    values |= {target: batch[target] for target in inputs} | {"random": STATE}
    wide = {n: v.double() if v.is_floating_point() else v for n, v in values.items()}
    return graph, values, interpret(plain(graph), values), interpret(plain(widened(graph)), wide)


def _check(found: dict[str, torch.Tensor], wanted: Results, exact: Results, kinds: tuple[str, ...], say: str) -> None:
    requested = Closeness.of("bf16")
    for (kind, name), value in wanted.items():
        if kind in kinds and value is not None and value.is_floating_point():
            error, _ = requested.error(found[name], value, distance(value, exact[kind, name]))
            assert error <= requested.tolerance, f"{say}: {kind} {name}: {error:.3g}"


@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2)], ids=str)
@pytest.mark.parametrize(
    "name",
    [
        "gpt2",
        pytest.param("bert", marks=pytest.mark.slow),
        "convolutions",
        pytest.param("mixtral", marks=pytest.mark.slow),
    ],
)
def test_any_assignment_gives_what_one_device_does(name: str, mesh: tuple[int, ...]) -> None:
    """Tied weights, dropout, batch norm; vocabularies, batches and heads that divide nothing."""
    graph, values, wanted, exact = _expected(name, "bf16")
    assert any(node.stored != node.type for node in graph.placeholders("param"))
    annotated = annotate(graph, mesh)
    prices = Prices.of(autopar.Cluster.get(CLUSTER), mesh, annotated)
    assignment = random_assignment(annotated, mesh, len(name))
    world = World(programs(annotated, assignment, prices))
    tangents = {node.target: torch.ones((), dtype=node.type.dtype) for node in graph.placeholders("tangent")}
    results, gradients = world.step(values, tangents)
    _check(results, wanted, exact, ("output", "mutation"), f"{name} on {mesh}")
    _check(gradients, wanted, exact, ("gradient",), f"{name} on {mesh}")
    for node in graph.placeholders("param"):
        if node.target in gradients:
            assert gradients[node.target].dtype == torch.float32, node.target


@pytest.mark.parametrize("precision", slow_but(["fp16"], ["bf16", "fp16"]))
def test_the_cost_breakdown_is_what_the_program_does(precision: str) -> None:
    model, batch = make("stack")
    found = setting(make_request(model, batch, (2, 2), precision=precision))
    for seed in range(2):
        assignment = any_assignment(found.graph, (2, 2), seed)
        breakdown = found.breakdown(assignment)
        assert difference(collectives_of(found.program(assignment)), priced(breakdown)) == ()
    assert any(line.name == "loss scale" for line in breakdown.lines) == (precision == "fp16")


def test_stages_agree_on_overflow_once_a_step() -> None:
    """Of all devices, not of those of a stage, however many chunks and microbatches there are."""
    cluster = autopar.Cluster.get(CLUSTER)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)))
    options = Options(precision="fp16", stages=2, microbatches=4, schedule="interleaved")
    plan = autopar.plan(
        model,
        (2, 2),
        torch.randn(64, 32),
        cluster=cluster,
        loss_fn=lambda y, _: y.float().square().mean(),
        options=options,
    )
    assert plan.stages == 2 and plan.mesh == (2,) and plan.pipeline is not None
    whole = collective_seconds(cluster, (2, 2), "all_reduce", (0, 1), 4)
    said = [(line.stage, line.seconds) for line in plan.lines if line.name == "loss scale"]
    assert sorted(said) == [(0, whole), (1, whole)]
    busiest = max(sum(line.seconds for line in plan.lines if line.stage == stage) for stage in range(2))
    parts = plan.predicted
    made = busiest + parts.bubble_seconds - parts.freed_seconds
    assert parts.step_seconds == pytest.approx(made, rel=1e-9)
    assert plan.pipeline.update_seconds > whole


class Wide(nn.Module):
    """Products of far more rows than their matrices have: what travels are the matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x))).float().square().mean()


def _wide() -> tuple[nn.Module, Any]:
    return Wide(), (torch.randn(4096, 32),)


def _plan(**options: Any) -> Plan:
    return best_plan(requested(_wide, (4,), slow_devices(), **options), Timings())


def _gathered(plan: Plan) -> Counter[int]:
    """Bytes of gathers of weights."""
    lines = (line for line in plan.lines if line.kind in ("weight", "refresh"))
    return Counter(step.bytes for line in lines for step in line.steps if step.communicates)


@pytest.mark.parametrize("zero", [1, 3])
def test_gathers_move_half_the_bytes(zero: int) -> None:
    whole, half = _plan(zero=zero), _plan(zero=zero, precision="bf16")
    assert set(_gathered(whole)) == {32 * 64 * 4} and set(_gathered(half)) == {32 * 64 * 2}
    reduced = {s.bytes for line in half.lines if line.kind == "gradient" for s in line.steps if s.communicates}
    assert reduced == {32 * 64 * 4}, "gradients are added up in float32"
    for plan in (whole, half):
        assert plan.objective == pytest.approx(sum(line.seconds for line in plan.lines), rel=1e-9)
    assert half.precision == "bf16" and ", bf16" in str(half) and "stored f32" in str(half.why("first.weight"))
    assert Plan.from_json(half.to_json()) == half and Plan.from_text(half.to_text()) == half


def test_a_plan_brings_its_policy() -> None:
    model, batch = make("stack")
    plan = autopar.plan(model, (1,), batch, options=Options(precision="bf16"))
    try:
        parallel = autopar.parallelize(copy.deepcopy(model), 1, plan=plan)
        loss = parallel.step(**batch)
        with torch.autocast("cpu", torch.bfloat16):
            wanted = model(**batch)
        torch.testing.assert_close(loss, wanted["loss"].detach(), rtol=8e-3, atol=0)
        with torch.no_grad():  # Evaluation is under the policy, too.
            scores = parallel(**batch)["scores"]
        expected = wanted["scores"].detach()
        assert scores.dtype == torch.bfloat16
        torch.testing.assert_close(scores, expected, rtol=0, atol=float(expected.abs().max()) / 32)
        with pytest.raises(PlanMismatchError, match="made for precision='bf16', but Options\\(precision='fp16'\\)"):
            autopar.parallelize(copy.deepcopy(model), 1, plan=plan, options=Options(precision="fp16"))
    finally:
        dist.destroy_process_group()


class Nested(nn.Module):
    """Switches the policy off for one product, and to another for a second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        with torch.autocast("cpu", enabled=False):
            y = self.second(y.float())
        with torch.autocast("cpu", torch.float16):
            y = self.third(y)
        return y.float().square().mean()


def test_the_models_own_autocast_wins_where_it_is() -> None:
    graph = make_request(Nested(), (torch.randn(4, 8),), (2,), precision="bf16").graph
    kinds = {node.target: node.type.dtype for node in graph.placeholders("param")}
    assert kinds == {"first.weight": torch.bfloat16, "second.weight": torch.float32, "third.weight": torch.float16}


@pytest.mark.slow
def test_what_is_computed_again_is_the_same_bits() -> None:
    """All ranks in one process: a step that keeps everything, and ones that compute some of it again."""
    graph, values, _, _ = _expected("bert", "bf16")
    annotated = annotate(graph, (2,))
    prices = Prices.of(autopar.Cluster.get(CLUSTER), (2,), annotated)
    tangents = {node.target: torch.ones((), dtype=node.type.dtype) for node in graph.placeholders("tangent")}
    assignment = random_assignment(annotated, (2,), 1)
    _, kept = World(programs(annotated, assignment, prices)).step(values, tangents)
    possible = recomputable(annotated)
    for policy in (possible.selective, possible.full):
        assert policy
        again = replace(assignment, recomputed=possible.chain(policy))
        _, found = World(programs(*recomputed(annotated, again), prices)).step(values, tangents)
        for name, gradient in kept.items():
            assert torch.equal(found[name], gradient), name


def test_masters_gradients_and_state_are_whole_and_copies_are_half() -> None:
    """On one device, where everything is replicated: 4 bytes each of master and gradient, 8 of AdamW, 2 of the copy."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    request = make_request(model, (torch.randn(4, 64),), (1,), precision="bf16")
    graph = setting(request).graph
    assignment = any_assignment(graph, (1,), 0)
    memory = setting(request).breakdown(assignment).memory
    count = 64 * 64
    assert (memory.weights, memory.gradients, memory.optimizer) == (6 * count, 4 * count, 8 * count)


@pytest.mark.parametrize(
    ("dtype", "precision", "message"),
    [
        (torch.bfloat16, "fp16", "'0.weight' is bfloat16: leave precision out to train it as it is"),
        (torch.bfloat16, "bf16", "'0.weight' is bfloat16: leave precision out to train it as it is"),
        (torch.float64, "bf16", r"'0.weight' is float64: give a float32 model \(model.float\(\)\)"),
        (torch.complex64, "bf16", "'0.weight' is complex64: leave precision out"),
    ],
)
def test_models_that_a_policy_is_not_for(dtype: torch.dtype, precision: Any, message: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4, dtype=dtype))
    with pytest.raises(OptionsError, match=message):
        autopar.plan(model, (2,), torch.randn(4, 4, dtype=dtype), options=Options(precision=precision))


# tests/test_api.py trains in reduced precision on processes, quickly.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpt2", {"precision": "bf16", "stages": 2, "microbatches": 4, "schedule": "1f1b"}),
        ("gpt2", {"precision": "bf16", "stages": 1, "zero": 3}),
        ("resnet", {"precision": "bf16"}),
        ("bert", {"precision": "fp16", "stages": 1, "zero": 1}),
        ("llama", {"precision": "fp16", "stages": 2, "microbatches": 2}),
        ("vit", {"precision": "bf16", "recompute": "full", "stages": 1}),
    ],
    ids=str,
)
def test_processes_give_what_one_does(name: str, options: dict[str, Any]) -> None:
    report = autopar.verify(*_placed(name), options=Options(**options))
    assert report.ok and not report.unpriced, str(report)
    assert report.rounding is not None and report.rounding > 0


def _placed(name: str) -> tuple[nn.Module, tuple[int, ...], Any]:
    torch.manual_seed(0)
    model, batch = make(name)
    return model, (2, 2), batch


@pytest.mark.slow
def test_experts_compute_in_16_bits() -> None:
    """Matrices and tokens, as products do; the matrices are cast once a step, and their gradients are float32."""
    graph = _expected("mixtral", "bf16")[0]
    blocks = [node for node in graph.nodes if "experts" in node.op]
    assert len(blocks) == 4
    for node in blocks:
        *_, up, down = (graph.type_of(value) for value in node.operands)
        assert up.dtype == down.dtype == graph.type_of(node.operands[0]).dtype == torch.bfloat16
    cast = {node.target for node in graph.placeholders("param") if node.stored != node.type}
    assert {f"model.layers.{i}.mlp.experts.{name}_proj" for i in (0, 1) for name in ("gate_up", "down")} <= cast


def test_casts_end_with_the_trace() -> None:
    """Within a trace products are cast, or not at all; what autocast was before comes back."""
    from autopar.trace.capture import _autocasting

    before = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()
    with _autocasting(torch.float16):
        assert torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.float16
        with _autocasting(None):
            assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled("cpu")
    after = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()
    assert after == before


def test_casts_that_torch_does_not_do_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_autocast_enabled", lambda *_: None)
    with pytest.raises(TraceError, match="bfloat16"):
        make_request(*_wide(), (4,), slow_devices(), precision="bf16")  # Traced here, whatever other tests have traced.
