"""``print(plan)`` for any model: forty lines of a hundred columns, whatever the plan holds."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.ir.assignment import ParameterPlacement
from autopar.ir.placements import PARTIAL_SUM, REPLICATE, Placements, Shard, StridedShard, short
from autopar.ir.plan_record import PlanLine, PlanNode, Predicted, ReshardStep, ResidentTensor
from autopar.ir.searched import Searched
from autopar.plans.plan import Plan
from autopar.plans.views.also_priced import _in_short
from autopar.plans.views.module_tree import ModuleRow, module_rows, numbers
from autopar.plans.views.quantities import amount, clip, duration, longer, share, signed_duration, signed_size, size


@dataclass
class Sketch:
    """Collects the parts of a plan that nobody solved."""

    mesh: tuple[int, ...] = (2, 4, 2)
    names: tuple[str, ...] = ("dp", "sp", "tp")
    lines: list[PlanLine] = field(default_factory=list)
    parameters: dict[str, ParameterPlacement] = field(default_factory=dict)
    outputs: dict[str, Placements] = field(default_factory=dict)
    nodes: dict[str, PlanNode] = field(default_factory=dict)
    holdings: list[ResidentTensor] = field(default_factory=list)

    def module(self, path: str, seconds: float, weight: Placements, output: Placements) -> None:
        name = f"n{len(self.lines)}"
        self.lines.append(PlanLine("compute", name, path, "forward", seconds))
        self.nodes[name] = PlanNode("aten.mm.default", "f32[4, 4]", path, "", (), "")
        self.parameter(f"{path}.weight", weight)
        self.outputs[path] = output

    def parameter(self, path: str, weight: Placements) -> None:
        name = f"p{len(self.parameters)}"
        self.parameters[path] = ParameterPlacement(weight, weight, weight)
        self.nodes[name] = PlanNode("param", "f32[4, 4]", "", path, (), "")
        self.holdings.append(ResidentTensor("weight", name, path.rpartition(".")[0], 64))

    def reshard(
        self, path: str, source: Placements, target: Placements, count: int, seconds: float, kind: str = "reshard"
    ) -> None:
        changed = [axis for axis in range(len(self.mesh)) if source[axis] != target[axis]]
        steps = tuple(ReshardStep("all_gather", (axis,), short(source), short(target), count) for axis in changed)
        self.lines.append(PlanLine(kind, f"n{len(self.lines)}", path, "forward", seconds, steps))

    def plan(self, **fields: object) -> Plan:
        step = sum(line.seconds for line in self.lines)
        compute = sum(line.seconds for line in self.lines if line.kind == "compute")
        predicted = Predicted(step, compute, step - compute, 0.0, 1 << 34, *[1 << 30] * 6, 0.4)
        plan = Plan(
            model="Sketch, 1.3B parameters, ids 8x128",
            batch=8,
            mesh=self.mesh,
            axis_names=self.names,
            cluster="dgx-a100-80gb",
            cluster_source="a data sheet",
            status="optimal",
            objective=step,
            bound=step,
            gap=0.0,
            solve_seconds=1.0,
            memory_limit=1 << 36,
            graph_hash="0",
            predicted=predicted,
            lines=tuple(self.lines),
            strategies={},
            parameters=self.parameters,
            outputs=self.outputs,
            nodes=self.nodes,
            holdings=tuple(self.holdings),
        )
        return replace(plan, **fields)  # type: ignore[arg-type]


R, S0, S1, P = REPLICATE, Shard(0), Shard(1), PARTIAL_SUM
WHOLE: Placements = (R, R, R)
PLACES: tuple[Placements, ...] = (
    WHOLE,
    (S0, R, R),
    (S0, S1, R),
    (R, R, S0),
    (S0, StridedShard(1, 16), Shard(2)),
    (P, S1, R),
)


def check_shape(plan: Plan) -> list[str]:
    lines = str(plan).splitlines()
    assert len(lines) <= 40, len(lines)
    for line in lines:
        assert len(line) <= 100 or line.startswith("warning    "), line
        assert line == line.rstrip()
    return lines


def every(rows: Sequence[ModuleRow]) -> Iterator[ModuleRow]:
    for row in rows:
        yield row
        yield from every(row.children)


def layered(count: int, kinds: int) -> Sketch:
    sketch = Sketch()
    for layer in range(count):
        for kind in range(kinds):
            sketch.module(
                f"model.layers.{layer}.block{kind}", 1e-3 * (kind + 1), PLACES[kind % 5], PLACES[(kind + 1) % 5]
            )
            sketch.reshard(f"model.layers.{layer}.block{kind}", (S0, R, R), WHOLE, 1 << 20, 1e-4)
    return sketch


def test_equal_layers_fold_with_figures_of_one() -> None:
    plan = layered(12, 2).plan()
    text = "\n".join(check_shape(plan))
    assert "model.layers.{0..11}  x12, each:" in text
    (row,) = module_rows(plan)
    assert row.count == 12
    assert row.compute == pytest.approx(3e-3) and row.comm == pytest.approx(2e-4)
    assert [child.count for child in row.children] == [1, 1]
    assert [move.count for child in row.children for move in child.moves] == [1, 1]
    assert "↳ all_gather dp  S(0) → R  1 MiB x1" in text


def test_layers_that_differ_are_apart() -> None:
    sketch = layered(6, 1)
    sketch.reshard("model.layers.5.block0", WHOLE, (R, S0, R), 1 << 10, 1e-5)
    sketch.outputs["model.layers.2.block0"] = (R, R, S1)
    labels = [row.label for row in module_rows(sketch.plan())]
    assert labels == ["model.layers.{0,1,3,4}", "model.layers.2", "model.layers.5"]


def test_layers_that_all_differ_still_fold() -> None:
    sketch = layered(40, 1)
    for layer in range(40):
        sketch.reshard(f"model.layers.{layer}.block0", WHOLE, (R, S0, R), 1 << layer, 1e-5)
    plan = sketch.plan()
    assert [row.label for row in module_rows(plan)] == ["model.layers.{0..39}"]
    check_shape(plan)


def test_experts_inside_layers_count_per_layer() -> None:
    sketch = Sketch()
    for layer in range(4):
        for expert in range(8):
            sketch.module(f"layers.{layer}.experts.{expert}.up", 1e-3, WHOLE, WHOLE)
    (layers,) = module_rows(sketch.plan())
    (experts,) = layers.children
    assert (layers.label, layers.count) == ("layers.{0..3}", 4)
    assert experts.label.startswith("experts.{0..7}") and experts.count == 8
    assert layers.compute == pytest.approx(8e-3) and experts.compute == pytest.approx(1e-3)
    assert "x8, each:" in str(sketch.plan())


@pytest.mark.parametrize("kinds", [1, 9, 35, 200])
def test_many_kinds_of_modules(kinds: int) -> None:
    sketch = Sketch()
    for kind in range(kinds):
        path = f"encoder{kind}.{'deep.' * (kind % 7)}a_module_with_quite_a_long_name_{kind}.projection"
        sketch.module(path, 1e-4 * (1 + kind % 13), PLACES[kind % 6], PLACES[(kind + 2) % 6])
        sketch.reshard(
            path, (P, S1, R), (S0, StridedShard(1, 16), Shard(2)), 1 << 30, 1e-3, "weight" if kind % 2 else "reshard"
        )
    lines = check_shape(sketch.plan())
    more = [line for line in lines if "more module" in line]
    assert bool(more) == (kinds > 9)


def test_the_dearest_is_shown() -> None:
    sketch = Sketch()
    for kind in range(100):
        sketch.module(f"part{kind}.inner", 1e-5, WHOLE, WHOLE)
    sketch.module("slow.attention.core", 1.0, WHOLE, (S0, R, R))
    sketch.reshard("slow.attention.core", (P, R, R), WHOLE, 1 << 30, 0.5)
    text = "\n".join(check_shape(sketch.plan()))
    assert "slow.attention.core" in text and "↳ all_gather dp  P → R  1 GiB x1" in text


def test_every_part_of_the_foot_at_once() -> None:
    sketch = layered(3, 40)
    for number in range(6):
        for kind in ("gradient", "refresh"):
            sketch.reshard("", PLACES[5], PLACES[number % 5], 1 << (20 + number), 1e-3, kind)
    plan = sketch.plan(
        model="Model " + "x" * 300,
        cluster_source="measured\nby hand " + "y" * 200,
        axis_names=("a_rather_long_axis", "another_long_axis", "tensor_parallel_axis"),
        baselines={f"baseline {n}": sketch.plan().predicted if n % 2 else None for n in range(9)},
        warnings=tuple(f"aten.op{n}.default has no\nsharding rule " + "z" * 150 for n in range(30)),
        gap=float("inf"),
        searched=Searched(123456, 7, 2, 1000, 0.5, "pipeline=2 data=4"),
    )
    text = "\n".join(check_shape(plan))
    assert f"aten.op0.default has no sharding rule {'z' * 150}\n" in text, "a warning is not cut"
    assert "28 more in plan.warnings" in text and "4 more in plan.baselines" in text
    assert "search 2 of 123456 divisions" in text and "none takes less" in " ".join(text.split())
    assert "no bound proven" in text and "inf" not in text.replace("infer", "")


@pytest.mark.parametrize("trains", [True, False])
def test_gradients_that_are_not_alive_at_the_peak_are_said(trains: bool) -> None:
    """Nothing is said of them where there are none at all, as in inference."""
    plan = Sketch().plan()
    values = {"embed.weight": "mm"} if trains else {}
    text = str(replace(plan, predicted=replace(plan.predicted, gradient_bytes=0), gradient_values=values))
    assert ("no gradients at the peak" in text) == trains and "gradients 0 B" not in text
    assert "no gradients" not in str(replace(plan, gradient_values=values))


def test_does_not_fit_and_not_possible() -> None:
    plan = layered(2, 1).plan(memory_limit=1 << 33)
    plan = replace(plan, baselines={"data parallel": plan.predicted, "FSDP": None})
    text = str(plan)
    assert "peak 16 GiB, does not fit" in text and "not possible" in text and "+0%" in text


def test_the_rule_of_thumb_is_labelled_and_its_name_is_whole() -> None:
    plan, name = layered(2, 1).plan(), "16 stages x (dp=32, tp=8), interleaved-1f1b, 128 microbatches"
    text = str(replace(plan, baselines={f"rule of thumb: {name}": plan.predicted, "FSDP": None}))
    rule, whole, fsdp = [line for line in text.splitlines() if "thumb" in line or name in line or "FSDP" in line]
    assert rule.split()[:5] == ["also", "priced", "rule", "of", "thumb"] and "peak" in rule
    assert whole.strip() == name and "not possible" in fsdp and "found" in fsdp


def test_local_moves_have_no_size() -> None:
    sketch = layered(1, 1)
    step = ReshardStep("slice", (0,), short(WHOLE), short((S0, R, R)), 0)
    sketch.lines.append(PlanLine("reshard", "x", "model.layers.0.block0", "forward", 8e-6, (step,)))
    text = str(sketch.plan())
    assert "↳ slice dp  R → S(0)  local x1" in text and "0 B" not in text


def test_a_plan_of_nothing() -> None:
    plan = Sketch(mesh=(1,), names=("idle",)).plan(model="")
    text = "\n".join(check_shape(plan))
    assert "predicted step 0" in text and "rank 0" in text
    assert str(plan.tree()) and str(plan.table("op")) and str(plan.diff(plan))


PATHS = st.lists(st.sampled_from(("0", "1", "2", "17", "attn", "mlp", "experts", "a" * 60)), max_size=6).map(".".join)


@given(
    paths=st.lists(PATHS, min_size=1, max_size=80),
    seed=st.integers(0, 1000),
    seconds=st.sampled_from((0.0, 1e-12, 3e-7, 9.996e-4, 2.0, 1e6)),
)
def test_any_tree_of_modules(paths: list[str], seed: int, seconds: float) -> None:
    pick, sketch = random.Random(seed), Sketch()
    for path in paths:
        sketch.module(path, seconds * pick.randint(0, 5), pick.choice(PLACES), pick.choice(PLACES))
        if pick.random() < 0.5:
            sketch.reshard(path, pick.choice(PLACES[:2]), pick.choice(PLACES[2:]), pick.randint(0, 1 << 40), seconds)
    plan = sketch.plan()
    check_shape(plan)
    rows = module_rows(plan)
    assert sum(row.seconds * row.count for row in rows) == pytest.approx(sum(line.seconds for line in plan.lines))
    assert sum(row.held * row.count for row in rows) == pytest.approx(sum(h.bytes for h in plan.holdings))
    assert {path for row in every(rows) for path in row.paths} <= {"", *_prefixes(paths)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Plan, "validate", lambda self: None)  # A sketch has rows to print, but no graph.
        assert Plan.from_text(plan.to_text()) == plan == Plan.from_json(plan.to_json())


def _prefixes(paths: list[str]) -> set[str]:
    parts = [path.split(".") for path in paths]
    return {".".join(split[:length]) for split in parts for length in range(1, len(split) + 1)}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0"),
        (16.6e-3, "16.6 ms"),
        (9.996e-4, "1 ms"),
        (1234, "1234 s"),
        (5.7e-9, "5.7 ns"),
        (-2e-6, "-2 us"),
        (0.5, "500 ms"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (5.8 * 2**30, "5.8 GiB"),
        (-(2**40), "-1 TiB"),
        (1020 * 2**20, "1020 MiB"),
    ],
)
def test_sizes(count: float, text: str) -> None:
    assert size(count) == text


def test_signs_shares_and_clips() -> None:
    assert [amount(count) for count in (7, 999, 136_700, 6.74e6, 8.03e9)] == ["7", "999", "137K", "6.74M", "8.03B"]
    assert (signed_duration(1e-3), signed_duration(-1e-3), signed_duration(0)) == ("+1 ms", "-1 ms", "±0")
    assert (signed_size(1024), signed_size(-1024), signed_size(0)) == ("+1 KiB", "-1 KiB", "±0")
    assert (share(0, 1), share(1e-9, 1), share(0.5, 1), share(1, 0)) == ("0%", "<1%", "50%", "0%")
    assert (share(-1e-9, 1), share(-0.28, 1)) == (">-1%", "-28%")
    assert (longer(3.0, 2.0), longer(1.0, 2.0), longer(1.0, 0.0)) == ("+50%", "-50%", "+0%")
    assert clip("model.layers.0.weight", 12) == "mod….0.weight"[:3] + "…" + "0.weight"
    assert clip("short", 5) == "short" and len(clip("x" * 50, 7)) == 7


def test_layer_numbers() -> None:
    assert numbers(["3"]) == "3"
    assert numbers(["0", "1"]) == "{0,1}"
    assert numbers([str(n) for n in (0, 1, 2, 7, 9, 10)]) == "{0..2,7,9,10}"


def test_what_backward_computes_again_is_said() -> None:
    sketch = Sketch()
    sketch.module("layers.0", 2.0, WHOLE, WHOLE)
    again = replace(sketch.lines[0], name="n0_recomputed", phase="backward", seconds=0.5)
    sketch.lines.append(again)
    sketch.nodes["n0_recomputed"] = sketch.nodes["n0"]
    said = "of that, forward again in backward 500 ms (20%)"
    assert said in " ".join(str(sketch.plan(recomputed=("n0",))).split())
    assert "again" not in str(sketch.plan())


def test_a_prompt_shows_one_line() -> None:
    plan = layered(2, 200).plan()
    assert repr(plan).startswith(f"<Plan of {plan.model} on (dp=2, sp=4, tp=2): ") and repr(plan).endswith(" a step>")


def test_a_long_name_of_a_pipeline_leaves_out_the_devices_of_a_stage() -> None:
    name = "12 stages x (dp=16, tp=8), zb-v, 2 microbatches"
    assert _in_short(name, 34) == "12 stages, zb-v, 2 microbatches" and _in_short(name, 60) == name
    assert _in_short("tensor parallel 8 x data parallel 8", 30) == clip("tensor parallel 8 x data parallel 8", 30)
