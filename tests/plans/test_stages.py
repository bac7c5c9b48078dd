"""Plans with pipeline stages, printed and questioned: what each stage holds, takes, sends and why."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

import autopar
from autopar import Plan
from autopar.command_line import main
from autopar.errors import OptionsError, PlanMismatchError
from autopar.options import Options
from autopar.planner.prepare import prepare
from autopar.planner.request import PlanRequest
from autopar.planner.timings import Timings
from autopar.plans.views.module_tree import module_rows
from autopar.plans.views.stage_table import _group_lines, stage_lines
from autopar.plans.views.stages import busiest_stage, folded_modules, fullest_stage, sends, stage_rows
from autopar.plans.views.summary import _wrapped
from autopar.schedule.check import check
from autopar.search.best_plan import best_plan
from tests.helpers.chrome_trace import timeline_from_chrome_trace
from tests.helpers.models import Stack, text
from tests.helpers.planning import slow_devices
from tests.plans.test_summary import check_shape
from tests.search.test_best_plan import plan as planned


@cache
def staged() -> Plan:
    return planned((2, 2), stages=2, microbatches=4, schedule="1f1b", pins={"blocks.2": "stage 1"})


@cache
def sharded() -> Plan:
    return planned((2, 2), stages=2, microbatches=4, schedule="1f1b", pins={"blocks.*.up.weight": "S(0)"})


@cache
def interleaved() -> Plan:
    return planned((2,), stages=2, microbatches=4, schedule="interleaved")


def test_print_says_how_the_pipeline_is_cut_and_run() -> None:
    plan = staged()
    lines = check_shape(plan)
    assert lines[1].startswith("mesh   (pp=2, ")
    (schedule,) = [line for line in lines if line.startswith("2 stages")]
    assert "· 1f1b · 4 microbatches · 1 chunk a stage · bubble " in schedule
    first, second = (line for line in lines if re.match(r"[01]  ", line))
    assert "0-1" in first and "embed" in first and "2-3" in second and "blocks.2" not in first
    sent = [line for line in lines if "↳ send" in line]
    assert any("x4 → stage 1" in line for line in sent) and any("x4 → stage 0" in line for line in sent)
    assert "modules of all stages · a whole step of 4 microbatches" in "\n".join(lines)


def test_of_a_pipeline_the_placements_alone_are_proven() -> None:
    """What their program bounds is the work of all stages, which may be more than the step takes."""
    plan = staged()
    assert plan.bound > plan.predicted.step_seconds
    assert "\nstatus placements OPTIMAL within " in str(plan)
    assert "\nstatus OPTIMAL within " in str(planned((2,), stages=1, microbatches=1))


@pytest.mark.parametrize("make", [staged, interleaved])
def test_parts_of_the_busiest_stage_add_up_to_the_step(make: object) -> None:
    plan: Plan = make()  # type: ignore[operator]
    total = " ".join(str(plan).split(f"\nstage {busiest_stage(plan)} ", 1)[1].split("\nin stage")[0].split())
    shares = [int(found) for found in re.findall(r"\((\d+)%\)", total)]
    assert "bubble" in total and 97 <= sum(shares) <= 103
    rows = stage_rows(plan)
    busiest = rows[busiest_stage(plan)]
    p = plan.predicted
    assert busiest.busy + p.bubble_seconds == pytest.approx(p.step_seconds)
    assert max(row.peak for row in rows) == plan.predicted.peak_bytes


def test_rows_of_modules_are_of_all_stages() -> None:
    plan = staged()
    rows = module_rows(plan)
    expected = plan.seconds_of("compute", "exchange", "reshard", "weight")
    assert sum(row.seconds * row.count for row in rows) == pytest.approx(expected)
    assert {stage for row in rows for stage in row.stages} == {0, 1}


def test_many_stages_stay_within_the_page() -> None:
    plan = staged()
    pipeline = plan.pipeline
    assert pipeline is not None
    wide = replace(
        plan,
        stages=40,
        lines=tuple(replace(line, stage=s, seconds=line.seconds * (1 + s)) for s in range(40) for line in plan.lines),
        pipeline=replace(
            pipeline,
            schedule=replace(
                pipeline.schedule,
                ranks=tuple(pipeline.schedule.ranks[0] for _ in range(40)),
                in_flight=(1,) * 40,
            ),
            peaks=tuple(range(40)),
        ),
        warnings=tuple("w" * 200 for _ in range(9)),
        baselines={f"other {n}": plan.predicted for n in range(9)},
    )
    lines = check_shape(wide)
    assert any("more stages, busy" in line for line in lines)
    same = replace(wide, lines=tuple(replace(line, stage=s) for s in range(40) for line in plan.lines))
    assert pipeline.peaks and any("each" in line for line in stage_lines(_with_peaks(same, (1 << 20,) * 40), 30)), (
        "stages that read alike share a row"
    )


def _with_peaks(plan: Plan, peaks: tuple[int, ...]) -> Plan:
    assert plan.pipeline is not None
    return replace(plan, pipeline=replace(plan.pipeline, peaks=peaks))


def test_names_of_neighbours_fold() -> None:
    assert folded_modules(["embed", "h.0", "h.1", "h.2", "norm"]) == "embed, h.{0..2}, norm"
    assert folded_modules(["h.3.up", "h.4"]) == "h.3.up, h.4"
    assert folded_modules([]) == ""


def test_why_names_the_stage_and_who_chose_it() -> None:
    plan = staged()
    module = plan.why("blocks.2")
    assert module.stage.startswith("1 (ranks 2-3), by the user: pin 'blocks.2': 'stage 1'")
    assert module.provenance != "user", "a pin of a stage fixes no placement"
    weight = plan.why("blocks.0.up.weight")
    assert weight.stage.startswith("0 (ranks 0-1), by price")
    assert weight.stage in str(weight)
    (forward, *_) = [one for one in sends(plan) if one.phase == "forward"]
    said = plan.why(forward.names[0])
    assert said.sent and said.sent[0].startswith("from stage 0 to 1 as (") and said.sent[0] in str(said)
    assert not plan.why("norm.weight").sent


def test_every_name_of_a_staged_plan_can_be_asked() -> None:
    for plan in (staged(), interleaved(), sharded()):
        for name in (*plan.parameters, *plan.outputs, *plan.nodes):
            assert str(plan.why(name))


def test_why_counts_every_part_of_a_gradient() -> None:
    """The embedding's weight is also the head's: each of its stages makes a part of its gradient."""
    plan = sharded()
    assert plan.gradient_values["embed.weight"].count(",") == 1
    costs = [plan.why(path).costs for path in plan.parameters]
    found = sum(cost.seconds for one in costs for cost in one if cost.what == "grad sync")
    assert found == pytest.approx(plan.seconds_of("gradient"))


def test_collectives_of_stages_are_those_of_the_plan() -> None:
    plan = sharded()
    assert plan.collectives(0) and plan.collectives(1)
    each = [sum(c.count for c in plan.collectives(stage)) for stage in range(2)]
    assert sum(each) == sum(c.count for c in plan.collectives())
    table = plan.table("collective")
    assert sum(int(row[3]) for row in table.rows) == sum(each)


def test_table_by_stage() -> None:
    table = staged().table(by="stage")
    assert {row[0] for row in table.rows} == {"0", "1"}
    at = table.columns.index("seconds"), table.columns.index("idle")
    assert all(
        float(row[at[0]]) + float(row[at[1]]) == pytest.approx(staged().predicted.step_seconds) for row in table.rows
    )
    assert "0-1" in str(table) and "idle" in str(table)


def test_shares_of_all_stages_are_at_most_the_whole() -> None:
    plan = staged()
    for by in ("module", "kind", "phase"):
        shares = re.findall(r"(\d+)%", str(plan.table(by)))
        assert sum(map(int, shares)) <= 103
    tree = str(plan.tree())
    assert "pp=2" in tree and "stage 0" in tree and f"memory of stage {fullest_stage(plan)}" in tree


def test_diff_names_cuts_and_what_is_sent() -> None:
    assert staged().diff(staged()).same
    found = interleaved().diff(staged())
    changed = {change.path: (change.before, change.after) for change in found.settings}
    before, after = changed["chunks per stage"]
    assert int(before) > 1 and after == "1" and changed["schedule"] == ("interleaved", "1f1b")
    assert "cuts" in changed and "cuts" in str(found)
    assert any(change.what.startswith("sent 0 to 1") for change in found.placements)
    pipelines = [plan.pipeline for plan in (interleaved(), staged()) if plan.pipeline is not None]
    internal = {name for pipeline in pipelines for name in (*pipeline.cuts, *(edge.name for edge in pipeline.wires))}
    shown = " ".join([*changed["cuts"], *(change.path for change in found.placements)]).replace(",", "").split()
    assert len(pipelines) == 2 and internal.isdisjoint(shown), "names of nodes are the graph's own"


def test_diff_shows_the_axis_of_stages() -> None:
    plan = staged()
    (mesh,) = (c for c in plan.diff(replace(plan, mesh=(4,), axis_names=("dp",), stages=1, pipeline=None)).settings
               if c.path == "mesh")  # fmt: skip
    assert mesh.before.startswith("(pp=2") and mesh.after == "(dp=4)"


def test_timeline_is_the_step_that_was_predicted(tmp_path: Path) -> None:
    plan = Plan.from_json(staged().to_json())
    timeline = autopar.step_timeline(plan)
    assert timeline.seconds == pytest.approx(plan.predicted.step_seconds)
    assert timeline.stages == 2 and plan.pipeline is not None
    check(plan.pipeline.schedule)
    whole = planned((2,), stages=1)
    assert autopar.step_timeline(whole).seconds == pytest.approx(whole.predicted.step_seconds)
    source, target = tmp_path / "plan.json", tmp_path / "step.json"
    source.write_text(plan.to_json())
    assert main(["explain", str(source), "--timeline", str(target)]) == 0
    read = timeline_from_chrome_trace(json.loads(target.read_text()))
    assert read.seconds == pytest.approx(timeline.seconds, rel=1e-4)
    assert main(["explain", str(source)]) == 2


def test_json_text_and_page(tmp_path: Path) -> None:
    for plan in (staged(), interleaved()):
        assert Plan.from_json(plan.to_json()) == plan == Plan.from_text(plan.to_text())
        assert str(Plan.from_json(plan.to_json())) == str(plan)
    staged().to_html(tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert "<h2>Stages</h2>" in page and "pp=2" in page and "bubble" in page and "stage 1: backward" in page


@pytest.mark.slow
def test_others_that_were_priced_are_listed() -> None:
    asked = planned((4,), microbatches=4, schedule="1f1b")
    assert asked.stages in (2, 4)
    (other,) = (name for name in asked.baselines if " stages" in name)
    assert other.startswith(f"{6 - asked.stages} stages") and other.endswith(", 1f1b, 4 microbatches")
    best = asked.predicted.step_seconds
    assert all(found is None or found.step_seconds >= best for found in asked.baselines.values())
    free = planned((2, 2))
    assert {"data parallel"} <= {name.partition(" (")[0].strip() for name in free.baselines}
    fitting = [p for p in free.baselines.values() if p is not None and p.peak_bytes <= free.memory_limit]
    assert all(p.step_seconds >= free.predicted.step_seconds * (1 - 1e-9) for p in fitting)


def test_a_pipeline_is_priced_at_other_batches() -> None:
    cluster = slow_devices()
    base = prepare(Stack(layers=2), (), text(8, 8), device="cpu", loss_fn=None, training=True)
    options = Options(mesh_search=False, stages=2, microbatches=2, schedule="1f1b")
    plan = best_plan(PlanRequest(base.graph, base.loss, 8, (4,), cluster, options, "Stack"), Timings())
    again = autopar.reprice(plan, base, 8, cluster=cluster)
    assert again.predicted == plan.predicted and again.lines == plan.lines
    assert again.strategies == plan.strategies and again.pipeline == plan.pipeline
    more = autopar.reprice(plan, base, 16, cluster=cluster)
    assert more.batch == 16 and more.stages == 2 and more.pipeline is not None
    assert plan.predicted.step_seconds < more.predicted.step_seconds < 2.2 * plan.predicted.step_seconds
    with pytest.raises((OptionsError, PlanMismatchError), match="divide"):
        autopar.reprice(plan, base, 9, cluster=cluster)


def test_names_that_a_row_has_no_room_for_go_on_below_it() -> None:
    names = ("model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.layers.3", "model.norm", "lm_head")
    row = replace(stage_rows(staged())[0], modules=(names[:4], names[4:]))
    lines = list(_group_lines([row], 4, (), 9, True))
    assert len(lines) > 1 and max(map(len, lines)) <= 100
    printed = " ".join(" ".join(lines).split())
    assert all(each in printed for each in ("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"))
    assert len(list(_group_lines([row], 4, (), 9, False))) == 1


def test_labels_of_many_stages_end_before_their_figures() -> None:
    lines = list(_wrapped("in stage 10", ["weights 6.62 GiB", "gradients 13 GiB"]))
    assert lines == ["in stage 10 weights 6.62 GiB · gradients 13 GiB"]
    assert list(_wrapped("memory", ["weights 6.62 GiB"])) == ["memory     weights 6.62 GiB"]
