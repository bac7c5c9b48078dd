"""A planned model, questioned: prices that add up, why, diff, tree, tables, JSON, text and HTML."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import autopar
from autopar import planner
from autopar.alternatives import alternatives, answers
from autopar.errors import OptionsError
from autopar.instance import Instance
from autopar.plan import Plan
from autopar.plan_rows import ModuleRow, module_rows
from autopar.problem import Ints, evaluate
from autopar.spec import short

PIN = "blocks.1.first.weight"


class Block(nn.Module):
    """A residual block of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(512)
        self.first = nn.Linear(512, 2048)
        self.second = nn.Linear(2048, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.relu(self.first(self.norm(x))))


class Small(nn.Module):
    """An embedding, three equal blocks, and a head with a loss; one parameter that is never trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 512)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(512, 1000)
        self.scale = nn.Parameter(torch.ones(512), requires_grad=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) * self.scale
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def make_plan(**options: Any) -> Plan:
    with torch.device("meta"):
        model, ids = Small(), torch.empty(32, 512, dtype=torch.long)
    batch = {"ids": ids, "labels": ids}
    return autopar.plan(model, (2, 2), batch, cluster="dgx-a100-80gb", options=autopar.Options(**options))


@pytest.fixture(scope="module")
def solved() -> tuple[Plan, Instance, Ints]:
    """A plan, and the instance and choices it was made from."""
    seen: list[tuple[Instance, Ints]] = []

    def spy(instance: Instance, assignment: Any, chosen: Ints) -> dict[str, Any]:
        seen.append((instance, chosen))
        return answers(instance, assignment, chosen)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "answers", spy)
        plan = make_plan()
    return plan, *seen[-1]


@pytest.fixture(scope="module")
def plan(solved: tuple[Plan, Instance, Ints]) -> Plan:
    return solved[0]


@pytest.fixture(scope="module")
def pinned() -> Plan:
    return make_plan(pins={PIN: "S(0),S(1)"}, zero=0)


def test_what_is_kept_agrees_with_what_is_predicted(plan: Plan) -> None:
    predicted = plan.predicted
    for kind in ("weight", "gradient", "optimizer", "activation", "input"):
        held = sum(holding.bytes for holding in plan.holdings if holding.kind == kind)
        assert held == getattr(predicted, f"{kind}_bytes")
    assert sum(h.bytes for h in plan.holdings) + predicted.temporary_bytes == predicted.peak_bytes
    assert sum(line.seconds for line in plan.lines) == pytest.approx(predicted.step_seconds)
    assert {line.name for line in plan.lines} <= set(plan.nodes)
    assert set(plan.parameter_nodes) == set(plan.parameters)


def test_alternatives_are_the_objective_with_one_choice_changed(solved: tuple[Plan, Instance, Ints]) -> None:
    plan, instance, chosen = solved
    problem, now = instance.problem, evaluate(instance.problem, chosen)
    every = alternatives(instance, chosen, kept=10_000)
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
        plan.seconds_of("compute", "reshard", "weight")
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
    assert 97 <= sum(shares) <= 101


def test_axes_are_named_by_what_they_do(plan: Plan, pinned: Plan) -> None:
    for made in (plan, pinned):
        assert len(set(made.axis_names)) == 2
        assert all(re.fullmatch(r"(dp|tp|sp|idle)\d?", name) for name in made.axis_names)


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
    assert other.choice["weight"] == "(S(0),S(1))"
    assert other.provenance == "user" and f"fixes {PIN}" in other.reason
    assert pinned.why("head.weight").provenance == "price"
    assert pinned.why(PIN).alternatives is not None and pinned.why(PIN).alternatives.possible == 0  # type: ignore[union-attr]


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
    assert "blocks.*.first.weight  x3" in str(found)
    back = pinned.diff(plan)
    assert {(c.path, c.what): (c.after, c.before) for c in back.placements} == changed


def test_diff_of_other_meshes_and_models(plan: Plan) -> None:
    other = replace(plan, mesh=(4, 1), model="Other", parameters={}, outputs={}, strategies={}, baselines={})
    found = plan.diff(other)
    assert {change.path for change in found.settings} == {"mesh", "model"}
    assert all(change.after == "-" for change in found.placements)
    assert found.operations == len(plan.strategies) and all(b is None for _, b in found.baselines.values())
    assert str(found)


def test_tree_shows_every_module(plan: Plan) -> None:
    text = str(plan.tree())
    for label in ("embed", "norm", "first", "second", "head", "each"):
        assert label in text
    assert plan.model in text
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("by", ["module", "kind", "op", "phase", "collective"])
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


def test_no_such_table(plan: Plan) -> None:
    with pytest.raises(OptionsError, match="'module', 'kind', 'op', 'phase', 'collective'"):
        plan.table(by="colour")


def test_json_and_text_give_the_same_plan(plan: Plan, pinned: Plan) -> None:
    for made in (plan, pinned, replace(plan, gap=float("inf"), bound=float("-inf"), model='a "b" \u2028 # = [x]\n')):
        assert Plan.from_json(made.to_json()) == made
        assert Plan.from_text(made.to_text()) == made
        assert Plan.from_json(made.to_json()).timings == made.timings
        assert Plan.from_text(made.to_text()).to_text() == made.to_text()
        assert str(Plan.from_json(made.to_json())) == str(made)
        json.loads(made.to_json(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_text_is_lines_for_people_and_diff(plan: Plan, pinned: Plan) -> None:
    lines = plan.to_text().splitlines()
    assert [line.removeprefix("#").removeprefix(" ") for line in lines if line.startswith("#")] == str(
        plan
    ).splitlines()
    path = lines[lines.index("[parameters]") + 1 :][list(plan.parameters).index(PIN)]
    assert path.startswith(f'"{PIN}" = ')
    assert short(plan.parameters[PIN].weight) in path
    assert path not in pinned.to_text().splitlines()


def broken(text: str) -> dict[str, str]:
    data = json.loads(text)

    def changed(**fields: Any) -> str:
        return json.dumps(data | fields)

    return {
        "empty": "",
        "garbage": "\x00\x01 not a plan",
        "another document": "[1, 2, 3]",
        "an empty object": "{}",
        "cut off": text[: len(text) // 2],
        "another version": changed(version=1),
        "a version that is no number": changed(version=None),
        "a missing field": json.dumps({k: v for k, v in data.items() if k != "lines"}),
        "a mesh of words": changed(mesh="ab"),
        "a placement that is none": changed(outputs={"head": "(X,Y)"}),
        "too few placements": changed(outputs={"head": "(R)"}),
        "a strategy that is not there": changed(strategies={"x": 10**6}),
        "a number that is none": changed(objective="many"),
        "lines that are none": changed(lines=[1]),
        "parameters as a list": changed(parameters=[]),
        "predictions of other things": changed(predicted={"speed": 1}),
        "an unknown status": changed(status="perfect"),
    }


def test_every_cut_is_an_options_error(plan: Plan) -> None:
    for text, read in ((plan.to_json(), Plan.from_json), (plan.to_text(), Plan.from_text)):
        for part in range(40):
            with pytest.raises(OptionsError):
                read(text[: len(text.rstrip()) * part // 40])


@pytest.mark.parametrize("case", list(broken('{"version": 0}')))
def test_what_is_no_plan_is_an_options_error(plan: Plan, case: str) -> None:
    with pytest.raises(OptionsError, match="plan"):
        Plan.from_json(broken(plan.to_json())[case])


def test_text_that_is_no_plan_names_the_line(plan: Plan) -> None:
    lines = plan.to_text().splitlines()
    with pytest.raises(OptionsError, match="does not start with"):
        Plan.from_text("something else")
    with pytest.raises(OptionsError, match="cut off"):
        Plan.from_text("\n".join(lines[: len(lines) // 2]))
    with pytest.raises(OptionsError, match="version"):
        Plan.from_text("\n".join(["autopar plan 99", *lines[1:]]))
    at = lines.index("[parameters]") + 1
    with pytest.raises(OptionsError, match=f"line {at + 1} of this plan"):
        Plan.from_text("\n".join([*lines[:at], '"a" = ["(R,R)", ', *lines[at + 1 :]]))


class Balanced(HTMLParser):
    """Fails on tags that do not close."""

    open: tuple[str, ...] = ()
    void = ("meta", "br")
    # HTML lets these end by themselves.
    loose = ("tr", "td", "th", "li", "p")

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        assert not {name for name, _ in attrs} & {"src", "href", "onclick"}
        if tag not in self.void and tag not in self.loose:
            self.open = (*self.open, tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.loose:
            assert self.open[-1] == tag
            self.open = self.open[:-1]


def test_html_is_one_page_that_escapes(plan: Plan, tmp_path: Path) -> None:
    hostile = replace(plan, model="<script>alert(1)</script>, 1 parameter", warnings=("a < b",))
    hostile.to_html(tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text(encoding="utf-8")
    parser = Balanced()
    parser.feed(page)
    assert parser.open == ()
    assert "<script" not in page and "&lt;script&gt;" in page and "http" not in page
    for path in plan.parameters:
        assert path in page
    with pytest.raises(OptionsError, match="cannot write"):
        plan.to_html(tmp_path / "none" / "plan.html")
