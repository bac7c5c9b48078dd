"""The page of a plan: its pictures say what the plan says."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from autopar import Plan, step_timeline
from autopar.command_line import main
from autopar.errors import OptionsError
from autopar.ir.placements import parse_placements, short
from autopar.monitor.outputs import JsonLines
from autopar.monitor.record import StepRecord
from autopar.plans.page.measured import read_measured
from autopar.plans.page.memory_picture import HEIGHT, memory_picture
from autopar.plans.page.mesh_picture import mesh_pictures
from autopar.plans.page.page import render
from autopar.plans.page.step_records import read_records
from autopar.plans.page.timeline_picture import WIDTH, timeline_picture
from autopar.plans.views.memory_over_step import memory_over_step
from autopar.plans.views.quantities import duration
from autopar.schedule.timeline import Span, Timeline
from tests.helpers.plan_model import solved
from tests.plans.test_stages import interleaved, staged

RECTANGLE = re.compile(r"M([\d.]+) 0h([\d.]+)v")


def lengths(path: str) -> float:
    return sum(float(width) for _, width in RECTANGLE.findall(path))


def test_the_memory_over_a_step_has_the_plan_s_peak() -> None:
    for plan in (solved()[0], staged(), interleaved()):
        memory = memory_over_step(plan)
        highest = max(held for _, held in memory.levels) + memory.temporary
        assert memory.peak == plan.predicted.peak_bytes
        assert highest == pytest.approx(memory.peak, rel=0.05 if plan.stages > 1 else 1e-9)
        assert min(held for _, held in memory.levels) >= 0.999 * memory.resting > 0
        assert memory.levels[0][0] == 0 and memory.levels[-1][0] <= memory.seconds * (1 + 1e-9)
        times = [time for time, _ in memory.levels]
        assert times == sorted(times)


def test_activations_come_and_go() -> None:
    plan = solved()[0]
    memory = memory_over_step(plan)
    assert memory.levels[-1][1] == pytest.approx(memory.resting)
    highest = max(memory.levels, key=lambda level: level[1])
    assert highest[1] == memory.resting + plan.predicted.activation_bytes
    assert 0.1 * memory.seconds < highest[0] < 0.7 * memory.seconds


def test_the_picture_of_memory_is_below_the_limit() -> None:
    memory = memory_over_step(solved()[0])
    limit = int(memory.peak * 2)
    picture = memory_picture(memory, limit, 1)
    lines = {css: y for y, _, css in picture.lines}
    assert 0 < lines["limit"] < lines["peak"] < HEIGHT
    assert HEIGHT - lines["limit"] == pytest.approx(2 * (HEIGHT - lines["peak"]), abs=0.2)
    far = memory_picture(memory, 100 * limit, 1)
    assert [css for _, _, css in far.lines] == ["peak"]


def test_lanes_are_as_busy_as_the_stages() -> None:
    timeline = step_timeline(staged())
    picture = timeline_picture(timeline)
    assert [lane.label for lane in picture.lanes] == ["stage 0", "stage 1"]
    for rank, lane in enumerate(picture.lanes):
        computing = sum(lengths(strip.path) for strip in lane.strips if strip.css != "b")
        assert computing == pytest.approx(timeline.busy(rank) / timeline.seconds * WIDTH, abs=8)
    numbered = [number for _, number in picture.lanes[1].numbers]
    assert sorted(numbered) == sorted("0123" * 2)


def test_sixty_four_stages_with_many_microbatches_are_small() -> None:
    spans = tuple(
        Span(rank, f"F{rank}.{i}", kind, start, start + 0.4)
        for rank in range(64)
        for i in range(256)
        for kind, start in (("forward", rank + i), ("backward", rank + i + 0.4))
    )
    picture = timeline_picture(Timeline(64, spans, tuple(() for _ in range(64))))
    assert sum(len(strip.path) for lane in picture.lanes for strip in lane.strips) < 1_000_000
    assert picture.height <= 64 * 12 and sum(bool(lane.label) for lane in picture.lanes) == 16
    for lane in picture.lanes:
        drawn = sum(lengths(strip.path) for strip in lane.strips)
        assert drawn == pytest.approx(256 / picture_seconds(spans) * WIDTH, rel=0.25)


def picture_seconds(spans: tuple[Span, ...]) -> float:
    return max(span.end for span in spans)


@pytest.mark.slow
def test_devices_of_one_colour_hold_the_same_share() -> None:
    plan = solved()[0]
    path, place = next(iter(plan.parameters.items()))
    split = replace(place, weight=parse_placements("(R,S(0))"), optimizer=parse_placements("(S(0),S(0))"))
    (way,) = mesh_pictures(replace(plan, parameters={path: split}))
    grids = {grid.what: grid for grid in way.grids}
    assert [cell.share for cell in grids["weight"].cells] == [1, 2, 1, 2]
    assert [cell.share for cell in grids["optimizer state"].cells] == [1, 2, 3, 4]
    assert [cell.rank for cell in grids["weight"].cells] == [0, 1, 2, 3]
    assert "one of 2 shares" in grids["weight"].about
    whole = replace(place, weight=parse_placements("(R,R)"), gradient=parse_placements("(R,R)"))
    (way,) = mesh_pictures(replace(plan, parameters={path: replace(whole, optimizer=whole.weight)}))
    (grid,) = way.grids
    assert {cell.css for cell in grid.cells} == {"whole"} and "holds the whole" in grid.about
    (way,) = mesh_pictures(replace(plan, parameters={path: replace(whole, optimizer=whole.weight, offload="host")}))
    assert [grid.what for grid in way.grids] == ["weight and gradient", "optimizer state in host memory"]


def test_a_run_stands_beside_the_plan(tmp_path: Path) -> None:
    plan = solved()[0]
    p, record = plan.predicted, tmp_path / "steps.jsonl"
    taken = [100.0, *([2 * p.step_seconds] * 9)]
    lines = [
        {
            "step": i,
            "seconds": s,
            "memory_bytes": int(1.5 * p.peak_bytes),
            "mfu": p.mfu / 2,
            "straggler": 3 if i else None,
        }
        for i, s in enumerate(taken)
    ]
    record.write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 10, "sec')
    source = tmp_path / "plan.json"
    source.write_text(plan.to_json())
    page = tmp_path / "plan.html"
    assert main(["show", str(source), "--html", str(page), "--record", str(record)]) == 0
    text = " ".join(re.sub(r"<[^>]+>", " ", page.read_text()).split())
    assert "Predicted and measured" in text and "+100%" in text and "+50%" in text and "-50%" in text
    assert "rank 3 in 9 of 9 steps" in text and "9 steps took" in text
    assert main(["show", str(source), "--record", str(record)]) == 2
    record.write_text("{}\n")
    with pytest.raises(OptionsError, match=r"has 1 records of steps"):
        plan.to_html(page, record)
    record.write_text("no json\n{}\n")
    with pytest.raises(OptionsError, match="line 1: not JSON"):
        plan.to_html(page, record)
    with pytest.raises(OptionsError, match="cannot read the record"):
        plan.to_html(page, tmp_path / "none")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"seconds": "\xff"}', "not UTF-8, byte 0xff at 13"),
        (b'{"seconds": "soon"}', 'seconds is "soon", which no step has'),
        (b'{"seconds": -1}', "seconds is -1, which"),
        (b'{"seconds": true}', "seconds is true, which"),
        (b'{"seconds": 1e400}', "seconds is Infinity, which"),
        (b'{"memory_bytes": [1, 2]}', r"memory_bytes is \[1, 2\], which"),
        (b'{"memory_bytes": ' + b"9" * 100 + b"}", r"memory_bytes is 9{37}\.\.\., which"),
        (b'{"memory_bytes": ' + b"9" * 5000 + b"}", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[1]", r"\[1\] is not the record of a step"),
    ],
)
def test_a_line_that_no_run_writes_is_named(tmp_path: Path, line: bytes, said: str) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_bytes(b'{"seconds": 1.0}\n' + line + b'\n{"seconds": "nan", "mfu": null, "loss": "x"}\n')
    with pytest.raises(OptionsError, match=f"line 2: {said}.* Give the steps.jsonl that autopar.monitor"):
        read_records(path)
    path.write_bytes(path.read_bytes().replace(line + b"\n", b""))
    assert [record.figures for record in read_records(path)] == [{"seconds": 1.0}, {}]


def test_a_record_goes_on_after_a_run_that_was_killed(tmp_path: Path) -> None:
    """The first step of each run is not counted, and half a line is none."""
    path = tmp_path / "steps.jsonl"
    for begin, cut in ((0, 20), (3, 5), (2, 0)):
        file = JsonLines(path)
        for i in range(begin, begin + 4):
            file.write(StepRecord(i, 1.0, 100.0 if i == begin else 1.0, first_of_run=i == begin or None))
        file.close()
        path.write_bytes(path.read_bytes()[: -cut or None])
    assert [record.starts for record in read_records(path)] == [i in (0, 3, 6) for i in range(10)]
    assert read_measured(solved()[0], path).about.startswith("7 steps took 1 s in the median, 1 s to 1 s")
    old = [b'{"step": %d, "seconds": 1.0}' % i for i in range(4)]
    path.write_bytes(b"\n".join([*old, old[3][:20] + old[2], old[3], old[3][:4] + old[1]]))
    assert [record.starts for record in read_records(path)] == [i in (0, 4, 6) for i in range(7)]


def test_a_record_of_another_plan_is_told(tmp_path: Path) -> None:
    plan, path = solved()[0], tmp_path / "steps.jsonl"
    own = {"seconds": 1.0, "predicted_seconds": plan.predicted.step_seconds}
    other = {"seconds": 3.0, "predicted_seconds": 0.5}
    for records, said in (
        ([own, own, own], f"predicted {duration(plan.predicted.step_seconds)}"),
        ([other, other], "The run is one of another plan, which predicts 500 ms"),
        ([own, other, own, other], "2 steps of another plan, which predicts 500 ms, are left out"),
    ):
        path.write_text("\n".join(map(json.dumps, records)))
        assert read_measured(plan, path).about.endswith(said)
    assert read_measured(plan, path).about.startswith("1 step took 1 s")


def test_a_notebook_gets_the_page_in_a_frame() -> None:
    plan = solved()[0]
    shown = plan._repr_html_()
    found = re.fullmatch(r'<iframe title="[^"]*" srcdoc="([^"]*)" style="[^"]*"></iframe>', shown, re.DOTALL)
    assert found and html.unescape(found[1]) == render(plan)


def test_parameters_of_equal_layers_share_a_row() -> None:
    page = render(solved()[0])
    assert page.count("<code>blocks.{0..2}.first.weight</code>") == 1
    assert "<code>blocks.1.first.weight</code>" not in page and "in host memory" not in page
    plan = solved()[0]
    moved = {
        path: replace(place, offload="host" if path == "embed.weight" else "")
        for path, place in plan.parameters.items()
    }
    cell = f"{short(plan.parameters['embed.weight'].optimizer)} in host memory</td>"
    assert render(replace(plan, parameters=moved)).count(cell) == 1


def test_the_page_is_that_of_a_plan_read_again() -> None:
    for plan in (solved()[0], staged()):
        assert render(Plan.from_json(plan.to_json())) == render(plan)
