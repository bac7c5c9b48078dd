"""Digests of plan files: what is no choice, nor follows from one, cannot be edited."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

import autopar
from autopar.errors import OptionsError
from autopar.ir.placements import REPLICATE
from autopar.plans.as_written import signed
from autopar.plans.json import plan_to_dict
from autopar.plans.plan import Plan

from .test_edited import bench, is_right, plan


@cache
def undivided() -> Plan:
    """A plan under which every device has all of everything: nothing else in it follows from its mesh."""
    pins = dict.fromkeys(("*", "*.weight", "*.bias"), "R,R")
    options = autopar.Options(mesh_search=False, pins=pins)
    made = autopar.plan(bench().model, (2, 2), bench().batch, cluster="dgx-a100-80gb", options=options)
    assert {place for own in made.parameters.values() for place in own.optimizer} == {REPLICATE}
    return made


CHANGES: dict[str, Any] = {
    "mesh": [4, 2],
    "batch": 16,
    "cluster": "dgx-h100",
    "graph_hash": "0",
    "precision": "bf16",
    "optimizer": "sgd",
    "memory_limit": 5,
    "bound": 1.0,
    "gap": 0.5,
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_plan_was_made_for_cannot_be_edited(name: str) -> None:
    made, changed = undivided(), CHANGES[name]
    data = json.loads(made.to_json()) | {name: changed}
    said = re.escape(f"{name} is {json.dumps(changed)}, which is not what autopar wrote there")
    with pytest.raises(OptionsError, match=said):
        Plan.from_json(json.dumps(data))
    rows = [row for row in made.to_text().split("\n") if not row.startswith(f"{name} = ")]
    rows.insert(1, f"{name} = {json.dumps(changed)}")
    with pytest.raises(OptionsError, match=said):
        Plan.from_text("\n".join(rows))


def test_files_that_other_programs_wrote_anew_are_read() -> None:
    """Formatters write 1 for 1.0."""
    made = undivided()
    data = json.loads(made.to_json())
    whole = json.loads(
        json.dumps(data), parse_float=lambda text: int(float(text)) if float(text) % 1 == 0 else float(text)
    )
    assert Plan.from_json(json.dumps(whole, indent=1)) == made


@pytest.mark.parametrize("name", ["undivided", "staged"])
def test_a_digest_that_is_missing_is_refused_unless_the_file_is_older_than_digests(name: str) -> None:
    made = undivided() if name == "undivided" else plan(name)
    data = json.loads(made.to_json())
    for written, said in ((3, "written is 3, not a table"), ({}, "written has no digest of 'optimizer'")):
        with pytest.raises(OptionsError, match=said):
            Plan.from_json(json.dumps(data | {"written": written}))
    for one in data["written"]:
        others = {name: digest for name, digest in data["written"].items() if name != one}
        with pytest.raises(OptionsError, match=f"written has no digest of '{one}'"):
            Plan.from_json(json.dumps(data | {"written": others}))
    del data["written"]
    with pytest.raises(OptionsError, match="'written' is missing"):
        Plan.from_json(json.dumps(data))
    assert Plan.from_json(json.dumps(data | {"version": 9})) == made
    # Some of these had a few digests, made in another way.
    assert Plan.from_json(json.dumps(data | {"version": 9, "written": {"mesh": "0" * 8}})) == made


@pytest.mark.parametrize("number", [0.00028334847151513943, 0.012345678901234567])
def test_a_decimal_point_that_moved_is_found(number: float) -> None:
    data = json.loads(json.dumps(plan_to_dict(plan("sharded"))))
    made = signed(data | {"bound": number})
    with pytest.raises(OptionsError, match=r"bound is .* not what autopar wrote there"):
        Plan.from_json(json.dumps(made | {"bound": 10 * number}))


def test_placements_can_be_edited_with_the_bytes_that_follow() -> None:
    made = plan("sharded")
    data = json.loads(json.dumps(plan_to_dict(made)))
    row = next(row for row in data["holdings"] if row[:2] == ["weight", "first_weight"])
    data["parameters"]["first.weight"][0], more, row[3] = "(R,S(0))", row[3], 2 * row[3]
    with pytest.raises(OptionsError, match="holdings and temporary bytes add up to"):
        Plan.from_json(json.dumps(data))
    for part in ("peak_bytes", "weight_bytes"):
        data["predicted"][part] += more
    edited = Plan.from_json(json.dumps(data))
    assert edited.parameters["first.weight"].weight[0] == REPLICATE != made.parameters["first.weight"].weight[0]
    assert made.warnings == () and "placements were edited" in edited.warnings[0] and edited.warnings[0] in str(edited)
    assert Plan.from_text(edited.to_text()) == edited == Plan.from_json(edited.to_json())
    assert is_right(bench().run(edited))


def test_the_order_of_operations_cannot_be_edited() -> None:
    data = json.loads(json.dumps(plan_to_dict(plan("staged"))))
    data["nodes"] = dict(reversed(data["nodes"].items()))
    with pytest.raises(OptionsError, match=r"nodes is .*not what autopar wrote there"):
        Plan.from_json(json.dumps(data))


EDITED: dict[str, Callable[[Any], Any]] = {
    "predicted.mfu": lambda data: data["predicted"].update(mfu=0.99),
    "predicted.host_bytes": lambda data: data["predicted"].update(host_bytes=7),
    "pinned": lambda data: data["pinned"].update(first="R,R"),
    "baselines": lambda data: data["baselines"].clear(),
    "warnings": lambda data: data["warnings"].append("beware"),
    "alternatives": lambda data: data["alternatives"].clear(),
    "lines": lambda data: _move_seconds(data["lines"]),
    "parameters": lambda data: data["parameters"]["first.bias"].__setitem__(3, True),
    "outputs": lambda data: data["outputs"].pop("second"),
    "nodes": lambda data: data["nodes"]["unsqueeze"].__setitem__(4, []),
    "holdings": lambda data: data["holdings"][0].__setitem__(2, "second"),
    "tied": lambda data: data["tied"].clear(),
}


def _move_seconds(lines: list[Any]) -> None:
    """From one line to another, so that they add up to as many."""
    one, other = [line for line in lines if line[0] == "compute"][:2]
    one[4], other[4] = one[4] / 2, other[4] + one[4] / 2


@pytest.mark.parametrize("name", EDITED)
def test_what_nothing_else_tells_cannot_be_edited(name: str) -> None:
    data = json.loads(json.dumps(plan_to_dict(plan("sharded"))))
    EDITED[name](data)
    with pytest.raises(OptionsError, match=f"{name}(,| is) .*not what autopar wrote there"):
        Plan.from_json(json.dumps(data))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["pipeline", "schedule", "in_flight", 0], 1),
        (["pipeline", "wires", 0, 4], 8),
        (["pipeline", "update_seconds"], 1.0),
        (["pipeline", "chunk_figures", 0, 0], 1.0),
    ],
)
def test_a_pipeline_cannot_be_edited(path: list[Any], value: object) -> None:
    data = json.loads(plan("staged").to_json())
    holder = data
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    with pytest.raises(OptionsError, match=rf"pipeline.{path[1]} is .*not what autopar wrote there"):
        Plan.from_json(json.dumps(data))
