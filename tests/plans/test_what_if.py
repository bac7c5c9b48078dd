"""``plan.whatif``: every row is the plan that autopar makes for the changed question."""

from __future__ import annotations

import gc
import html
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import api
from autopar.command_line import main
from autopar.compiler import plan_cache
from autopar.errors import ArgumentError, OptionsError
from autopar.planner import request as of_request
from autopar.planner import solve_mesh
from autopar.plans.page.frontier_picture import HEIGHT, frontier_picture, frontier_sections
from autopar.plans.page.page import render
from autopar.plans.plan import Plan
from autopar.plans.question import _questions, resized
from autopar.plans.views.quantities import duration
from autopar.plans.views.what_if import Answer, WhatIf
from tests.helpers.marks import slow_rows_but
from tests.helpers.models import VOCABULARY, Case, gpt2, llama, pictures, text

CLUSTER = "dgx-a100-80gb"
OPTIONS = autopar.Options(mesh_search=False)


class Block(nn.Module):
    """A residual block, whose hidden values are most of the memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(nn.functional.gelu(self.first(x)))


class Blocks(nn.Module):
    """Two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@cache
def model() -> nn.Module:
    with torch.device("meta"):
        return Blocks()


def batch(size: int = 4096) -> torch.Tensor:
    return torch.empty(size, 64, device="meta")


def squared(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (output - targets).square().mean()


def ask(mesh: Any = (2, 2), size: int = 4096, cluster: str = CLUSTER, **options: Any) -> Plan:
    settings = replace(OPTIONS, **options)
    return autopar.plan(
        model(), mesh, batch(size), cluster=cluster, options=settings, loss_fn=squared, targets=batch(size)
    )


@pytest.fixture
def own_plans(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No plan comes from a cache, so that equal ones were made twice."""
    monkeypatch.setenv("AUTOPAR_CACHE", "off")
    plan_cache.forget()
    yield
    plan_cache.forget()


QUESTIONS = [
    ("memory_limit", 5 << 20, {"memory_limit": 5 << 20}),
    ("devices", 8, {"mesh": (4, 2)}),
    ("batch", 1000, {"size": 1000}),
    ("devices", 1, {"mesh": (1,)}),
    ("devices", (1, 4), {"mesh": (1, 4)}),
    ("precision", "bf16", {"precision": "bf16"}),
    ("cluster", "dgx-h100", {"cluster": "dgx-h100"}),
]


@pytest.mark.parametrize(("sweep", "value", "asked"), slow_rows_but((0, 2), QUESTIONS))
@pytest.mark.usefixtures("own_plans")
def test_each_answer_is_the_plan_of_that_question(sweep: str, value: Any, asked: dict[str, Any]) -> None:
    (answer,) = ask().whatif(**{sweep: [value]}).answers
    independent = ask(**asked)
    assert answer.plan is not None and answer.error == ""
    assert replace(answer.plan, solve_seconds=0.0) == replace(independent, solve_seconds=0.0)
    assert answer.seconds == independent.predicted.step_seconds
    assert (answer.sweep, answer.value) == (sweep, value)


class Pictures(nn.Module):
    """A convolution under a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(8, 10)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.net(pixel_values)), labels)


def mixture() -> Case:
    """Experts as grouped products."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCABULARY, num_local_experts=4, num_experts_per_tok=2, bos_token_id=0, eos_token_id=1,
        experts_implementation="grouped_mm",
    )  # fmt: skip
    return MixtralForCausalLM(config), text()


ALONE = {"stages": 1, "microbatches": 1}
# A model, the options of its plan, and what is changed to what.
OTHERS: dict[str, tuple[Callable[[], Case], dict[str, Any], str, Any]] = {
    "convolution": (lambda: (Pictures(), pictures()), ALONE, "memory_limit", 300_000),
    "tied weights": (lambda: gpt2(1), ALONE, "memory_limit", 1_000_000),
    "layout": (lambda: llama(1), {"layout": autopar.Layout(data=2, tensor=2)}, "batch", 16),
    "pins": (
        lambda: llama(1),
        {**ALONE, "mesh_search": False, "pins": {"lm_head.weight": "R,S(0)"}},
        "cluster",
        "dgx-h100",
    ),
    "mixture of experts": (mixture, {**ALONE, "zero": 1}, "precision", "bf16"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.usefixtures("own_plans")
def test_answers_of_other_models_and_options_are_their_plans(name: str) -> None:
    """The second of two answers, which shares work with the first."""
    make, options, sweep, value = OTHERS[name]
    model, inputs = make()
    assert isinstance(inputs, dict)
    plan = autopar.plan(model, (2, 2), inputs, cluster=CLUSTER, options=autopar.Options(**options))
    others = {"memory_limit": 2 * plan.predicted.peak_bytes, "batch": 4, "cluster": CLUSTER, "precision": "fp32"}
    found = plan.whatif(**{sweep: [value, others[sweep]]})
    answer = next(each for each in found.answers if each.value == value)
    rows, cluster = (8, value) if sweep == "cluster" else (value if sweep == "batch" else 8, CLUSTER)
    settings = autopar.Options(**options, **({sweep: value} if sweep in ("memory_limit", "precision") else {}))
    independent = autopar.plan(model, (2, 2), resized(inputs, 8, rows), cluster=cluster, options=settings)
    assert answer.plan is not None, answer.error
    assert replace(answer.plan, solve_seconds=0.0) == replace(independent, solve_seconds=0.0)


@pytest.mark.usefixtures("own_plans")
def test_what_stays_the_same_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One trace for all answers but the plan's own; one program and its baselines for all limits of memory."""
    made: list[str] = []

    def counting(module: Any, name: str) -> None:
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, **kwargs: (made.append(name), original(*args, **kwargs))[1])

    plan = ask()
    peak = plan.predicted.peak_bytes
    counting(api, "_prepared")
    counting(of_request, "annotate")
    counting(solve_mesh, "_solve_baseline")
    answers = plan.whatif(memory_limit=[2 * peak, peak, int(0.9 * peak)], devices=[4, 8]).answers
    assert all(answer.plan is not None for answer in answers)
    assert made.count("_prepared") == 1
    assert made.count("annotate") == 3, "of 4 and of 8 devices, and of a microbatch where memory is short"
    assert made.count("_solve_baseline") == 6, "three of each mesh"


@cache
def found() -> WhatIf[Plan]:
    plan = ask()
    peak = plan.predicted.peak_bytes
    return plan.whatif(memory_limit=[2 * peak, peak, int(0.8 * peak), 1000], devices=[8, 2, 4, 3])


def test_answers_are_in_order_and_those_without_a_plan_say_why() -> None:
    memory, devices = found().of("memory_limit"), found().of("devices")
    assert [answer.amount for answer in memory] == sorted(answer.amount for answer in memory)
    assert [answer.value for answer in devices] == [2, 3, 4, 8]
    assert memory[0].plan is None and "The smallest limit found to fit is" in memory[0].error
    assert devices[1].plan is not None and devices[1].plan.mesh == (3,), "rows of two would not be full"
    for answer in memory[1:]:
        assert answer.plan is not None and answer.plan.predicted.peak_bytes <= answer.value
    assert found().sweeps == ("memory_limit", "devices")


def test_the_table_says_what_the_plans_say() -> None:
    text = str(found())
    for answer in found().answers:
        row = next(line for line in text.splitlines() if line.startswith(f"  {answer.label} "))
        if answer.plan is None:
            assert row.endswith("no plan")
            assert " ".join(answer.error.split())[:60] in " ".join(text.split())
        else:
            assert "=1 " not in row, "axes of one device are not worth a word"
            assert duration(answer.plan.predicted.step_seconds) in row
    data = json.loads(json.dumps(found().data()))
    assert [bool(each.get("error")) for each in data["answers"]] == [a.plan is None for a in found().answers]


def _made(sweep: Any, *given: tuple[int, float]) -> WhatIf[Any]:
    """Answers of so many (amount, seconds)."""
    plan = ask()
    taking = [replace(plan, predicted=replace(plan.predicted, step_seconds=seconds)) for _, seconds in given]
    answers = (Answer(sweep, amount, amount, each) for (amount, _), each in zip(given, taking, strict=True))
    return WhatIf(plan, tuple(answers))


def test_the_frontier_is_what_nothing_smaller_beats() -> None:
    made = _made("memory_limit", (10, 5.0), (20, 6.0), (30, 4.0), (40, 4.0), (50, 1.0))
    assert [answer.amount for answer in made.frontier("memory_limit")] == [10, 30, 50]
    picture = frontier_picture(made, "memory_limit")
    assert picture is not None
    assert [point.css for point in picture.points] == ["best", "other", "best", "other", "best"]
    heights = [point.y for point in picture.points]
    assert heights[1] < heights[0] < heights[2] == heights[3] < heights[4] < HEIGHT  # y grows downwards.
    assert [point.x for point in picture.points] == sorted(point.x for point in picture.points)
    assert picture.line.count("V") == 2
    assert picture.axis.startswith("memory limit")


def test_of_meshes_with_as_many_devices_the_quickest_is_the_frontier() -> None:
    made = _made("devices", (4, 3.0), (4, 2.0), (8, 2.5))
    assert [answer.seconds for answer in made.frontier("devices")] == [2.0]
    picture = frontier_picture(made, "devices")
    assert picture is not None and [point.css for point in picture.points] == ["other", "best", "other"]
    assert [bool(point.label) for point in picture.points] == [False, True, True], "labels in one place are one"


def test_labels_of_many_points_leave_each_other_room() -> None:
    made = _made("batch", *((100 + 7 * i, 1.0 + 0.1 * (i % 5)) for i in range(30)))
    picture = frontier_picture(made, "batch")
    assert picture is not None and len(picture.points) == 30
    shown = [point for point in picture.points if point.label]
    assert 2 <= len(shown) < 30
    assert all(second.x - first.x > 7 * len(first.label) for first, second in pairwise(shown))
    heights = sorted(y for y, _ in picture.levels)
    assert len(heights) >= 2 and all(lower - upper >= 14 for upper, lower in pairwise(heights))


@pytest.mark.parametrize("plans", [0, 1])
def test_without_two_plans_there_is_a_table_and_no_picture(plans: int) -> None:
    made = _made("memory_limit", (20, 1.0))
    nothing = Answer[Any]("memory_limit", 10, 10, None, "nothing fits")
    section = next(frontier_sections(WhatIf(made.plan, (nothing, *made.answers[:plans]))))
    assert section.picture is None and section.reasons == (("10 B", "nothing fits"),)
    assert len(section.rows) == 1 + plans


def test_twice_the_devices_at_half_the_time_are_on_the_line() -> None:
    picture = frontier_picture(_made("devices", (2, 8.0), (4, 4.0), (8, 2.0)), "devices")
    assert picture is not None
    first, last = picture.points[0], picture.points[-1]
    assert picture.ideal == f"M{first.x} {first.y}L{last.x} {last.y}"
    assert frontier_picture(_made("devices", (2, 8.0)), "devices") is None


def test_the_page_draws_the_frontier_with_a_table_beside_it(tmp_path: Path) -> None:
    found().plan.to_html(tmp_path / "plan.html", whatif=found())
    page = (tmp_path / "plan.html").read_text()
    section = page[page.index('<section id="whatif">') : page.index('<section id="baselines">')]
    assert '<a href="#whatif">What if</a>' in page and section.count("<svg") == 2
    assert all("aria-label" in tag for tag in re.findall(r"<svg[^>]*>", section))
    drawn = [answer for answer in found().answers if answer.plan is not None]
    assert section.count("<circle") == len(drawn)
    for answer in found().answers:
        assert answer.plan is not None or html.escape(answer.error[:50]) in section
    assert 'id="whatif"' not in render(found().plan)


def test_without_a_question_memory_and_devices_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = ask()
    asked = []

    def again(question: Any, **changed: Any) -> Plan:
        asked.append(changed)
        return plan

    monkeypatch.setattr("autopar.plans.question.Question.again", again)
    answers = plan.whatif().answers
    assert [answer.value for answer in answers if answer.sweep == "devices"] == [2, 4, 8, 16]
    limits = [answer.value for answer in answers if answer.sweep == "memory_limit"]
    assert len(limits) == 6 and max(limits) == plan.predicted.peak_bytes
    assert len(asked) == len(answers)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"memory_limit": []}, "asks nothing"),
        ({"memory_limit": 0.5}, "memory_limit=0.5 is not a positive number of bytes per device; write .* or '40GiB'"),
        ({"batch": [0]}, "not a positive whole number of samples"),
        ({"devices": [(2, 0)]}, "neither a number of devices nor a shape"),
        ({"precision": ["bf16", "bf61"]}, "precision='bf61' is not known; one of fp32"),
        ({"cluster": "nope"}, "no cluster is called 'nope'"),
        ({"devcies": 2}, r"did you mean devices=\?; its arguments are memory_limit"),
    ],
)
def test_what_cannot_be_asked_is_named(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionsError, match=said):
        ask().whatif(**asked)


def test_a_word_that_is_none_is_answered_with_the_nearest() -> None:
    with pytest.raises(ArgumentError, match="did you mean memory_limit"):
        ask().whatif(memory=[1])  # type: ignore[call-arg]


def test_a_plan_from_a_file_knows_no_model() -> None:
    with pytest.raises(OptionsError, match=r"ask the plan that autopar.plan\(model, mesh, batch"):
        Plan.from_json(ask().to_json()).whatif(devices=2)


def test_a_question_lives_as_long_as_its_plan() -> None:
    with torch.device("meta"):
        passing = Blocks()
    arguments: dict[str, Any] = {"cluster": CLUSTER, "options": OPTIONS, "loss_fn": squared, "targets": batch()}
    plan = autopar.plan(passing, (2, 2), batch(), **arguments)
    key = id(plan)
    assert _questions[key].model is passing
    del plan
    gc.collect()
    assert key not in _questions


def test_answers_can_be_asked_again() -> None:
    (half,) = ask().whatif(devices=2).answers
    assert half.plan is not None
    (both,) = half.plan.whatif(batch=1000).answers
    assert both.plan is not None and (both.plan.batch, both.plan.mesh) == (1000, half.plan.mesh)


MODEL_FILE = """
import torch
def make():
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    class Loss(torch.nn.Module):
        def __init__(self): super().__init__(); self.model = model
        def forward(self, x): return self.model(x).square().mean()
    return Loss(), {"x": torch.randn(64, 16)}
"""


def test_the_command_prints_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "small_target.py").write_text(MODEL_FILE)
    words = ["whatif", f"{tmp_path / 'small_target.py'}:make", "--mesh", "2", "--cluster", CLUSTER]
    page = tmp_path / "plan.html"
    assert main([*words, "--devices", "2,4,1x2", "--memory-limits", "1GiB,1KB", "--html", str(page), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [(each["sweep"], each["value"]) for each in data["answers"]] == [
        ("memory_limit", 1000),
        ("memory_limit", 1 << 30),
        ("devices", 2),
        ("devices", [1, 2]),
        ("devices", 4),
    ]
    assert "error" in data["answers"][0] and 'id="whatif"' in page.read_text()
    assert main([*words, "--memory-limits", "1KB"]) == 1
    assert re.search(r"\n  1KB .*no plan", capsys.readouterr().out)
    with pytest.raises(SystemExit):
        main([*words, "--precisions", "fp7"])
    assert "'fp7' is not a precision: one of" in capsys.readouterr().err


def test_rows_of_every_tensor_are_repeated_or_cut() -> None:
    rows = torch.arange(6).reshape(3, 2)
    tree = {"x": rows, "scale": torch.ones(2), "list": [rows], "n": 3, "other": SimpleNamespace()}
    longer = resized(tree, 3, 5)
    assert longer["x"].tolist() == rows[[0, 1, 2, 0, 1]].tolist() == longer["list"][0].tolist()
    assert longer["scale"] is tree["scale"] and longer["n"] == 3
    assert resized(tree, 3, 2)["x"].tolist() == rows[:2].tolist()
