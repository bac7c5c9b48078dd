"""Plan files that somebody edited: valid, or refused by name; never an internal error, never other numbers."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.command_line import main
from autopar.errors import AutoparError, OptionsError, PlanMismatchError
from autopar.ir.plan_record import PlanLine
from autopar.plans.as_written import signed
from autopar.plans.json import plan_to_dict
from autopar.plans.plan import Plan
from tests.helpers.marks import slow_but
from tests.helpers.plan_mutations import mutated, mutated_lines
from tests.helpers.run_plan import Bench

TABLES = ("module", "kind", "op", "rule", "phase", "collective", "stage")
ASKED = {
    "sharded": ((2, 2), autopar.Options(zero=3, mesh_search=False)),
    "pinned": ((2, 2), autopar.Options(mesh_search=False, pins={"first.weight": "S(0),S(1)", "second": "R,R"})),
    "staged": ((2, 2), autopar.Options(stages=2, microbatches=2)),
}
# What decides how a step is computed.
CHOICES = ["strategies", "strategy_table", "parameters", "nodes", "pipeline", "mesh", "stages", "microbatches"]


class Tied(nn.Module):
    """An embedding tied to the head, a norm and two products."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first, self.norm = nn.Embedding(12, 8), nn.Linear(8, 16), nn.LayerNorm(16)
        self.second, self.head = nn.Linear(16, 8), nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = x + self.second(torch.relu(self.norm(self.first(x))))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@cache
def bench() -> Bench:
    torch.manual_seed(0)
    return Bench(Tied(), {name: torch.randint(12, (8, 4)) for name in ("ids", "labels")})


@cache
def plan(name: str) -> Plan:
    mesh, options = ASKED[name]
    return autopar.plan(bench().model, mesh, bench().batch, cluster="dgx-a100-80gb", options=options)


@cache
def expected() -> dict[str, torch.Tensor]:
    return bench().expected()


def is_right(found: dict[str, torch.Tensor]) -> bool:
    def error(name: str) -> float:
        want = expected()[name].double()
        return float((found[name].double() - want).abs().max() / want.abs().max())

    return all(error(name) < 1e-5 for name in expected())


def _read(text: str) -> Plan | None:
    try:
        return Plan.from_text(text) if text.startswith("autopar plan") else Plan.from_json(text)
    except AutoparError:
        return None


def _undigested(made: Plan) -> tuple[str, str]:
    """JSON and text as versions of autopar wrote them that had no digests, so that only what is compared is found."""
    data = json.loads(made.to_json()) | {"version": 9}
    del data["written"]
    lines = re.sub(r'\[written\]\n("[^\n]*\n)*', "", made.to_text())
    return json.dumps(data), lines.replace("autopar plan 10", "autopar plan 8")


def _ask(one: Plan, other: Plan, folder: Path) -> None:
    """Everything that can be asked of a plan."""
    assert str(one) and str(one.tree()) and all(str(one.table(by=by)) for by in TABLES)
    assert str(one.diff(other)) and str(other.diff(one)) and autopar.step_timeline(one).to_chrome_trace()
    assert all(str(one.why(name)) for name in (*one.parameters, *one.outputs, *one.nodes))
    one.to_html(folder / "plan.html")
    assert Plan.from_json(one.to_json()) == one and one.collectives() is not None


@pytest.mark.parametrize("name", slow_but(["pinned", "staged"], ASKED))
def test_a_plan_that_autopar_makes_is_valid_and_runs(name: str) -> None:
    made = plan(name)
    made.validate()
    assert Plan.from_json(made.to_json()) == made == Plan.from_text(made.to_text())
    assert is_right(bench().run(made))


@pytest.mark.parametrize("name", ["sharded", "staged"])
def test_a_mutated_plan_is_refused_or_answers(name: str, tmp_path: Path) -> None:
    draw, made = random.Random(0), plan(name)
    (text, lines), valid = _undigested(made), 0
    for turn in range(80):
        one = _read(mutated(text, draw, draw.randint(1, 2)) if turn % 4 else mutated_lines(lines, draw))
        if one is not None and one != made:
            _ask(one, made, tmp_path)
            valid += 1
    assert valid


@pytest.mark.parametrize("name", ["sharded", "staged"])
def test_a_mutated_plan_computes_what_one_process_does_or_is_refused(name: str) -> None:
    draw, made, ran = random.Random(1), plan(name), 0
    text = _undigested(made)[0]
    tables = [table for table in CHOICES if json.loads(text)[table]]
    for _ in range(30):
        one = _read(mutated(text, draw, 1, [draw.choice(tables)]))
        if one is None or one == made:
            continue
        try:
            assert is_right(bench().run(one))
            ran += 1
        except AutoparError as error:
            assert len(str(error)) > 20
    assert ran


@pytest.mark.parametrize(("name", "mesh"), [("sharded", (1, 2)), ("sharded", (2, 4)), ("pinned", (4, 2))])
def test_a_mesh_that_was_changed_alone_is_refused_by_a_line_that_disagrees(name: str, mesh: tuple[int, ...]) -> None:
    with pytest.raises(OptionsError, match=r"(lines|holdings)\[\d+\]"):
        replace(plan(name), mesh=mesh).validate()


def test_what_rests_is_what_the_mesh_leaves_on_a_device() -> None:
    made = plan("sharded")
    with pytest.raises(OptionsError, match=re.escape("on the mesh (1, 2) takes ")) as caught:
        replace(made, mesh=(1, 2)).validate()
    found = re.search(r"holdings\[(\d+)\] has (\d+) bytes of (\w+) '(\w+)'", str(caught.value))
    assert found is not None
    held = made.holdings[int(found[1])]
    assert (str(held.bytes), held.kind, held.name) == found.groups()[1:]


def _with_strategy(made: Plan, name: str, change: Callable[[Any], Any]) -> Plan:
    return replace(made, strategies={**made.strategies, name: change(made.strategies[name])})


def test_a_strategy_that_no_rule_offers_is_refused_with_the_nearest() -> None:
    made = plan("sharded")
    fixed = {*made.module_nodes.values(), *(line.name for line in made.lines if line.steps)}
    product = next(n for n, node in made.nodes.items() if node.op == "aten.mm.default" and n not in fixed)
    wrong = _with_strategy(made, product, lambda s: replace(s, inputs=s.inputs[::-1], outputs=(s.inputs[0],)))
    wrong.validate()
    with pytest.raises(PlanMismatchError, match=f"{product}.*its rule does not offer; closest"):
        bench().run(wrong)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d["strategies"].update(nonsense=0), "strategies names 'nonsense'"),
        (lambda d: d["parameters"].update({"first.weigth": d["parameters"].pop("first.weight")}), "first.weight"),
        (lambda d: d["predicted"].update(step_seconds="fast"), "predicted.step_seconds is 'fast', not a number"),
        (lambda d: d["predicted"].update(step_seconds=1.0), "predicted.step_seconds is 1.0"),
        (lambda d: d["predicted"].pop("mfu"), "mfu"),
        (lambda d: d["parameters"]["first.weight"].__setitem__(0, "(S(5),R)"), "not a placement of shape"),
        (lambda d: d["parameters"]["first.weight"].__setitem__(0, "(Q,R)"), "'Q' is not a placement"),
        (lambda d: d.update(mesh=[2, 2, 2]), "mesh"),
        (lambda d: d.update(colour="red"), "no field 'colour'"),
        (lambda d: d.update(lines=d["lines"][1:]), "the lines add up"),
        (lambda d: d["lines"][0].__setitem__(0, "compoot"), "compoot"),
    ],
)
def test_what_is_wrong_is_named(change: Callable[[Any], None], said: str) -> None:
    data = json.loads(json.dumps(plan_to_dict(plan("sharded"))))
    change(data)
    with pytest.raises(OptionsError, match=said.replace("(", r"\(")):
        Plan.from_json(json.dumps(signed(data)))


def test_a_name_that_is_there_twice_is_refused() -> None:
    text = plan("sharded").to_json()
    repeated = text.replace('"batch": 8', '"batch": 8,\n  "batch": 16')
    with pytest.raises(OptionsError, match="'batch' is there twice"):
        Plan.from_json(repeated)


def test_the_command_line_refuses_an_edited_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    made = plan("sharded")
    path.write_text(made.to_json().replace(f'"status": "{made.status}"', '"status": "best"'))
    for words in (["show", str(path)], ["explain", str(path), "first"], ["diff", str(path), str(path)]):
        assert main(words) == 2
        assert "best" in capsys.readouterr().err


EDITS: dict[str, Callable[[PlanLine], PlanLine]] = {
    "bytes": lambda line: replace(line, steps=(replace(line.steps[0], bytes=2 * line.steps[0].bytes),)),
    "kind": lambda line: replace(line, steps=(replace(line.steps[0], kind="all_to_all"),)),
    "axes": lambda line: replace(line, steps=(replace(line.steps[0], axes=(1,)),)),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_collective_that_the_placements_do_not_need_is_found(edit: str) -> None:
    made = plan("sharded")
    place = next(i for i, line in enumerate(made.lines) if [s.axes for s in line.steps if s.bytes] == [(0, 1)])
    line = made.lines[place]
    wrong = replace(made, lines=(*made.lines[:place], EDITS[edit](line), *made.lines[place + 1 :]))
    with pytest.raises(OptionsError, match=rf"{line.name}\).* is priced as .*; it takes {line.steps[0].kind}"):
        wrong.validate()


def test_a_link_without_figures_is_found() -> None:
    """Files that are older than digests may lack them."""
    made = plan("staged")
    assert made.pipeline is not None
    with pytest.raises(OptionsError, match=r"pipeline.link_figures lack those from 0 to 1"):
        replace(made, pipeline=replace(made.pipeline, link_figures=())).validate()


def _entries(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every entry of plain data."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from _entries(value, (*path, key))


WORDS_OF_PYTHON = re.compile(
    r"\w+Error\b|unpack|subscriptable|not iterable|unhashable|object has no|NoneType|out of range|expected \d"
)


@pytest.mark.parametrize(("name", "is_folded"), [("sharded", True), ("staged", False)])
def test_an_entry_of_another_form_is_named(name: str, is_folded: bool) -> None:
    """One entry of each field and depth, made other things, with digests that fit."""
    made, draw = plan(name), random.Random(0)
    text = made.to_json() if is_folded else json.dumps(plan_to_dict(made))
    groups: dict[tuple[Any, int], list[tuple[Any, ...]]] = {}
    for path in _entries(json.loads(text)):
        groups.setdefault((path[0], len(path)), []).append(path)
    refused = 0
    for paths in groups.values():
        for value in draw.sample([None, "x", -1, 99, 2**70, 1e308, [], {}, ["a"], [None] * 4], 2):
            path, data = draw.choice(paths), json.loads(text)
            holder = data
            for key in path[:-1]:
                holder = holder[key]
            holder[path[-1]] = value
            if not is_folded and path[0] not in ("version", "written"):
                data = signed(data)
            try:
                str(Plan.from_json(json.dumps(data)))
            except OptionsError as error:
                assert not WORDS_OF_PYTHON.search(str(error)), (path, value)
                assert len(path) > 1 or str(path[0]) in str(error) or value == {}, (path, value, str(error))
                refused += 1
    assert refused > len(groups)
