"""A planned model, questioned: prices that add up, why, diff, tree and tables."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import autopar
from autopar.errors import OptionsError
from autopar.ir.assignment import Assignment, ParameterPlacement
from autopar.ir.graph import Graph
from autopar.ir.placements import Strategy, parse_placements, short
from autopar.ir.searched import Searched, TriedDivision
from autopar.placement.alternatives import alternatives
from autopar.placement.axis_names import default_names
from autopar.plans.plan import Plan
from autopar.plans.views.module_tree import ModuleRow, module_rows
from autopar.solver.problem import evaluate
from tests.helpers.plan_model import PIN, pinned_plan, solved
from tests.helpers.planning import CLUSTER


@pytest.fixture(scope="module")
def plan() -> Plan:
    return solved()[0]


@pytest.fixture(scope="module")
def pinned() -> Plan:
    return pinned_plan()


def test_what_is_kept_agrees_with_what_is_predicted(plan: Plan) -> None:
    predicted = plan.predicted
    for kind in ("weight", "gradient", "optimizer", "activation", "input"):
        held = sum(holding.bytes for holding in plan.holdings if holding.kind == kind)
        assert held == getattr(predicted, f"{kind}_bytes")
    assert sum(h.bytes for h in plan.holdings) + predicted.temporary_bytes == predicted.peak_bytes
    assert sum(line.seconds for line in plan.lines) == pytest.approx(predicted.step_seconds)
    assert {line.name for line in plan.lines if line.kind != "hidden"} <= set(plan.nodes)
    assert set(plan.parameter_nodes) == set(plan.parameters)


def test_alternatives_are_the_objective_with_one_choice_changed() -> None:
    plan, instance, chosen = solved()
    problem, now = instance.problem, evaluate(instance.problem, chosen)
    every = alternatives(instance, chosen, most=10_000)
    checked = 0
    for group, name in enumerate(instance.names):
        if len(instance.choices[group]) < 2:
            assert name not in every
            continue
        prices, memory = [], problem.groups[group].memory
        for k in range(len(instance.choices[group])):
            changed = np.array(chosen)
            changed[group] = k
            found = evaluate(problem, changed) - now
            if k != chosen[group] and np.isfinite(found):
                prices.append((found, memory[k] - memory[chosen[group]]))
        found = every[name]
        assert found.possible == len(prices) == len(found.cheapest)
        assert found.possible + found.impossible == len(instance.choices[group]) - 1
        assert [a.seconds for a in found.cheapest] == pytest.approx(sorted(p for p, _ in prices), abs=1e-15)
        assert sorted(a.bytes for a in found.cheapest) == sorted(int(m) for _, m in prices)
        kept = plan.alternatives[name]
        assert kept.cheapest == found.cheapest[:6] and kept.possible == found.possible
        checked += 1
    assert checked > 20


def test_rows_add_up_and_equal_layers_are_one(plan: Plan) -> None:
    rows = module_rows(plan)
    assert sum(row.seconds * row.count for row in rows) == pytest.approx(
        plan.seconds_of("compute", "exchange", "reshard", "weight")
    )
    assert sum(row.held * row.count for row in rows) == pytest.approx(sum(h.bytes for h in plan.holdings))

    def check(row: ModuleRow) -> None:
        below = sum(child.seconds * child.count for child in row.children) + sum(move.seconds for move in row.moves)
        assert below <= row.seconds + 1e-12
        for child in row.children:
            check(child)

    for row in rows:
        check(row)
    blocks = [row for row in rows if row.label.startswith("blocks.")]
    assert sum(row.count for row in blocks) == 3
    assert any(row.count > 1 for row in blocks)


def test_print_has_units_and_no_empty_names(plan: Plan) -> None:
    text = str(plan)
    assert len(text.splitlines()) <= 40 and max(map(len, text.splitlines())) <= 100
    assert text == str(plan)
    assert re.search(r"blocks\.\{[0-9.,]+\}  x[23], each:", text)
    for word in (
        "Plan ",
        "mesh ",
        "status ",
        "prices dgx-a100-80gb",
        "also priced",
        "data parallel",
        "total ",
        "memory ",
        "ask ",
    ):
        assert word in text
    assert "0 B" not in text and "(model)" not in text and "priceddata" not in text
    figures = [line[-21:].split() for line in text.splitlines() if re.match(r" *(embed|head|norm|blocks)", line)]
    assert figures and all(words[-1] in ("us", "ns", "ms") for words in figures)


def test_percentages_are_of_the_step(plan: Plan) -> None:
    total = " ".join(str(plan).split("\ntotal", 1)[1].split("\nmemory")[0].split())
    shares = [int(found) for found in re.findall(r"\((\d+)%\)", total)]
    hidden = 100 * plan.seconds_of("hidden") / plan.predicted.step_seconds
    assert hidden < 0 and "hidden by computing -" in total
    assert 97 <= sum(shares) + hidden <= 101


LAYER = """
graph()
%x: f32[64, 32, 16] = input("x")
%w: f32[8, 16] = param("up.weight")
%t: f32[16, 8] = aten.t.default(%w)
%y: f32[64, 32, 8] = aten.matmul.default(%x, %t)
%z: f32[64, 32, 8] = aten.relu.default(%y)
return output "0" = %z
""".lstrip()


@pytest.mark.parametrize(
    ("activation", "weight", "result", "names"),
    [
        ("S(0),R", "R,S(1)", "S(0),S(2)", ("dp", "tp")),
        ("S(0),S(0)", "R,R", "S(0),S(0)", ("dp0", "dp1")),
        ("S(1),S(0/64)", "R,R", "S(1),S(0/64)", ("sp0", "sp1")),
        ("R,S(1)", "R,R", "R,S(1)", ("idle", "sp")),
        ("R,R", "S(1),S(1)", "S(2),S(2)", ("tp0", "tp1")),
    ],
)
def test_axes_are_named_by_what_they_do(activation: str, weight: str, result: str, names: tuple[str, ...]) -> None:
    x, t, y = map(parse_placements, (activation, weight, result))
    # How the weight is stored says nothing: it may be gathered for use.
    stored = parse_placements("S(0),S(0)")
    strategies = {
        "x": Strategy((), (x,)),
        "t": Strategy((t,), (t,)),
        "y": Strategy((x, t), (y,)),
        "z": Strategy((y,), (y,)),
    }
    assignment = Assignment((2, 2), strategies, {"w": ParameterPlacement(stored, stored, stored)})
    assert default_names((2, 2), assignment, Graph.from_text(LAYER)) == names


TABLE = (
    LAYER.replace(
        "return",
        """%v: f32[40, 16] = param("table.weight")
%u: f32[16, 40] = aten.t.default(%v)
%o: f32[64, 32, 40] = aten.matmul.default(%x, %u)
return""",
    )
    .replace("%z", "%o")
    .replace("%o: f32[64, 32, 8] = aten.relu.default(%y)\n", "")
)


@pytest.mark.parametrize(
    ("weight", "result", "name"), [("S(1)", "S(2)", "tp"), ("R", "S(1)", "sp"), ("R", "R", "idle")]
)
def test_an_axis_that_some_use_is_not_called_idle(weight: str, result: str, name: str) -> None:
    """Most of the weights, and most activations, are whole: those of a large table."""
    t, y, whole = map(parse_placements, (weight, result, "R"))
    strategies = {
        "x": Strategy((), (whole,)),
        "t": Strategy((t,), (t,)),
        "u": Strategy((whole,), (whole,)),
        "y": Strategy((whole, t), (y,)),
        "o": Strategy((whole, whole), (whole,)),
    }
    stored = ParameterPlacement(whole, whole, whole)
    assignment = Assignment((2,), strategies, {"w": stored, "v": stored})
    assert default_names((2,), assignment, Graph.from_text(TABLE)) == (name,)


def test_axis_names_of_a_plan(plan: Plan) -> None:
    assert plan.axis_names == ("dp0", "dp1")


def test_why_a_parameter(plan: Plan) -> None:
    found = plan.why("blocks.2.first.weight")
    place = plan.parameters["blocks.2.first.weight"]
    assert found.kind == "parameter" and found.choice["weight"] == short(place.weight)
    assert found.provenance == "tied" and found.together == 3
    assert "blocks.{0..2}.first.weight" in found.reason
    assert found.alternatives is not None and found.alternatives.cheapest
    text = str(found)
    assert "neighbours as they are" in text and found.alternatives.cheapest[0].choice in text
    assert max(map(len, text.splitlines())) <= 110
    node = plan.parameter_nodes["blocks.2.first.weight"]
    assert sum(cost.bytes for cost in found.costs) == sum(h.bytes for h in plan.holdings if h.name == node)
    assert plan.why(node) == found == plan.why(f"%{node}")


def test_why_counts_the_gradient_of_a_parameter(plan: Plan) -> None:
    costs = [plan.why(path).costs for path in plan.parameters]
    for kind, label in (("gradient", "grad sync"), ("refresh", "refresh"), ("optimizer", "optimizer")):
        found = sum(cost.seconds for one in costs for cost in one if cost.what == label)
        assert found == pytest.approx(plan.seconds_of(kind))
    assert "gradient" not in plan.why("scale").choice


def test_why_a_module_and_a_node(plan: Plan) -> None:
    module = plan.why("blocks.0.second")
    assert module.kind == "module" and set(module.parameters) == {"blocks.0.second.weight", "blocks.0.second.bias"}
    compute = sum(line.seconds for line in plan.lines if line.kind == "compute" and line.module == "blocks.0.second")
    assert next(cost.seconds for cost in module.costs if cost.what == "compute") == pytest.approx(compute)
    name = plan.module_nodes["blocks.0.second"]
    node = plan.why(name)
    assert node.kind == "node" and plan.nodes[name].op in str(node)
    assert node.alternatives == module.alternatives
    whole = plan.why("blocks")
    assert whole.kind == "module" and "more parameters" in str(whole)


def test_every_name_can_be_asked(plan: Plan) -> None:
    for name in (*plan.parameters, *plan.outputs, *plan.nodes):
        assert str(plan.why(name))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids)).square().mean()


def test_why_knows_every_name_of_a_tied_weight() -> None:
    plan = autopar.plan(Tied(), (2,), torch.arange(16).reshape(4, 4) % 20, cluster=CLUSTER)
    for read in (plan, Plan.from_json(plan.to_json()), Plan.from_text(plan.to_text())):
        assert read.why("head.weight") == read.why("embed.weight")
    with pytest.raises(OptionsError, match=r"'head\.weight'"):
        plan.why("haed.weight")


def test_why_an_unknown_name(plan: Plan) -> None:
    with pytest.raises(OptionsError, match=r"did you mean .*'blocks\.0\.first\.weight'"):
        plan.why("blocks.0.frist.weight")
    with pytest.raises(OptionsError, match=r"'blocks\.1\.norm'"):
        plan.why("norm")
    with pytest.raises(OptionsError, match=r"plan\.tree\(\)"):
        plan.why("")


def test_provenance_of_pins(pinned: Plan) -> None:
    assert pinned.why(PIN).provenance == "user" and repr(PIN) in pinned.why(PIN).reason
    other = pinned.why("blocks.0.first.weight")
    assert other.provenance != "user", "a pin of one layer leaves its equals free"
    assert pinned.why("head.weight").provenance == "price"
    assert pinned.why(PIN).alternatives is not None and pinned.why(PIN).alternatives.possible == 0  # type: ignore[union-attr]


def test_tree_shows_every_module(plan: Plan) -> None:
    text = str(plan.tree())
    for label in ("embed", "norm", "first", "second", "head", "each"):
        assert label in text
    assert plan.model in text
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("by", ["module", "kind", "op", "rule", "phase", "collective"])
def test_tables_sum_to_the_step(plan: Plan, by: str) -> None:
    table = plan.table(by=by)
    at = table.columns.index("seconds")
    expected = plan.predicted.step_seconds
    if by == "collective":
        expected = sum(line.seconds for line in plan.lines if any(step.communicates for step in line.steps))
        assert sum(int(row[3]) for row in table.rows) == sum(c.count for c in plan.collectives())
    assert sum(float(row[at]) for row in table.rows) == pytest.approx(expected)
    assert len(str(table).splitlines()) == 1 + len(table.rows)
    seconds = [float(row[at]) for row in table.rows]
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize("by", ["module", "kind", "op", "phase"])
def test_shares_add_up_to_the_step(plan: Plan, by: str) -> None:
    """That of what computing hides is negative: the other rows are more than the step takes."""
    head, rows, _ = plan.table(by=by).texts()
    assert head[-1] == "share" and plan.seconds_of("hidden") < 0
    shares = [0 if row[-1] in ("<1%", ">-1%") else int(row[-1][:-1]) for row in rows]
    assert sum(shares) == pytest.approx(100, abs=len(rows) / 2 + 1)


def test_no_such_table(plan: Plan) -> None:
    with pytest.raises(OptionsError, match="'module', 'kind', 'op', 'rule', 'phase', 'collective'"):
        plan.table(by="colour")
    with pytest.raises(OptionsError, match=r"no table by 'tree'.*; plan.tree\(\) shows the modules as a tree"):
        plan.table(by="tree")


def test_the_table_of_divisions_says_what_does_not_fit_and_what_is_excluded(plan: Plan) -> None:
    """As ``print`` does."""
    full = replace(plan.predicted, peak_bytes=plan.memory_limit + 1, step_seconds=2 * plan.predicted.step_seconds)
    other = replace(plan.predicted, step_seconds=3 * plan.predicted.step_seconds)
    baselines = {"FSDP": full, "data parallel": other, "grid": None, "no stages": None}
    made = replace(plan, baselines=baselines, excluded={"no stages": "does not fit: 3 GiB of 2 GiB"}, searched=None)
    table = made.table(by="division")
    assert [row[:2] for row in table.rows] == [
        ("the plan", "solved"),
        ("FSDP", "solved, does not fit"),
        ("data parallel", "solved"),
        ("grid", "not possible"),
        ("no stages", "does not fit: 3 GiB of 2 GiB"),
    ]
    assert str(table).splitlines()[-1].split() == ["no", "stages", "does", "not", "fit:", "3", "GiB", "of", "2", "GiB"]
    tried = (TriedDivision("FSDP", "solved", full.step_seconds, 1), TriedDivision("2 stages", "solved", 1.0, 1))
    searched = Searched(5, 0, 2, 3, 0.0, tried=tried)
    table = replace(made, searched=searched).table(by="division")
    assert ("FSDP", 1, "solved, does not fit", full.step_seconds) in table.rows
    assert table.rows[-1] == ("no stages", 0, "does not fit: 3 GiB of 2 GiB", "")
    assert sum(int(row[1]) for row in table.rows) == searched.divisions
