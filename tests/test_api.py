"""The public face on local processes: every way to call, train and evaluate, against the same model in one process."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import autopar
from autopar.errors import PlanMismatchError
from autopar.runtime import ParallelModule
from tests.helpers.models import Stack, make, plain, text
from tests.helpers.planning import CLUSTER, gradients_of, on, slow_devices

SHARDED = autopar.Options(zero=3, mesh_search=False)
SPLIT = autopar.Options(zero=0, mesh_search=False, pins={"layers.*.1.weight": "R,S(0)", "layers.*.3.weight": "R,S(1)"})


def whole(tensor: torch.Tensor | None) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor()


def small_stack(layers: int = 2) -> Stack:
    torch.manual_seed(3)
    return Stack(layers=layers)


def check_gradients(model: nn.Module, wanted: dict[str, torch.Tensor]) -> None:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(
            whole(gradient), wanted[name], rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


def check_weights(model: nn.Module, reference: nn.Module) -> None:
    wanted = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(whole(parameter.detach()), wanted[name].detach(), rtol=1e-4, atol=2e-6, msg=name)


@pytest.mark.parametrize("count", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4))])
def test_two_arguments_are_enough(count: int) -> None:
    def work(rank: int, world: int) -> str:
        reference, batch = small_stack(), text(8, 8)
        loss, gradients = gradients_of(reference, batch)
        model = autopar.parallelize(copy.deepcopy(reference), (world,))
        with pytest.raises(autopar.AutoparError, match="there is no plan yet"):
            _ = model.plan
        output = model(**batch)
        assert type(output) is dict and not isinstance(output["scores"], DTensor)
        torch.testing.assert_close(output["loss"].detach(), loss)
        torch.testing.assert_close(
            output["scores"].detach(), reference(**batch)["scores"].detach(), rtol=1e-5, atol=1e-6
        )
        output["loss"].backward()
        check_gradients(model, gradients)
        assert math.prod(model.plan.mesh) == world
        return model.plan.to_json()

    assert len(set(on(count, work))) == 1


@pytest.mark.parametrize(
    "options",
    [SPLIT, *(pytest.param(o, marks=pytest.mark.slow) for o in (autopar.Options(mesh_search=False), SHARDED))],
    ids=["split", "best", "sharded"],
)
def test_training_as_in_one_process(options: autopar.Options) -> None:
    """With each of several optimizers, all made before the first batch, one way or the other; step() and backward()
    take turns; norms are clipped."""

    def work(rank: int, world: int) -> None:
        model = autopar.parallelize(small_stack(), (2, 2), options=options, cluster=CLUSTER)
        by_hand = torch.optim.SGD(model.parameters(), lr=0.01)
        # The default eps of 1e-8 divides gradients of the size of rounding errors by themselves.
        kinds = [partial(kind, lr=0.01, eps=1e-4) for kind in (torch.optim.Adam, torch.optim.AdamW)]
        made = [(kind, model.optimizer(kind.func, **kind.keywords)) for kind in kinds]
        for kind, ours in ((partial(torch.optim.SGD, lr=0.01), by_hand), *made):
            reference = small_stack()
            if ours is not by_hand:
                model.load_state_dict(reference.state_dict())
            trains_alike(model, ours, reference, kind(reference.parameters()))

    on(4, work)


def trains_alike(
    model: ParallelModule, ours: torch.optim.Optimizer, reference: nn.Module, theirs: torch.optim.Optimizer
) -> None:
    for turn in range(3):
        batch = text(8, 8, seed=turn)
        wanted = reference(**batch)["loss"]
        wanted.backward()
        found = model(**batch)["loss"] if turn == 1 else model.step(**batch)
        if turn == 1:
            found.backward()
        torch.testing.assert_close(found.detach(), wanted.detach(), rtol=1e-5, atol=1e-6)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
        torch.testing.assert_close(whole(norm), expected, rtol=1e-5, atol=1e-6)
        ours.step(), theirs.step(), ours.zero_grad(), theirs.zero_grad()
    check_weights(model, reference)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_clipping_when_gradients_and_states_are_sharded(stage: Any) -> None:
    def work(rank: int, world: int) -> None:
        reference, batch = small_stack(), text(8, 8)
        options = autopar.Options(zero=stage, mesh_search=False)
        model = autopar.parallelize(
            copy.deepcopy(reference), (world,), example_inputs=batch, options=options, cluster=CLUSTER
        )
        # A large eps: what Adam makes of a gradient that is all rounding is no one's business here.
        ours, theirs = (
            model.optimizer(torch.optim.AdamW, lr=0.01, eps=1e-3),
            torch.optim.AdamW(reference.parameters(), lr=0.01, eps=1e-3),
        )
        for _ in range(2):
            model.step(**batch)
            reference(**batch)["loss"].backward()
            check_gradients(model, {n: p.grad for n, p in reference.named_parameters() if p.grad is not None})
            found = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            torch.testing.assert_close(
                whole(found), nn.utils.clip_grad_norm_(reference.parameters(), 0.01), rtol=1e-5, atol=1e-6
            )
            ours.step(), theirs.step(), ours.zero_grad(), theirs.zero_grad()
        check_weights(model, reference)

    on(2, work)


def test_gradients_accumulate() -> None:
    def work(rank: int, world: int) -> None:
        reference, one, two = small_stack(), text(8, 8), text(8, 8, seed=5)
        model = autopar.parallelize(copy.deepcopy(reference), (world,), options=SHARDED)
        (reference(**one)["loss"] + reference(**two)["loss"]).backward()
        model.step(**one)
        model(**two)["loss"].backward()
        wanted = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
        check_gradients(model, wanted)

    on(2, work)


def test_example_inputs_plan_and_place_at_once() -> None:
    def work(rank: int, world: int) -> None:
        batch = text(8, 8)
        model = autopar.parallelize(small_stack(), (2, 1, 2), example_inputs=batch, options=SHARDED)
        assert model.plan.mesh == (2, 1, 2)
        weight = model.get_parameter("layers.0.1.weight")
        assert isinstance(weight, DTensor) and weight.to_local().numel() * world == weight.numel()
        loss, gradients = gradients_of(small_stack(), batch)
        torch.testing.assert_close(model.step(**batch), loss)
        check_gradients(model, gradients)

    on(4, work)


def test_names_tied_weights_and_state_are_those_of_the_model() -> None:
    def work(rank: int, world: int) -> None:
        reference, batch = small_stack(), text(8, 8)
        state = {key: value.clone() for key, value in reference.state_dict().items()}
        model = autopar.parallelize(reference, (world,), example_inputs=batch, options=SHARDED)
        assert isinstance(model, ParallelModule)
        assert list(model.state_dict()) == list(state)
        for key, value in model.state_dict().items():
            assert torch.equal(whole(value), state[key]), key
        assert model.head.weight is model.embed.weight
        assert len(dict(model.named_parameters())) == len(state) - 1
        model.load_state_dict({key: torch.ones_like(value) for key, value in state.items()})
        assert float(whole(model.get_parameter("head.weight").detach()).sum()) == 257 * 16

    on(2, work)


def test_meta_model_is_materialised_shard_by_shard() -> None:
    def work(rank: int, world: int) -> float:
        with torch.device("meta"):
            model = Stack(layers=2)
        batch = text(8, 8)
        parallel = autopar.parallelize(model, (world,), example_inputs=batch, options=SHARDED)
        assert all(isinstance(p, DTensor) and not p.is_meta for p in parallel.parameters())
        norm = whole(parallel.get_parameter("layers.1.0.weight").detach())
        assert torch.equal(norm, torch.ones(16))
        assert 0.5 < float(whole(parallel.get_parameter("embed.weight").detach()).std()) < 1.5
        return float(parallel.step(**batch))

    losses = on(2, work)
    assert losses[0] == losses[1] and math.isfinite(losses[0])


def test_keyword_and_distributed_batches() -> None:
    def work(rank: int, world: int) -> None:
        reference, batch = small_stack(), text(8, 8)
        loss, gradients = gradients_of(reference, batch)
        model = autopar.parallelize(copy.deepcopy(reference), (world,), cluster=slow_devices())
        local = model.local_batch(**batch)
        assert all(isinstance(value, DTensor) for value in local.values())
        for give in (
            lambda: model.step(labels=batch["labels"], input_ids=batch["input_ids"]),
            lambda: model.step(**local),
        ):
            model.zero_grad()
            torch.testing.assert_close(give(), loss)
            check_gradients(model, gradients)

    on(2, work)


@pytest.mark.slow
def test_another_batch_size_runs_the_same_plan_where_it_divides() -> None:
    def work(rank: int, world: int) -> None:
        reference = small_stack()
        model = autopar.parallelize(
            copy.deepcopy(reference), (4,), cluster=slow_devices(), options=autopar.Options(mesh_search=False)
        )
        model.step(**text(8, 8))
        plan = model.plan
        assert any(str(p) == "S(0)" for node in plan.strategies.values() for p in node.outputs[0])
        for size in (4, 16):
            model.zero_grad()
            loss, gradients = gradients_of(reference, text(size, 8))
            torch.testing.assert_close(model.step(**text(size, 8)), loss)
            check_gradients(model, gradients)
            assert model.plan == plan
        strict = autopar.Options(mesh_search=False, last_batch="error")
        model = autopar.parallelize(copy.deepcopy(reference), (4,), cluster=slow_devices(), options=strict, plan=plan)
        model.step(**text(8, 8))
        with pytest.raises(PlanMismatchError, match=r"(?s)8, 8.*6, 8|6, 8.*8, 8"):
            model.step(**text(6, 8))

    on(4, work)


@pytest.mark.slow
def test_uneven_batch_is_planned_and_right() -> None:
    def work(rank: int, world: int) -> None:
        reference, batch = small_stack(), text(6, 8)
        loss, gradients = gradients_of(reference, batch)
        model = autopar.parallelize(
            copy.deepcopy(reference), (4,), cluster=slow_devices(), options=autopar.Options(mesh_search=False)
        )
        torch.testing.assert_close(model.step(**batch), loss)
        check_gradients(model, gradients)

    on(4, work)


@pytest.mark.slow
@pytest.mark.parametrize("given", ["mesh", (4,)], ids=["DeviceMesh", "shape"])
def test_a_mesh_may_be_regrouped(given: Any) -> None:
    """A plan of two axes for a mesh given as one: parameters and groups follow the plan's mesh."""
    reference, batch = small_stack(), text(8, 8)
    plan = autopar.plan(reference, (2, 2), batch, cluster=CLUSTER, options=SPLIT)
    loss, gradients = gradients_of(reference, batch)

    def work(rank: int, world: int) -> None:
        mesh = init_device_mesh("cpu", (4,)) if given == "mesh" else given
        model = autopar.parallelize(copy.deepcopy(reference), mesh, plan=plan, cluster=CLUSTER)
        torch.testing.assert_close(model.step(**batch), loss)
        check_gradients(model, gradients)
        weight = model.get_parameter("layers.0.1.weight")
        assert isinstance(weight, DTensor) and tuple(weight.device_mesh.shape) == (2, 2) == model.plan.mesh

    on(4, work)


def test_a_plan_from_json_is_used_as_it_is_and_only_where_it_fits() -> None:
    reference, batch = small_stack(), text(8, 8)
    plan = autopar.Plan.from_json(autopar.plan(reference, (2,), batch, cluster=CLUSTER, options=SHARDED).to_json())

    def work(rank: int, world: int) -> None:
        model = autopar.parallelize(copy.deepcopy(reference), (2,), batch, plan=plan)
        assert model.plan == plan
        loss, gradients = gradients_of(reference, batch)
        torch.testing.assert_close(model.step(**batch), loss)
        check_gradients(model, gradients)
        with pytest.raises(PlanMismatchError, match="the plan was made for 'Stack"):
            autopar.parallelize(small_stack(3), (2,), batch, plan=plan)
        with pytest.raises(
            PlanMismatchError, match=r"plan is for mesh \(2,\) of 2 devices, but the mesh is \(1,\) of 1"
        ):
            autopar.parallelize(small_stack(), DeviceMesh("cpu", [rank]), batch, plan=plan)

    on(2, work)


class Scores(nn.Module):
    """Returns no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.up(x).relu()
        return self.down(hidden), hidden


def test_a_loss_of_ones_own() -> None:
    def work(rank: int, world: int) -> None:
        torch.manual_seed(0)
        reference, x, y = Scores(), torch.randn(8, 12), torch.arange(8) % 4
        model = autopar.parallelize(copy.deepcopy(reference), (world,))
        scores, hidden = model(x)
        loss = nn.functional.cross_entropy(scores, y) + hidden.pow(2).mean()
        loss.backward()
        scores, hidden = reference(x)
        wanted = nn.functional.cross_entropy(scores, y) + hidden.pow(2).mean()
        wanted.backward()
        torch.testing.assert_close(loss.detach(), wanted.detach())
        check_gradients(model, {n: p.grad for n, p in reference.named_parameters() if p.grad is not None})
        with pytest.raises(autopar.AutoparError, match="this call returns none"):
            model.step(x)

    on(2, work)


def test_evaluation_and_no_grad() -> None:
    def work(rank: int, world: int) -> None:
        torch.manual_seed(0)
        reference = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        x = torch.randn(8, 12)
        model = autopar.parallelize(copy.deepcopy(reference), (world,), loss_fn=lambda out, batch: out.pow(2).mean())
        model.step(x)
        reference(x).pow(2).mean().backward()
        check_gradients(model, {n: p.grad for n, p in reference.named_parameters() if p.grad is not None})
        model.eval(), reference.eval()
        with torch.no_grad():
            found = model(x)
        assert not found.requires_grad
        torch.testing.assert_close(found, reference(x).detach())
        torch.testing.assert_close(model.get_buffer("1.running_var"), reference.get_buffer("1.running_var"))
        with torch.no_grad():
            torch.testing.assert_close(model(x[:4]), reference(x[:4]).detach())

    on(2, work)


@pytest.mark.slow
def test_hugging_face_outputs_keep_their_type() -> None:
    def work(rank: int, world: int) -> None:
        reference, batch = make("gpt2", layers=1)
        wanted = reference(**batch)
        model = autopar.parallelize(copy.deepcopy(reference), (world,))
        found = model(**batch)
        assert type(found) is type(wanted) and list(found) == [k for k in wanted if k in found]
        torch.testing.assert_close(found.logits.detach(), wanted.logits.detach(), rtol=1e-5, atol=1e-5)
        found.loss.backward()
        assert model.config is reference.config or model.config.n_embd == 48

    on(2, work)


def test_reduced_precision_parameters() -> None:
    def work(rank: int, world: int) -> None:
        reference, batch = small_stack().bfloat16(), text(8, 8)
        loss, gradients = gradients_of(reference, batch)
        model = autopar.parallelize(copy.deepcopy(reference), (world,), options=SHARDED)
        torch.testing.assert_close(model.step(**batch), loss, rtol=2e-2, atol=2e-2)
        for name, parameter in model.named_parameters():
            assert parameter.dtype == torch.bfloat16 and parameter.grad is not None
            error = (whole(parameter.grad) - gradients[name]).abs().max() / gradients[name].abs().max()
            assert error < 5e-2, (name, error)

    on(2, work)


def test_one_process_needs_no_launcher() -> None:
    """In this very process; torch.distributed is started and ended here."""
    assert not dist.is_initialized()
    try:
        reference, batch = plain()
        loss, gradients = gradients_of(reference, batch)
        model = autopar.parallelize(copy.deepcopy(reference), 1)
        torch.testing.assert_close(model.step(*batch), loss)
        check_gradients(model, gradients)
    finally:
        dist.destroy_process_group()
