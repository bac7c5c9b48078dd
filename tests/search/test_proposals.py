"""On many devices, proposed layouts decide which stages are tried."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

import autopar
from autopar.compiler.plan_cache import plan_key
from autopar.errors import InfeasibleError, OptionsError
from autopar.ir.plan_record import Predicted
from autopar.layout import Layout
from autopar.planner.memory_limit import TooSlowError
from autopar.planner.request import PlanRequest, Proposals
from autopar.planner.step_graphs import pipelined_step_of
from autopar.planner.timings import Timings
from autopar.plans.page.page import render
from autopar.plans.plan import Plan
from autopar.restriction import words_of
from autopar.search import attempts
from autopar.search import best_plan as search
from autopar.search.attempts import proposes
from autopar.search.best_plan import best_plan
from autopar.search.candidate import NO_STAGES, Candidate, Excluded, Failure, Tried, tried_divisions
from autopar.search.division_bounds import Division, bounds_of, searched
from autopar.search.proposed import Least, tried_proposals
from tests.helpers.models import make
from tests.helpers.planning import requested

# Bytes with which no plan without stages fits.
SCARCE = 64_000
NOTHING: Mapping[Layout, float] = {}
TWO_STAGES = Layout(pipeline=2, tensor=2, microbatch=1, interleave=1)
FOUR_STAGES = Layout(pipeline=4, microbatch=1)


def request(
    *layouts: Layout, rule: Layout | None = None, quick: Mapping[Layout, float] = NOTHING, **options: object
) -> PlanRequest:
    """A request to plan the test model Stack on (2, 2), with ``layouts`` proposed, that of a ``rule`` of thumb, and
    ``quick`` prices of some."""
    open_ones = {"mesh_search": True, "stages": None, "microbatches": None}
    asked = requested("stack", (2, 2), **{**open_ones, **options})
    return replace(asked, propose=lambda _: Proposals(layouts, rule, quick, {} if rule is None else {rule: 1.2}))


@pytest.fixture(autouse=True)
def _four_devices_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "MANY_DEVICES", 4)


def tried(plan: Plan) -> str:
    return " ".join(plan.baselines)


def why_not(plan: Plan, kind: str) -> str:
    return next((why for name, why in plan.excluded.items() if name.partition(":")[0] == kind), "")


def test_a_proposal_is_solved_and_compared() -> None:
    plan = best_plan(request(TWO_STAGES), Timings())
    assert "2 stages" in tried(plan) and "4 stages" not in tried(plan)
    assert plan.layout == "", "the user asked for no layout"


@pytest.mark.parametrize("layouts", [(TWO_STAGES,), (Layout(pipeline=4, microbatch=1), TWO_STAGES)])
def test_the_best_of_each_kind_is_priced(layouts: tuple[Layout, ...]) -> None:
    """Whether the rule's layout is proposed as well or not."""
    plan = best_plan(request(*layouts, rule=TWO_STAGES), Timings())
    best = {1: "no stages", 2: "rule of thumb: 2 stages"}.get(plan.stages, "")
    for kind in {"no stages", "rule of thumb: 2 stages", "FSDP"} - {best}:
        said = why_not(plan, kind.partition(":")[0])
        assert (kind in tried(plan)) != said.startswith(("at least", "about")), f"{kind} is not among {tried(plan)}"
        assert kind[:9] in str(plan) and said in str(plan)


def test_what_quick_prices_put_far_behind_is_not_solved() -> None:
    rule = Layout(pipeline=4, microbatch=1)
    far = best_plan(request(TWO_STAGES, rule=rule, quick={TWO_STAGES: 1.0, rule: 1.2}), Timings())
    assert far.excluded["rule of thumb: pipeline=4 microbatch=1"] == "about 1.2 s"
    (named,) = (line for line in str(far).splitlines() if "pipeline=4 microbatch=1" in line)
    assert named.startswith(" "), "below the line of its kind"
    estimated = [each for each in far.searched.tried if each.how == "estimated"] if far.searched else []
    assert [(each.described, each.seconds) for each in estimated] == [("pipeline=4 microbatch=1", 1.2)]
    table = far.table(by="division")
    known, seconds = (table.columns.index(name) for name in ("known", "seconds"))
    assert {row[known] for row in table.rows} == {"solved", "estimated", "at least"}
    assert "pipeline=4 microbatch=1" in str(table)
    assert [row[seconds] for row in table.rows] == sorted(float(row[seconds]) for row in table.rows)
    assert far.searched is not None and far.searched.first in " ".join(str(far).split())
    # Whether it fits is for its own program to say.
    unknown = best_plan(request(TWO_STAGES, rule=rule, quick={TWO_STAGES: 1.0}), Timings())
    assert why_not(unknown, "rule of thumb") != "about 1.2 s" and far.predicted == unknown.predicted


def test_the_table_of_divisions_counts_what_print_counts() -> None:
    """One program solves several divisions; an estimate proves nothing of its own, which counts among the bounds. Nor
    are divisions shares of the plan: one that takes twice as long is no 200% of it."""
    rule = Layout(pipeline=4, microbatch=1)
    plan = best_plan(request(TWO_STAGES, rule=rule, quick={TWO_STAGES: 1.0, rule: 1.2}), Timings())
    found, table = plan.searched, plan.table(by="division")
    assert found is not None and found.solved > sum(each.how == "solved" for each in found.tried) > 0
    counts = [(int(row[1]), row[2]) for row in table.rows]  # type: ignore[arg-type]
    assert sum(count for count, _ in counts) == found.divisions
    assert sum(count for count, known in counts if known == "solved") == found.solved
    assert {count for count, known in counts if known == "at least"} == {found.left, found.excluded} - {0}
    assert f"search {found.solved} of {found.divisions} divisions" in str(plan)
    assert "share" not in str(table) and f"{1.2 / plan.predicted.step_seconds - 1:+.0%}" in str(table)
    wrong = replace(plan, searched=replace(found, solved=found.solved + 1, excluded=found.excluded - 1))
    with pytest.raises(OptionsError, match=r"searched.solved is \d+, but searched.tried adds up to"):
        wrong.validate()


def test_divisions_that_a_program_excludes_are_counted() -> None:
    def of(*pipelines: int) -> frozenset[Division]:
        return frozenset(Division(pipeline, 4 // pipeline, 1, 1, 1) for pipeline in pipelines)

    found = Candidate(1.0, None, _never, lambda: ("two", step_of(1.0)), divisions=of(2, 4))
    again = replace(found, seconds=3.0, figures=lambda: ("four", step_of(3.0)), divisions=of(4))
    slow = Excluded(NO_STAGES, TooSlowError("all", 2.0), divisions=of(1))
    known = tried_divisions(Tried((again, found), (slow, Excluded(NO_STAGES, InfeasibleError("too full")))), 4)
    counted = searched(bounds_of(request(), pipelined_step_of(request())), 4, 1, of(1, 2, 4), 1.0, known).tried
    assert [(each.described, each.how, each.divisions) for each in counted] == [
        ("two", "solved", 2),
        ("no stages", "at least", 1),
        ("four", "solved", 0),
    ]


def step_of(seconds: float) -> Predicted:
    return Predicted(seconds, seconds, 0.0, 0.0, *[0] * 7, mfu=0.0)


def _never() -> Plan:
    raise AssertionError("not asked for")


def order_of(
    proposals: Proposals | Callable[[float], Proposals],
    without: float,
    least: float = 0.0,
    layouts: float = 100.0,
    **options: object,
) -> tuple[list[Layout | None], Tried]:
    """The layouts that are solved, in order (None: plans without stages), and what is found. A plan of a layout takes
    ``layouts`` seconds, one without stages ``without``, at ``least`` so long; each solve uses half of the time that is
    left. ``proposals``: all, or those that take at most so many seconds."""
    propose = (lambda _: proposals) if isinstance(proposals, Proposals) else proposals
    asked, order, timings = request(**options), list[Layout | None](), Timings()

    def solve(own: PlanRequest) -> Tried:
        is_ahead = not order and own.options.layout is None
        order.append(own.options.layout)
        timings.solving += 0.5 * timings.left(own.options)
        seconds = without if own.options.layout is None else layouts
        if is_ahead and seconds > own.worth:
            return Tried(excluded=(Excluded(NO_STAGES, TooSlowError(NO_STAGES, seconds)),))
        return Tried((Candidate(seconds, None, _never, _never),))

    found = tried_proposals(asked, propose, timings, solve, lambda tried: tried.least, lambda: Least(least))
    return order, found


@pytest.mark.parametrize(
    ("quick", "without", "is_solved"),
    [
        pytest.param(1.04, 90.0, False, id="behind a plan without stages"),
        pytest.param(0.9, 90.0, True, id="as quick as that"),
        pytest.param(1.0, 200.0, True, id="as quick as the first"),
        pytest.param(1.04, 200.0, False, id="behind the first"),
    ],
)
def test_what_quick_prices_put_behind_what_is_solved_is_not(quick: float, without: float, is_solved: bool) -> None:
    """The layout that was solved takes 100 s, by its quick price too."""
    prices = {TWO_STAGES: 100.0, FOUR_STAGES: 100.0 * quick}
    order, _ = order_of(Proposals((TWO_STAGES, FOUR_STAGES), None, prices), without)
    assert order[:2] == [TWO_STAGES, None] and (FOUR_STAGES in order) == is_solved
    order, found = order_of(Proposals((TWO_STAGES,), FOUR_STAGES, prices), without)
    assert (FOUR_STAGES in order) == is_solved == (found.rule is not None)
    said = [] if is_solved else [f"{words_of(FOUR_STAGES)} take about {100.0 * quick:.3g} s"]
    assert [str(each.error) for each in found.excluded] == said


def within(worth: float) -> Proposals:
    """Two stages take 100 s by their quick price, four 110 s."""
    prices = {TWO_STAGES: 100.0, FOUR_STAGES: 110.0}
    found = [layout for layout, seconds in prices.items() if seconds <= worth]
    slow = next((layout for layout in prices if layout not in found), None)
    return Proposals(tuple(found), None, prices, slow=slow, slow_seconds=prices.get(slow, math.inf))


def test_where_all_quick_prices_are_far_behind_no_stages_come_first() -> None:
    """With memory to spare, a plan without stages takes 80 s; how long one takes that fits decides what is solved."""
    order, found = order_of(within, 90.0, least=80.0)
    assert order == [None]
    assert [(each.name, str(each.error)) for each in found.excluded] == [
        (f"pipeline stages: {TWO_STAGES}", f"{words_of(TWO_STAGES)} take at least about 100 s")
    ]


def test_plans_without_stages_come_first_only_while_they_may_be_quicker() -> None:
    """Those with memory to spare take 80 s, those that fit more than two stages by their quick price."""
    order, found = order_of(within, 105.0, least=80.0)
    assert order[:2] == [None, TWO_STAGES] and found.least == 100.0 and not {None, FOUR_STAGES} & {*order[2:]}
    assert [str(each.error) for each in found.excluded] == ["no stages take at least 105 s"]
    # Two stages take longer than their quick price.
    order, found = order_of(within, 105.0, least=80.0, layouts=120.0)
    assert order[:3] == [None, TWO_STAGES, None] and found.least == 105.0
    assert NO_STAGES not in {each.kind for each in found.excluded}


def test_plans_without_stages_of_which_none_fits_that_quick_are_sought_again() -> None:
    """That the step as a whole does not fit says nothing of one in microbatches, which quick layouts exclude."""

    def solve(own: PlanRequest) -> Tried:
        if own.options.layout is not None:
            return Tried((Candidate(120.0, None, _never, _never),))
        full = Failure(InfeasibleError("nothing fits"))
        return Tried((Candidate(105.0, None, _never, _never),)) if own.worth > 105.0 else Tried(failures=(full,))

    found = tried_proposals(request(), within, Timings(), solve, lambda tried: tried.least, lambda: Least(80.0))
    assert found.least == 105.0


def test_what_takes_longer_at_least_without_stages_is_not_solved() -> None:
    order, _ = order_of(within, 200.0, least=101.0)
    assert order[0] == TWO_STAGES and None not in order


def test_where_quick_prices_are_near_or_time_is_short_stages_come_first() -> None:
    order, found = order_of(within, 105.0, least=99.0)
    assert order[:2] == [TWO_STAGES, None] and not found.excluded
    order, _ = order_of(within, 90.0, least=80.0, time_limit=60.0)
    assert order[0] == TWO_STAGES and order[-1] is None


def test_seconds_that_are_limited_are_for_pipelines_first() -> None:
    order, _ = order_of(Proposals((TWO_STAGES, FOUR_STAGES), None, {}), 90.0, time_limit=60.0)
    assert order[:2] == [TWO_STAGES, FOUR_STAGES] and order[-1] is None


def test_a_rule_of_thumb_that_was_solved_is_named_however_little_time_is_left() -> None:
    order, found = order_of(Proposals((TWO_STAGES,), TWO_STAGES, {}), 90.0, time_limit=1e-9)
    assert order[0] == TWO_STAGES and found.rule is not None


def _never(*_: object) -> Any:
    raise AssertionError("not asked for")


def test_a_kind_that_does_not_fit_says_by_how_much() -> None:
    plan = best_plan(request(TWO_STAGES, rule=Layout(pipeline=4, microbatch=8), memory_limit=SCARCE), Timings())
    needs = re.fullmatch(r"does not fit: ([\d.]+) KiB of 62.5 KiB", plan.excluded["no stages"])
    assert needs is not None and float(needs[1]) > 62.5
    assert why_not(plan, "rule of thumb").startswith("does not fit")
    assert plan.excluded["no stages"] in str(plan) and plan.excluded["no stages"] in render(plan)
    assert Plan.from_json(plan.to_json()) == plan == Plan.from_text(plan.to_text())


def test_a_kind_that_is_too_slow_says_what_it_takes_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were stages a thousand times as quick as they are, nothing else would be worth a longer search."""
    asked = request(TWO_STAGES, quick={TWO_STAGES: 1.0, replace(TWO_STAGES, microbatch=2): 2.0})
    free = best_plan(asked, Timings())
    monkeypatch.setattr(search, "_worth", lambda _, tried: 1e-3 * tried.least)
    plan = best_plan(asked, Timings())
    assert plan.excluded["no stages"].startswith("at least")
    assert plan.searched is not None and free.searched is not None
    assert plan.searched.solved == free.searched.solved, "the program says so"
    assert plan.baselines["FSDP"] == free.baselines["FSDP"], "what others choose is priced nevertheless"
    assert plan.stages == 2


def test_proposals_that_are_impossible_leave_the_search_as_it_is() -> None:
    impossible = Layout(pipeline=2, tensor=2, microbatch=3)
    plan = best_plan(request(impossible), Timings())
    assert plan.predicted == best_plan(request(), Timings()).predicted


@pytest.mark.parametrize(
    "options", [{"stages": 2}, {"microbatches": 2}, {"zero": 3}, {"mesh_search": False}, {"pins": {"*": "R,R"}}]
)
def test_what_options_fix_is_not_proposed(options: dict[str, object]) -> None:
    assert proposes(request()) and not proposes(request(**options))


def test_only_plans_that_may_be_proposed_have_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    without = replace(request(), propose=None)
    assert plan_key(request()) != plan_key(without)
    monkeypatch.setattr(attempts, "MANY_DEVICES", 128)
    assert plan_key(request()) == plan_key(without)


def test_few_devices_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "MANY_DEVICES", 128)
    assert not proposes(request())


@pytest.mark.slow
def test_a_plan_of_a_proposal_computes_what_one_process_does() -> None:
    """The step has no room without stages: the proposed pipeline is the plan, and it runs."""
    model, batch = make("stack")
    plan = best_plan(request(TWO_STAGES, memory_limit=SCARCE), Timings())
    assert plan.pipeline is not None and plan.pipeline.schedule.stages == 2
    report = autopar.verify(model, (2, 2), batch, plan=plan)
    assert report.ok, str(report)
