"""Optimizer state in host memory: chosen where it pays, priced, priced, and stepped with the same numbers."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.cluster.description import Cluster
from autopar.errors import AutoparError, InfeasibleError, OptionsError
from autopar.optimizers import ELEMENTWISE
from autopar.options import Options
from autopar.planner.solve_mesh import solve_mesh
from autopar.planner.step_graphs import step_graph
from autopar.planner.timings import Timings
from autopar.plans.plan import Plan
from autopar.runtime.state import optimizer as steps
from autopar.runtime.state.optimizer import make_optimizer
from autopar.search.best_plan import best_plan
from autopar.solver.problem import host_of
from tests.helpers.models import Case, Stack, text
from tests.helpers.planning import on, requested

CLUSTER = Cluster.get("dgx-a100-80gb")
# Optimizer state is searched, activations stay: tests/planner/test_activations_in_host_memory.py is about them.
STATES = {"activations": "device"}


def small() -> Case:
    return Stack(layers=3, width=32, hidden=128), text(8, 8)


def large() -> Case:
    """Mostly optimizer state: that of each of its six matrices takes 128 KiB."""
    return Stack(layers=3, width=64, hidden=256), text(4, 4)


def planned(cluster: Cluster = CLUSTER, mesh: tuple[int, ...] = (2,), **options: Any) -> Plan:
    request = requested(small, mesh, cluster, time_limit=8.0)
    options.setdefault("offload", STATES)
    return best_plan(replace(request, options=replace(request.options, **options)), Timings())


def test_state_goes_to_the_host_where_the_step_does_not_fit_otherwise() -> None:
    free = planned(mesh=(1,), recompute="none")
    assert free.predicted.host_bytes == 0
    limit = free.predicted.peak_bytes - free.predicted.optimizer_bytes // 2
    plan = planned(mesh=(1,), recompute="none", memory_limit=limit)
    away = [path for path, place in plan.parameters.items() if place.offload]
    assert away and plan.predicted.peak_bytes <= limit
    assert plan.predicted.host_bytes + plan.predicted.optimizer_bytes == free.predicted.optimizer_bytes
    assert plan.seconds_of("offload") == pytest.approx(
        sum(2 * (CLUSTER.device.launch_seconds + n / CLUSTER.device.host_bandwidth) for n in state_bytes(away))
    )
    assert plan.objective == pytest.approx(sum(line.seconds for line in plan.lines), rel=1e-9)
    assert any("model.optimizer(...)" in warning for warning in plan.warnings)
    assert "in host memory" in str(plan.why(away[0])) and "in host memory" in str(plan)
    assert Plan.from_json(plan.to_json()) == plan == Plan.from_text(plan.to_text())


def state_bytes(paths: list[str]) -> list[int]:
    """Bytes of AdamW's state for whole fp32 parameters."""
    model, _ = small()
    sizes = {path: parameter.numel() for path, parameter in model.named_parameters()}
    return [8 * sizes[path] for path in paths]


def test_all_state_goes_to_the_host_if_asked_and_all_stays_if_not() -> None:
    plan = planned(offload=True)
    assert all(place.offload for place in plan.parameters.values())
    assert plan.predicted.optimizer_bytes == 0 < plan.predicted.host_bytes
    stays = planned(offload=False)
    assert stays.predicted.host_bytes == 0 and stays.predicted.step_seconds < plan.predicted.step_seconds


@pytest.mark.parametrize("stages", [1, 2])
def test_offload_under_microbatches_and_stages(stages: int) -> None:
    plan = planned(offload=True, stages=stages, microbatches=2)
    assert plan.predicted.optimizer_bytes == 0 < plan.predicted.host_bytes
    assert plan.seconds_of("offload") > 0
    assert Plan.from_json(plan.to_json()) == plan


def test_sgd_has_no_state_to_offload() -> None:
    plan = planned(offload=True, optimizer="sgd")
    assert plan.predicted.host_bytes == 0 and not any(place.offload for place in plan.parameters.values())


@pytest.mark.slow
def test_what_the_error_says_of_offload() -> None:
    with pytest.raises(InfeasibleError, match=r"offload=None or True \(to [\d.]+ [KM]iB"):
        planned(offload=False, recompute="none", memory_limit=1000)
    with pytest.raises(OptionsError, match=r"offload=True: the devices of cluster 'local' have no host memory"):
        planned(Cluster.get("local"), offload=True)
    with pytest.raises(OptionsError, match=r"offload=True: the devices of cluster 'local' have no host memory"):
        planned(Cluster.get("local"), offload=True, recompute="none")
    with pytest.raises(OptionsError, match=r"offload='yes' is not True.*'optimizer'"):
        Options(offload="yes")
    with pytest.raises(OptionsError, match="host_bandwidth and host_memory_bytes go together"):
        replace(CLUSTER.device, host_memory_bytes=0)


def with_host(count: int) -> Cluster:
    return replace(CLUSTER, device=replace(CLUSTER.device, host_memory_bytes=count))


def test_a_host_that_is_too_small() -> None:
    with pytest.raises(InfeasibleError, match=r"in host memory, but cluster .* has only 800 B.*offload=None"):
        planned(with_host(1000), offload=True, zero=0)


@pytest.mark.slow
def test_what_the_host_cannot_hold_stays_on_devices() -> None:
    free = planned(mesh=(1,), recompute="none")
    limit = free.predicted.peak_bytes - free.predicted.optimizer_bytes // 3
    plan = planned(with_host(free.predicted.optimizer_bytes // 2), mesh=(1,), memory_limit=limit)
    assert plan.predicted.peak_bytes <= limit
    assert plan.predicted.host_bytes <= 0.8 * (free.predicted.optimizer_bytes // 2)


def stacked(cluster: Cluster = CLUSTER, **options: Any) -> Plan:
    request = requested(large, (1,), cluster, time_limit=8.0)
    options.setdefault("offload", STATES)
    return best_plan(replace(request, options=replace(request.options, recompute="none", **options)), Timings())


@pytest.mark.slow
def test_the_memory_of_the_host_is_a_row_of_the_program() -> None:
    """Room for so many matrices' state, so much of the device's memory: one that visits it takes its part of that. What
    the error says is enough is, and more of the host's memory leaves more of the device's."""
    least, matrix = [], 8 * 64 * 256
    for room in (2.5, 3.5):
        host = with_host(int(room * matrix / 0.8))
        with pytest.raises(
            InfeasibleError, match=r"of the host's memory instead of [\d.]+ KiB \(to [\d.]+ MiB\)"
        ) as error:
            stacked(host, memory_limit=1_000_000)
        least.append(int(re.search(r"memory_limit=(\d+)", str(error.value))[1]))  # type: ignore[index]
        plan = stacked(host, memory_limit=least[-1])
        assert plan.predicted.peak_bytes <= least[-1]
        assert (room - 1) * matrix < plan.predicted.host_bytes <= room * matrix
    assert least[0] - least[1] == pytest.approx(matrix, rel=0.01)


def test_what_the_program_counts_in_host_memory_is_what_the_cost_breakdown_does() -> None:
    request = requested(small, (2,), CLUSTER, offload=True, zero=1)
    best, _ = solve_mesh(request, step_graph(request.graph, request.loss, request.batch), Timings())
    assert host_of(best.instance.problem, best.solution.choices) == best.breakdown.memory.host > 0


def test_a_pipeline_is_sought_with_less_than_its_cost_breakdown_where_its_steps_hold_more() -> None:
    """The first pipeline within this limit by its cost breakdown is not by its step, which takes more than the limit
    allows."""
    request = requested(large, (2,), CLUSTER, time_limit=8.0)
    options = replace(request.options, stages=2, microbatches=2, recompute="none", memory_limit=928256)
    plan = best_plan(replace(request, options=options), Timings())
    assert plan.predicted.peak_bytes <= 928256 and plan.predicted.host_bytes > 0


def test_the_host_of_each_stage_holds_its_own() -> None:
    whole = planned(offload=True, stages=2, microbatches=2)
    held = whole.predicted.host_bytes
    plan = planned(with_host(int(1.2 * held / 0.8)), offload=True, stages=2, microbatches=2)
    assert plan.predicted.host_bytes == held
    with pytest.raises(InfeasibleError, match="in host memory"):
        planned(with_host(held // 2), offload=True, stages=2, microbatches=2)


def test_only_element_wise_optimizers_are_offered_it() -> None:
    with pytest.raises(OptionsError, match="offload=True: adafactor does not treat every element by itself"):
        planned(offload=True, optimizer="adafactor")
    with pytest.raises(OptionsError, match="offload=True: adafactor does not treat every element by itself"):
        planned(offload=True, optimizer="adafactor", recompute="none")
    names = {name for name in ELEMENTWISE if name not in ("momentum", "amsgrad")}
    assert names <= {one.__name__.lower() for one in steps.ELEMENTWISE}


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adagrad"])
def test_visits_change_no_bit(name: str) -> None:
    """State that is copied to and fro, that of two biases in one turn."""
    expected, stayed = train(name, lambda path: False)
    found, visited = train(name, lambda path: path in ("0.weight", "0.bias", "2.bias"))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    for a, b in zip(stayed, visited, strict=True):
        assert a.keys() == b.keys() and all(torch.equal(torch.as_tensor(a[k]), torch.as_tensor(b[k])) for k in a)


def train(name: str, in_host: steps.InHost) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
    """Parameters and their state after steps with a scheduler, a checkpoint and a gradient that is missing once."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = make_optimizer(getattr(torch.optim, name), model.named_parameters(), in_host, lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(5):
        model(torch.randn(3, 4)).square().sum().backward()
        if step == 1:
            model[0].weight.grad = None  # type: ignore[union-attr]
        if step == 3:
            optimizer.load_state_dict(optimizer.state_dict())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return list(model.parameters()), [optimizer.state[p] for p in model.parameters()]


def test_an_optimizer_that_sees_whole_tensors_cannot_offload() -> None:
    named = [("w", nn.Parameter(torch.zeros(2, 2)))]
    with pytest.raises(AutoparError, match=r"optimizer state of w .*which Adafactor cannot"):
        make_optimizer(torch.optim.Adafactor, named, lambda path: True)
    planned_yet: list[str] = []
    early = make_optimizer(torch.optim.Adafactor, named, lambda path: path in planned_yet)
    early.step()
    planned_yet.append("w")
    with pytest.raises(AutoparError, match="which Adafactor cannot"):
        early.step()


def test_an_optimizer_that_stepped_before_the_first_batch_steps_on_what_the_plan_brings() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = make_optimizer(torch.optim.SGD, [("w", weight)], lr=0.5)
    optimizer.step()
    weight.data = weight.data.clone()
    weight.grad = torch.ones(3)
    optimizer.step()
    assert weight.tolist() == [0.5, 0.5, 0.5]


def test_loaded_state_rests_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the next step already."""
    moved: list[str] = []
    rests = steps.moved_to_host
    monkeypatch.setattr(steps, "moved_to_host", lambda state: moved.append("state") or rests(state))
    weight = nn.Parameter(torch.ones(3))
    optimizer = make_optimizer(torch.optim.AdamW, [("w", weight)], lambda path: True, lr=0.5)
    weight.grad = torch.ones(3)
    optimizer.step()
    saved, count = optimizer.state_dict(), len(moved)
    optimizer.load_state_dict(saved)
    assert len(moved) == count + 1


def trained(rank: int, world: int) -> list[Any]:
    reference, batch, found = nn.Sequential(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 8)), torch.randn(4, 8), []
    for offload in (False, True):
        options = Options(offload=offload, zero=1)
        model = autopar.parallelize(copy.deepcopy(reference), (world,), options=options, cluster=CLUSTER)
        optimizer = model.optimizer(torch.optim.AdamW, lr=0.1)
        for _ in range(3):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert all(bool(place.offload) == offload for place in model.plan.parameters.values())
        states = [optimizer.state[p]["exp_avg"] for p in model.parameters()]
        found.append([model.full_tensor(t) for t in [*model.parameters(), *states]])
    return found


def test_a_parallel_model_trains_alike_with_its_state_in_host_memory() -> None:
    for stayed, visited in on(2, trained):
        assert all(torch.equal(a, b) for a, b in zip(stayed, visited, strict=True))


def trained_in_stages(rank: int, world: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Parameters and AdamW's averages after three steps in two stages, the embedding a parameter of both: of one
    process, and of all with their state in host memory."""
    reference, batch = small()
    options = Options(offload=True, stages=2, microbatches=2, schedule="1f1b", zero=1 if world > 2 else None)
    mesh = (2,) if world == 2 else (2, world // 2)
    model = autopar.parallelize(copy.deepcopy(reference), mesh, options=options, cluster=CLUSTER)
    optimizer = model.optimizer(torch.optim.AdamW, lr=1e-3, eps=1e-4)
    alone = torch.optim.AdamW(reference.parameters(), lr=1e-3, eps=1e-4)
    for _ in range(3):
        model.step(**batch)
        optimizer.step()
        optimizer.zero_grad()
        reference(**batch)["loss"].backward()
        alone.step()
        alone.zero_grad()
    assert model.plan.stages == 2 and all(place.offload for place in model.plan.parameters.values())
    found = [t for p in model.parameters() for t in (p, optimizer.state[p]["exp_avg"])]
    wanted = [t.detach() for p in reference.parameters() for t in (p, alone.state[p]["exp_avg"])]
    return wanted, [model.full_tensor(tensor) for tensor in found]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_stages_train_as_one_process_with_their_state_in_host_memory(world: int) -> None:
    for wanted, found in on(world, trained_in_stages):
        for one, other in zip(wanted, found, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)
