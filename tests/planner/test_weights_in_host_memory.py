"""Weights in host memory: chosen where a step does not fit otherwise, priced, rehearsed, and run without changing a
bit."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

import autopar
from autopar.cluster.description import Cluster
from autopar.errors import OptionsError, PlanMismatchError
from autopar.options import Options
from autopar.planner.options_of_plan import options_under
from autopar.planner.solve_mesh import solve_mesh
from autopar.planner.step_graphs import step_graph
from autopar.planner.timings import Timings
from autopar.plans.plan import Plan
from autopar.runtime.execute.host_tier import HostCopy, HostTier
from autopar.search.best_plan import best_plan
from autopar.solver.problem import host_of
from tests.helpers.marks import slow_but
from tests.helpers.models import Case, Stack, text
from tests.helpers.planning import on, requested

_LOCAL = Cluster.get("local")
HOST = {"host_bandwidth": 4e9, "host_memory_bytes": 1 << 34}
CLUSTER = replace(_LOCAL, device=replace(_LOCAL.device, **HOST))
# Only weights may rest elsewhere.
ONLY = {"optimizer": "device", "activations": "device"}


def weights() -> Case:
    """Mostly weights."""
    return Stack(layers=3, width=64, hidden=256), text(4, 4)


def planned(cluster: Cluster = CLUSTER, mesh: tuple[int, ...] = (1,), **options: Any) -> Plan:
    request = requested(weights, mesh, cluster, time_limit=8.0)
    return best_plan(replace(request, options=replace(request.options, **options)), Timings())


def test_weights_go_to_the_host_where_the_step_does_not_fit_otherwise() -> None:
    free = planned(recompute="none", offload=ONLY, optimizer="sgd")
    assert not free.offloaded and free.predicted.host_bytes == 0
    limit = int(free.predicted.peak_bytes - 0.3 * free.predicted.weight_bytes)
    plan = planned(recompute="none", offload=ONLY, optimizer="sgd", memory_limit=limit)
    away = set(plan.offloaded)
    assert away and plan.predicted.peak_bytes <= limit
    paths = {node.target for name, node in plan.nodes.items() if name in away}
    assert paths <= set(plan.parameters) and len(away) < len(plan.parameters)
    assert plan.predicted.host_bytes == free.predicted.weight_bytes - plan.predicted.weight_bytes
    # In forward and in backward.
    seconds = sum(2 * CLUSTER.device.host_transfer(0) for _ in away)
    seconds += 2 * plan.predicted.host_bytes / CLUSTER.device.host_bandwidth
    assert plan.seconds_of("swap") == pytest.approx(seconds)
    assert plan.objective == pytest.approx(sum(line.seconds for line in plan.lines), rel=1e-9)
    assert Plan.from_json(plan.to_json()) == plan == Plan.from_text(plan.to_text())
    assert "weights to the host and back" in str(plan) and "in host memory, besides" in str(plan)


@pytest.mark.parametrize("options", [{"zero": 1}, {"precision": "bf16"}], ids=["gathered", "cast"])
def test_what_the_program_counts_in_host_memory_is_what_the_cost_breakdown_does(options: dict[str, Any]) -> None:
    request = requested(weights, (2,), CLUSTER, offload={"weights": "host", **ONLY}, **options)
    best, _ = solve_mesh(request, step_graph(request.graph, request.loss, request.batch), Timings())
    assert host_of(best.instance.problem, best.solution.choices) == best.breakdown.memory.host > 0
    assert best.breakdown.memory.weights == 0
    assert best.instance.assignment(best.instance.chosen(best.assignment)) == best.assignment


def test_where_weights_cannot_go() -> None:
    with pytest.raises(OptionsError, match="weights in host memory are for processes without accelerators so far"):
        planned(Cluster.get("dgx-a100-80gb"), offload={"weights": "host"})
    with pytest.raises(OptionsError, match="cluster 'local' have no host memory"):
        planned(_LOCAL, offload={"weights": "host"})
    with pytest.raises(OptionsError, match="what can rest where"):
        Options(offload={"weights": "nvme"})


def test_a_plan_is_not_run_under_options_that_rule_it_out() -> None:
    plan = planned(offload={"weights": "host", **ONLY})
    assert len(plan.offloaded) == len(plan.parameters)
    with pytest.raises(PlanMismatchError, match="weights in host memory"):
        options_under(Options(offload=False), plan)
    staying = planned(offload=ONLY)
    with pytest.raises(PlanMismatchError, match="all weights in the memory of devices"):
        options_under(Options(offload={"weights": "host"}), staying)


Trace = list[torch.Tensor]
PLANS: dict[str, dict[str, Any]] = {
    "whole": {"recompute": "none"},
    "recomputed": {"recompute": "full"},
    "zero 1": {"zero": 1},
    "zero 3": {"zero": 3},
    "bf16": {"precision": "bf16", "zero": 1},
    "accumulated": {"microbatches": 2, "stages": 1},
    "stages": {"stages": 2, "microbatches": 4, "schedule": "1f1b"},
    "halves": {"stages": 2, "microbatches": 4, "schedule": "zb-h1"},
}


def run(reference: Any, batch: dict[str, torch.Tensor], world: int, plan: Plan) -> Trace:
    """Losses, gradients and parameters of two steps, and of a call under autograd."""
    model = autopar.parallelize(copy.deepcopy(reference), (world,), cluster=CLUSTER, plan=plan)
    optimizer = model.optimizer(torch.optim.AdamW, lr=1e-2)
    seen: Trace = []
    for _ in range(2):
        seen.append(torch.as_tensor(model.step(**batch)).detach().clone())
        seen += [model.full_tensor(p.grad) for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    if plan.microbatches == 1:
        loss = model(**batch)["loss"]
        loss.backward()
        seen += [loss.detach().clone(), *(model.full_tensor(p.grad) for p in model.parameters())]
    with torch.no_grad():
        seen.append(model(**batch)["loss"])
    return seen + [model.full_tensor(p) for p in model.parameters()]


@pytest.mark.parametrize("name", slow_but(["zero 1", "halves"], PLANS))
def test_moving_weights_changes_no_bit(name: str) -> None:
    def work(rank: int, world: int) -> tuple[Trace, Trace, int, int]:
        fetched: list[int] = []
        plainly = HostTier.fetch

        def counted(self: HostTier, resting: HostCopy) -> Any:
            fetched.append(resting.nbytes)
            return plainly(self, resting)

        HostTier.fetch = counted  # type: ignore[method-assign]
        reference, batch = weights()
        asked = Options(offload={"weights": "host", **ONLY}, mesh_search=False, **PLANS[name])
        plan = autopar.plan(reference, (world,), batch, cluster=CLUSTER, options=asked)
        fetched.clear()  # Of the rehearsal.
        stayed = run(reference, batch, world, replace(plan, offloaded=()))
        assert not fetched
        return stayed, run(reference, batch, world, plan), len(fetched), len(plan.offloaded)

    for stayed, moved, fetched, away in on(2, work):
        assert fetched > away > 0
        assert all(torch.equal(a, b) for a, b in zip(stayed, moved, strict=True))


def test_the_rehearsal_counts_what_is_on_the_device() -> None:
    """Of weights, those that are used and one that is read ahead."""
    stays, leaves = (planned(offload={**ONLY, "weights": tier}, recompute="none") for tier in ("device", "host"))
    total, *_ = sizes = [stays.predicted.weight_bytes, *sorted(4 * p.numel() for p in weights()[0].parameters())]
    assert leaves.predicted.weight_bytes == 0 and leaves.predicted.host_bytes == total
    saved = stays.predicted.peak_bytes - leaves.predicted.peak_bytes
    assert total - sizes[-1] - sizes[-2] <= saved <= total
