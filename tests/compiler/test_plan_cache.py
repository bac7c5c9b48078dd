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
from autopar.cluster.description import Cluster, Group
from autopar.compiler import plan_cache
from autopar.compiler.plan_cache import cached_plan, plan_key
from autopar.content import source_hash
from autopar.ir.microbatching import Repeats
from autopar.layout import Layout
from autopar.options import Options
from autopar.planner.prepare import make_request, prepare
from autopar.planner.request import PlanRequest
from autopar.planner.roles.axis_roles import AxisRole
from autopar.planner.timings import Timings
from autopar.plans.plan import Plan
from autopar.search.best_plan import best_plan


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    return tmp_path / "plans"


@pytest.fixture(scope="module")
def plan_request() -> PlanRequest:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)), torch.randn(8, 8)
    base = prepare(model, (x,), {}, device="cpu", loss_fn=lambda out: out.square().mean(), training=True)
    return make_request(model, base, (4,), Cluster.get("local"), Options())


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[PlanRequest]]:
    """The questions that were really searched."""
    asked: list[PlanRequest] = []

    def counted(plan_request: PlanRequest, timings: Timings) -> Plan:
        asked.append(plan_request)
        return best_plan(plan_request, timings)

    monkeypatch.setattr(plan_cache, "best_plan", counted)
    yield asked


def test_a_plan_is_made_once_for_this_process_and_the_next(
    plan_request: PlanRequest, searches: list[PlanRequest]
) -> None:
    fresh = cached_plan(plan_request, Timings())
    again = cached_plan(plan_request, Timings())
    plan_cache.forget()  # as in the next run
    kept = cached_plan(plan_request, Timings())
    assert len(searches) == 1
    assert kept == again == fresh == replace(best_plan(plan_request, Timings()), solve_seconds=fresh.solve_seconds)
    assert list(kept.timings) == list(again.timings) == ["cache"] and "solve" in fresh.timings


def test_stages_are_kept_too(plan_request: PlanRequest, searches: list[PlanRequest]) -> None:
    staged = replace(plan_request, options=Options(stages=2, microbatches=2))
    fresh = cached_plan(staged, Timings())
    plan_cache.forget()
    assert cached_plan(staged, Timings()) == fresh and fresh.pipeline is not None and len(searches) == 1


@pytest.mark.parametrize("damage", ["", "garbage", "{}"])
def test_damaged_plans_are_made_anew(
    plan_request: PlanRequest, searches: list[PlanRequest], folder: Path, damage: str
) -> None:
    fresh = cached_plan(plan_request, Timings())
    (file,) = folder.iterdir()
    plan_cache.forget()
    if damage == "{}":  # whole, but no plan
        plan_cache.write("plans", file.stem, damage)
    else:
        file.write_text(damage)
    again = cached_plan(plan_request, Timings())
    assert replace(again, solve_seconds=fresh.solve_seconds) == fresh
    assert len(searches) == 2
    plan_cache.forget()
    assert cached_plan(plan_request, Timings()) == again and len(searches) == 2


def test_off_means_searched_each_time(
    plan_request: PlanRequest, searches: list[PlanRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    cached_plan(plan_request, Timings())
    monkeypatch.setenv("AUTOPAR_CACHE", "off")
    cached_plan(plan_request, Timings())
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
    "tied": (("head.weight", "0.weight"),),
    "shares": ((3, 1),),
    "rank_limits": (1 << 30,) * 4,
    "only_quickest": True,
    "only_counted": True,
    "returned": (("0", (8, 4)),),
    "roles": (AxisRole("data", frozenset({"data"}), frozenset({"data"})),),
}
_OPTIONS: dict[str, Any] = {
    "mode": "inference",
    "objective": "throughput",
    "cache_length": 64,
    "memory_limit": 2**30,
    "microbatches": 2,
    "batch_statistics": "microbatch",
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
    "layout": Layout(data=2),
    "imbalance": 1.5,
}


def test_everything_in_a_question_counts(plan_request: PlanRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"": plan_key(plan_request)}
    for name, value in _OTHER.items():
        keys[name] = plan_key(replace(plan_request, **{name: value}))
    for name, value in _OPTIONS.items():
        keys[f"options.{name}"] = plan_key(replace(plan_request, options=replace(Options(), **{name: value})))
    for zero in (None, 1):  # ``from_layout`` differs: a stage of ZeRO that the user gives fixes the axes.
        options = Options(zero=zero, layout=Layout(zero=1))  # type: ignore[arg-type]
        keys[f"zero {zero} and of a layout"] = plan_key(replace(plan_request, options=options))
    (weight, *rest) = plan_request.graph.nodes
    other = replace(plan_request.graph, nodes=(replace(weight, module="x"), *rest))
    keys["a node"] = plan_key(replace(plan_request, graph=other))
    cluster = plan_request.cluster
    slower = replace(cluster, device=replace(cluster.device, launch_seconds=1.0), collective_seconds=1.0)
    keys["a rate"] = plan_key(replace(plan_request, cluster=slower))
    for value in (0.0, 1.0):
        graph = replace(plan_request.graph, constants={"c": torch.tensor([value])})
        keys[f"constant {value}"] = plan_key(replace(plan_request, graph=graph))
    source_hash.code_version.cache_clear()
    monkeypatch.setattr(source_hash, "own_sources", lambda: "edited")
    keys["code"] = plan_key(plan_request)
    source_hash.code_version.cache_clear()
    assert len(set(keys.values())) == len(keys)
    # ``shared`` holds what other requests computed too, and errors name the mesh ``asked`` for: neither changes a plan.
    # Only a search says what is ``worth`` it.
    assert {"graph", "propose", "shared", "asked", "worth", *_OTHER} == {field.name for field in fields(PlanRequest)}


def test_options_that_are_not_looked_at_here_count_too() -> None:
    """A new option needs a value in the table above."""
    known = {field.name for field in fields(Options)}
    others = {"check_inputs", "last_batch", "timeout", "compile", "check_every", "nonfinite", "pad_to", "from_layout"}
    others |= {"sync", "given"}
    assert set(_OPTIONS) >= known - others


def test_what_is_compiled_counts_on_each_kind_of_device(plan_request: PlanRequest) -> None:
    """Stages of GPUs are compiled, beside a CPU as much as alone, unless the options say otherwise."""
    cpu, gpu = (Cluster.get(name).device for name in ("local", "dgx-a100-80gb"))
    cluster = Cluster.get("local").with_groups(Group(1, cpu), Group(3, gpu))
    mixed = replace(plan_request, cluster=cluster)
    choices: tuple[Any, ...] = ("auto", False, True)
    asked = [replace(mixed, options=replace(mixed.options, compile=compiles)) for compiles in choices]
    assert len(set(map(plan_key, asked))) == len(choices)


def test_planning_twice_searches_once(searches: list[PlanRequest]) -> None:
    def plan() -> autopar.Plan:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
        return autopar.plan(model, (2,), torch.ones(4, 8), loss_fn=lambda out: out.sum())

    assert plan() == plan()
    assert len(searches) == 1


@pytest.mark.parametrize("is_cut_off", [True, False])
def test_a_plan_that_the_time_limit_cut_off_is_not_kept(
    plan_request: PlanRequest, folder: Path, monkeypatch: pytest.MonkeyPatch, is_cut_off: bool
) -> None:
    """Nor is the gap that lack of memory leaves a reason to plan again."""

    def unproven(plan_request: PlanRequest, timings: Timings) -> Plan:
        plan = best_plan(plan_request, timings)
        timings.cut_off = is_cut_off
        return replace(plan, status="feasible", gap=0.5)

    monkeypatch.setattr(plan_cache, "best_plan", unproven)
    limited = replace(plan_request, options=replace(plan_request.options, time_limit=60.0))
    cached_plan(limited, Timings())
    assert folder.exists() != is_cut_off
