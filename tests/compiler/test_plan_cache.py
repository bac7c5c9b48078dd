"""A kept plan equals a fresh one, and anything that a plan follows from makes another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.cluster.description import Cluster
from autopar.compiler import plan_cache
from autopar.compiler.plan_cache import answered, plan_key
from autopar.content import source_hash
from autopar.ir.microbatching import Repeats
from autopar.options import Options
from autopar.planner.prepare import ask, prepare
from autopar.planner.request import Question
from autopar.planner.timings import Timings
from autopar.plans.plan import Plan
from autopar.search.best_plan import answer


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    return tmp_path / "plans"


@pytest.fixture(scope="module")
def question() -> Question:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)), torch.randn(8, 8)
    base = prepare(model, (x,), {}, device="cpu", loss_fn=lambda out: out.square().mean(), training=True)
    return ask(model, base, (4,), Cluster.get("local"), Options())


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Question]]:
    """The questions that were really searched."""
    asked: list[Question] = []

    def counted(question: Question, timings: Timings) -> Plan:
        asked.append(question)
        return answer(question, timings)

    monkeypatch.setattr(plan_cache, "answer", counted)
    yield asked


def test_a_plan_is_made_once_for_this_process_and_the_next(question: Question, searches: list[Question]) -> None:
    fresh = answered(question, Timings())
    again = answered(question, Timings())
    plan_cache.forget()  # as in the next run
    kept = answered(question, Timings())
    assert len(searches) == 1
    assert kept == again == fresh == replace(answer(question, Timings()), solve_seconds=fresh.solve_seconds)
    assert list(kept.timings) == list(again.timings) == ["cache"] and "solve" in fresh.timings


def test_stages_are_kept_too(question: Question, searches: list[Question]) -> None:
    staged = replace(question, options=Options(stages=2, microbatches=2))
    fresh = answered(staged, Timings())
    plan_cache.forget()
    assert answered(staged, Timings()) == fresh and fresh.pipeline is not None and len(searches) == 1


@pytest.mark.parametrize("damage", ["", "garbage", "{}"])
def test_damaged_plans_are_made_anew(question: Question, searches: list[Question], folder: Path, damage: str) -> None:
    fresh = answered(question, Timings())
    (file,) = folder.iterdir()
    plan_cache.forget()
    if damage == "{}":  # whole, but no plan
        plan_cache.write("plans", file.stem, damage)
    else:
        file.write_text(damage)
    again = answered(question, Timings())
    assert replace(again, solve_seconds=fresh.solve_seconds) == fresh
    assert len(searches) == 2
    plan_cache.forget()
    assert answered(question, Timings()) == again and len(searches) == 2


def test_off_means_searched_each_time(
    question: Question, searches: list[Question], monkeypatch: pytest.MonkeyPatch
) -> None:
    answered(question, Timings())
    monkeypatch.setenv("AUTOPAR_CACHE", "off")
    answered(question, Timings())
    assert len(searches) == 2


_OTHER: dict[str, Any] = {
    "loss": None,
    "batch": 4,
    "mesh": (2, 2),
    "cluster": Cluster.get("dgx-a100-80gb"),
    "options": Options(gap=0.5),
    "model": "another",
    "axis_names": ("dp",),
    "repeats": Repeats(2),
    "memory_limit": 2.0**30,
    "host_limit": 2.0**30,
    "notes": ("slow",),
}
_OPTIONS: dict[str, Any] = {
    "memory_limit": 2**30,
    "microbatches": 2,
    "stages": 2,
    "schedule": "1f1b",
    "precision": "bf16",
    "recompute": "full",
    "offload": True,
    "zero": 3,
    "pins": {"0": "S(0)"},
    "time_limit": 1.0,
    "gap": 0.25,
    "seed": 1,
    "mesh_search": False,
    "optimizer": "sgd",
}


def test_everything_in_a_question_counts(question: Question, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"": plan_key(question)}
    for name, value in _OTHER.items():
        keys[name] = plan_key(replace(question, **{name: value}))
    for name, value in _OPTIONS.items():
        keys[f"options.{name}"] = plan_key(replace(question, options=replace(Options(), **{name: value})))
    (weight, *rest) = question.graph.nodes
    other = replace(question.graph, nodes=(replace(weight, module="x"), *rest))
    keys["a node"] = plan_key(replace(question, graph=other))
    cluster = question.cluster
    slower = replace(cluster, device=replace(cluster.device, launch_seconds=1.0), collective_seconds=1.0)
    keys["a rate"] = plan_key(replace(question, cluster=slower))
    for value in (0.0, 1.0):
        graph = replace(question.graph, constants={"c": torch.tensor([value])})
        keys[f"constant {value}"] = plan_key(replace(question, graph=graph))
    source_hash.code_version.cache_clear()
    monkeypatch.setattr(source_hash, "own_sources", lambda: "edited")
    keys["code"] = plan_key(question)
    source_hash.code_version.cache_clear()
    assert len(set(keys.values())) == len(keys)
    assert {"graph", *_OTHER} == {field.name for field in fields(Question)}


def test_options_that_are_not_looked_at_here_count_too() -> None:
    """A new option needs a value in the table above."""
    known = {field.name for field in fields(Options)}
    assert set(_OPTIONS) >= known - {"check_inputs", "last_batch"}


def test_planning_twice_searches_once(searches: list[Question]) -> None:
    def plan() -> autopar.Plan:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
        return autopar.plan(model, (2,), torch.ones(4, 8), loss_fn=lambda out: out.sum())

    assert plan() == plan()
    assert len(searches) == 1


def test_a_plan_that_the_time_limit_cut_off_is_not_kept(
    question: Question, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_off(question: Question, timings: Timings) -> Plan:
        return replace(answer(question, timings), status="feasible", gap=0.5)

    monkeypatch.setattr(plan_cache, "answer", cut_off)
    answered(question, Timings())
    assert not folder.exists()
