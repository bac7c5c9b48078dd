"""A plan written and read: JSON, lines of text, HTML; what is no plan is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import OptionsError
from autopar.ir.graph import Graph
from autopar.ir.placements import short
from autopar.passes.recompute.saved_values import save_activations
from autopar.planner.step_graphs import graph_hash
from autopar.plans.as_written import signed
from autopar.plans.folded_tables import folded, unfolded
from autopar.plans.json import plan_to_dict
from autopar.plans.plan import Plan
from tests.helpers.plan_model import PIN, pinned_plan, solved
from tests.passes.test_lower_text import PERCEPTRON


@pytest.fixture(scope="module")
def plan() -> Plan:
    return solved()[0]


@pytest.fixture(scope="module")
def pinned() -> Plan:
    return pinned_plan()


def test_json_and_text_give_the_same_plan(plan: Plan, pinned: Plan) -> None:
    for made in (plan, pinned, replace(plan, gap=float("inf"), bound=float("-inf"), model='a "b" \u2028 # = [x]\n')):
        assert Plan.from_json(made.to_json()) == made
        assert Plan.from_text(made.to_text()) == made
        assert Plan.from_json(made.to_json()).timings == made.timings
        assert Plan.from_text(made.to_text()).to_text() == made.to_text()
        assert str(Plan.from_json(made.to_json())) == str(made)
        json.loads(made.to_json(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param({"precision": "fp16"}, marks=pytest.mark.slow),
        pytest.param({"precision": "bf16", "zero": 3}, marks=pytest.mark.slow),
        {"offload": True},
        {"precision": "fp16", "stages": 2, "microbatches": 2},
        {"zero": 1, "microbatches": 4},
    ],
    ids=str,
)
def test_plans_of_every_kind_can_be_read(asked: dict[str, Any]) -> None:
    """Reading validates: what is written is never refused."""
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64), nn.Linear(64, 1))
    options, cluster = autopar.Options(**asked), "dgx-a100-80gb"
    made = autopar.plan(model, (2, 2), (torch.randn(16, 64),), cluster=cluster, options=options, loss_fn=mean)
    assert Plan.from_json(made.to_json()) == made
    assert Plan.from_json(made.to_json()).to_json() == made.to_json()
    assert Plan.from_text(made.to_text()) == made


def mean(output: torch.Tensor) -> torch.Tensor:
    """The loss."""
    return output.mean()


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


@pytest.mark.parametrize("printed", [Plan.to_json, Plan.to_text])
def test_a_plan_of_version_7_is_read(plan: Plan, printed: Callable[[Plan], str]) -> None:
    """It called the operation that saves an activation otherwise; the hash of its graph is the same."""
    text = printed(plan) if printed is Plan.to_text else json.dumps(plan_to_dict(plan))
    assert "autopar.saved" in text
    older = text.replace("autopar.saved", "autopar.rest").replace('"version": 10', '"version": 7')
    older = older.replace("autopar plan 10\n", "autopar plan 7\n")
    read = Plan.from_json if printed is Plan.to_json else Plan.from_text
    assert older != text
    with pytest.raises(OptionsError, match=r"version, the number of its form, is not what autopar wrote there"):
        read(older)
    unsigned = re.sub(r', "written": \{[^}]*\}|\[written\]\n("[^\n]*\n)*', "", older)
    assert len(unsigned) < len(older) and read(unsigned) == plan


def test_versions_that_are_read_are_named(plan: Plan) -> None:
    """Of folded files too, which have numbers of their own."""
    with pytest.raises(OptionsError, match=r"version 99, but this autopar reads versions 7, 8, 9, 10, 11, 12;"):
        Plan.from_json(plan.to_json().replace('"version": 12', '"version": 99'))
    assert Plan.from_json(plan.to_json().replace('"version": 12', '"version": 11')) == plan


def test_options_that_prices_depend_on_are_written_if_they_are_not_the_defaults(plan: Plan) -> None:
    priced = {"optimizer": "adam", "compile": False, "imbalance": 1.25}  # With as much state as adamw.
    assert not priced.keys() & plan_to_dict(plan).keys()
    made = replace(plan, **priced)  # type: ignore[arg-type]
    assert Plan.from_json(made.to_json()) == made == Plan.from_text(made.to_text()) != plan
    assert [change.path for change in plan.diff(made).settings] == list(priced)
    for wrong in ({"optimizer": "sdg"}, {"compile": "yes"}, {"imbalance": 0.5}, {"imbalance": "much"}):
        with pytest.raises(OptionsError, match=f"{next(iter(wrong))} is"):
            Plan.from_json(json.dumps(signed(plan_to_dict(plan) | wrong)))
    with pytest.raises(OptionsError, match=r"compile is 'yes', not auto or true or false$"):
        Plan.from_json(json.dumps(signed(plan_to_dict(plan) | {"compile": "yes"})))


def test_folded_tables_hold_what_equal_layers_share_once(plan: Plan) -> None:
    data = json.loads(json.dumps(plan_to_dict(plan)))
    small = folded(data)
    assert unfolded(json.loads(json.dumps(small))) == data
    assert Plan.from_json(json.dumps(data)) == Plan.from_json(plan.to_json()) == plan
    sizes = [len(json.dumps({name: each[name] for name in ("nodes", "lines")})) for each in (small, data)]
    assert sizes[0] < 0.6 * sizes[1]


@pytest.mark.parametrize(
    ("table", "row"),
    [("nodes", [0, 0, [1], ""]), ("nodes", [9999, 0, [], ""]), ("nodes", [0, -1, [], ""]), ("nodes", [0, 0])],
)
def test_rows_that_refer_to_nothing_are_an_options_error(plan: Plan, table: str, row: list[Any]) -> None:
    data = json.loads(plan.to_json())
    data[table]["rows"][next(iter(data[table]["rows"]))] = row
    with pytest.raises(OptionsError, match="plan"):
        Plan.from_json(json.dumps(data))


def test_the_hash_of_a_graph_is_that_of_version_7() -> None:
    """As plans had it before operations that save activations were called so."""
    assert graph_hash(save_activations(Graph.from_text(PERCEPTRON))) == "20ef2e1771137a4b"


def test_a_plan_of_version_6_is_to_be_made_again(plan: Plan) -> None:
    """Its predictions had another field."""
    data = plan_to_dict(plan)
    older = data | {"version": 6, "predicted": data["predicted"] | {"hidden_seconds": 0.0}}
    with pytest.raises(OptionsError, match=r"has format version 6.*plan the model again"):
        Plan.from_json(json.dumps(older))


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
        assert not {name for name, _ in attrs} & {"src", "onclick"}
        assert all(value.startswith("#") for name, value in attrs if name == "href")
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
        assert path.replace(".0.", ".{0..2}.").replace(".1.", ".{0..2}.").replace(".2.", ".{0..2}.") in page
    with pytest.raises(OptionsError, match="cannot write"):
        plan.to_html(tmp_path / "none" / "plan.html")


@pytest.mark.parametrize("form", ["json", "txt"])
@pytest.mark.parametrize("begin", ["", "\ufeff", "\ufeff\r\n"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_files_that_an_editor_wrote_anew_are_read(plan: Plan, tmp_path: Path, form: str, begin: str, end: str) -> None:
    text = plan.to_json() if form == "json" else plan.to_text()
    written, path = begin + text.replace("\n", end), tmp_path / f"plan.{form}"
    path.write_bytes(written.encode())
    assert Plan.load(path) == plan
    assert (Plan.from_json if form == "json" else Plan.from_text)(written) == plan


def test_indented_lines_and_comments_are_read(plan: Plan) -> None:
    text = plan.to_text().replace("[parameters]\n", "  # mine\n[parameters]  \n").replace("\nend\n", "\n end \n")
    assert Plan.from_text(text) == plan
