"""Saved activations in host memory: chosen where it pays, priced, rehearsed, and run without changing a bit."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

import autopar
from autopar.cluster.description import Cluster
from autopar.errors import InfeasibleError, OptionsError, PlanMismatchError
from autopar.ir.node import SAVED_ACTIVATION
from autopar.offload import allowed, required
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

CLUSTER = Cluster.get("dgx-a100-80gb")
# Optimizer state stays on the device.
ONLY = {"optimizer": "device"}


def activations() -> Case:
    """Mostly activations: 128 tokens on layers of width 32."""
    return Stack(layers=3, width=32, hidden=128), text(16, 8)


def planned(cluster: Cluster = CLUSTER, mesh: tuple[int, ...] = (1,), **options: Any) -> Plan:
    request = requested(activations, mesh, cluster, time_limit=8.0)
    return best_plan(replace(request, options=replace(request.options, **options)), Timings())


def test_activations_go_to_the_host_where_the_step_does_not_fit_otherwise() -> None:
    free = planned(recompute="none", offload=ONLY)
    assert not free.offloaded and free.predicted.host_bytes == 0
    limit = int(0.9 * free.predicted.peak_bytes)
    plan = planned(recompute="none", offload=ONLY, memory_limit=limit)
    assert plan.offloaded and plan.predicted.peak_bytes <= limit
    assert all(plan.nodes[name].op == SAVED_ACTIVATION for name in plan.offloaded)
    device = CLUSTER.device
    sizes = [bytes_of(plan.nodes[name].type) for name in plan.offloaded]
    assert plan.predicted.host_bytes == sum(sizes)
    seconds = sum(2 * (device.launch_seconds + count / device.host_bandwidth) for count in sizes)
    assert plan.seconds_of("swap") == pytest.approx(seconds)
    assert plan.objective == pytest.approx(sum(line.seconds for line in plan.lines), rel=1e-9)
    assert Plan.from_json(plan.to_json()) == plan == Plan.from_text(plan.to_text())
    assert "activations and weights to the host" in str(plan) and "in host memory, besides" in str(plan)
    assert "in host memory: there and back" in str(plan.why(plan.offloaded[0]))


def bytes_of(kind: str) -> int:
    """Bytes of a float32 type as plans write it: ``f32[16, 8]``."""
    count = 4
    for size in kind.partition("[")[2].rstrip("]").split(","):
        count *= int(size)
    return count


def test_what_the_program_counts_in_host_memory_is_what_the_cost_breakdown_does() -> None:
    request = requested(activations, (2,), CLUSTER, offload="activations", zero=1)
    best, _ = solve_mesh(request, step_graph(request.graph, request.loss, request.batch), Timings())
    assert host_of(best.instance.problem, best.solution.choices) == best.breakdown.memory.host > 0
    assert best.instance.assignment(best.instance.chosen(best.assignment)) == best.assignment


def test_what_is_asked_for() -> None:
    assert required("activations") == {("activations", "host")} == required({"activations": "host"})
    assert required(True) == {("optimizer", "host")} and required(None) == required(False) == frozenset()
    assert ("activations", "host") in allowed("optimizer") and not allowed(False)
    assert ("activations", "host") not in allowed({"activations": "device"})
    for wrong in ("gradients", {"activations": "nvme"}, {"optimizer": "tape"}, 3, "activations,activations"):
        with pytest.raises(OptionsError, match="what can rest where"):
            Options(offload=wrong)  # type: ignore[arg-type]
    with pytest.raises(OptionsError, match="cluster 'local' have no host memory"):
        planned(Cluster.get("local"), offload="activations")


def test_a_plan_is_not_run_under_options_that_rule_it_out() -> None:
    plan = planned(offload="activations", recompute="none")
    saved = [name for name, node in plan.nodes.items() if node.op == SAVED_ACTIVATION]
    assert sorted(saved) == sorted(plan.offloaded)
    with pytest.raises(PlanMismatchError, match="saved activations in host memory"):
        options_under(Options(offload=False), plan)
    assert options_under(Options(offload="activations"), plan)


def test_a_host_that_is_too_small_for_activations() -> None:
    small = replace(CLUSTER, device=replace(CLUSTER.device, host_memory_bytes=1000))
    with pytest.raises(InfeasibleError, match=r"in host memory, but cluster .* has only 800 B"):
        planned(small, offload="activations", recompute="none")


Trace = tuple[list[torch.Tensor], list[torch.Tensor]]
PLANS: dict[str, dict[str, Any]] = {
    "whole": {"recompute": "none"},
    "recomputed": {"recompute": "full"},
    "zero": {"zero": 3, "recompute": "none"},
    "accumulated": {"microbatches": 2, "stages": 1, "recompute": "none"},
    "stages": {"stages": 2, "microbatches": 4, "schedule": "1f1b", "recompute": "none"},
    "halves": {"stages": 2, "microbatches": 4, "schedule": "zb-h1", "recompute": "none"},
}


def trained(asked: dict[str, Any], world: int) -> tuple[Trace, Trace]:
    """Losses and gradients, and parameters, of steps without and with the activations of the same plan away."""
    reference, batch = activations()
    plan = autopar.plan(
        reference, (world,), batch, cluster=CLUSTER, options=Options(offload="activations", mesh_search=False, **asked)
    )
    assert plan.offloaded and plan.predicted.host_bytes
    staying = replace(plan, offloaded=())
    return run(reference, batch, world, staying), run(reference, batch, world, plan)


def run(reference: Any, batch: dict[str, torch.Tensor], world: int, plan: Plan) -> Trace:
    model = autopar.parallelize(copy.deepcopy(reference), (world,), cluster=CLUSTER, plan=plan)
    optimizer = model.optimizer(torch.optim.AdamW, lr=1e-2)
    seen: list[torch.Tensor] = []
    for _ in range(2):
        seen.append(torch.as_tensor(model.step(**batch)).detach().clone())
        seen += [model.full_tensor(p.grad) for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    if plan.microbatches == 1:
        loss = model(**batch)["loss"]
        loss.backward()
        seen += [loss.detach().clone(), *(model.full_tensor(p.grad) for p in model.parameters())]
    return seen, [model.full_tensor(p) for p in model.parameters()]


@pytest.mark.parametrize("name", slow_but(["zero", "halves"], PLANS))
def test_moving_activations_changes_no_bit(name: str) -> None:
    stored: list[int] = []

    def work(rank: int, world: int) -> tuple[Trace, Trace, int]:
        plainly = HostTier.store

        def counted(self: HostTier, tensor: torch.Tensor) -> HostCopy:
            stored.append(tensor.numel())
            return plainly(self, tensor)

        HostTier.store = counted  # type: ignore[method-assign]
        return *trained(PLANS[name], world), len(stored)

    for (seen, parameters), (other, updated), count in on(2, work):
        assert count > 0
        assert all(torch.equal(a, b) for a, b in zip([*seen, *parameters], [*other, *updated], strict=True))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4, 5),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(4, 6).t(),
        torch.randn(4, 1).expand(4, 3),
        torch.randn(4, 6)[:, ::2],
        torch.randn(0, 3),
        torch.tensor(2.0),
        torch.arange(6, dtype=torch.int64),
        torch.randn(3).bfloat16(),
    ],
    ids=["plain", "channels last", "transposed", "expanded", "strided", "empty", "scalar", "integers", "bf16"],
)
def test_what_comes_back_is_what_left(tensor: torch.Tensor) -> None:
    tier = HostTier(torch.device("cpu"))
    copy_ = tier.store(tensor)
    assert copy_.nbytes == tensor.numel() * tensor.element_size()
    before, back = tensor.clone(), tier.fetch(copy_).wait()
    tensor.new_zeros(())
    assert torch.equal(back, before) and back.dtype == tensor.dtype
    assert back.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr() or not tensor.numel()
    assert back.stride() == torch.empty_like(tensor).stride()
