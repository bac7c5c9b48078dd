"""The parallel module end to end, on a program lowered by hand, against the plain model in one process."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError, PlanMismatchError
from autopar.runtime import Compiled, ParallelModule, Request, mesh_of_one, run_local
from tests.helpers.runtime_tiny import BATCH, FEATURES, Tiny, compile_tiny

MESHES = [(1, 1), (2, 2), (4, 1), (1, 3)]
Work = Callable[[ParallelModule, Tiny, torch.Tensor, DeviceMesh], Any]


def on_mesh(shape: tuple[int, int], work: Work, *, agree: bool = True) -> list[Any]:
    """``work(model, reference, batch, mesh)`` on every rank; only rank 0 starts with the reference's
    weights."""

    def rank_work(rank: int, world: int) -> Any:
        warnings.simplefilter("error")
        torch.manual_seed(7)
        reference, batch = Tiny(), torch.randn(BATCH, FEATURES)
        plain = copy.deepcopy(reference)
        if rank:
            nn.init.zeros_(plain.up.weight)
        mesh = init_device_mesh("cpu", shape) if world > 1 else mesh_of_one("cpu", 2)

        def compile(request: Request) -> Compiled:
            compiled = compile_tiny(shape, tuple(mesh.get_coordinate() or ()), request)
            if not agree:
                compiled = Compiled(compiled.program, compiled.signature, None, f"plan of {rank // 2}")
            return compiled

        return work(ParallelModule(plain, mesh, compile), reference, batch, mesh)

    count = math.prod(shape)
    return run_local(rank_work, count, timeout=12, backend="gloo" if count > 1 else None)


def whole(tensor: torch.Tensor | None) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor()


def check_gradients(model: nn.Module, reference: nn.Module) -> None:
    wanted = dict(reference.named_parameters())
    found = dict(model.named_parameters())
    assert found.keys() == wanted.keys()
    for name, parameter in found.items():
        torch.testing.assert_close(whole(parameter.grad), wanted[name].grad, msg=lambda m, n=name: f"{n}: {m}")
        assert parameter.grad is not None and parameter.grad.placements == parameter.placements


def check_weights(model: nn.Module, reference: nn.Module) -> None:
    wanted = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(whole(parameter.detach()), wanted[name].detach(), msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("shape", [MESHES[-1], *(pytest.param(m, marks=pytest.mark.slow) for m in MESHES[:-1])])
def test_training_with_an_optimizer_made_before_the_first_batch(shape: tuple[int, int]) -> None:
    def work(model: ParallelModule, reference: Tiny, batch: torch.Tensor, mesh: DeviceMesh) -> None:
        ours = model.optimizer(torch.optim.AdamW, lr=0.05)
        theirs = torch.optim.AdamW(reference.named_parameters(), lr=0.05)
        for turn in range(4):
            found = model.step(batch) if turn % 2 else model(batch)["loss"]
            wanted = reference(batch)["loss"]
            torch.testing.assert_close(found.detach(), wanted.detach())
            wanted.backward()
            if not turn % 2:
                found.backward()
            check_gradients(model, reference)
            ours_norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            theirs_norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
            torch.testing.assert_close(whole(ours_norm), theirs_norm)
            check_gradients(model, reference)
            ours.step(), theirs.step(), ours.zero_grad(), theirs.zero_grad()
            check_weights(model, reference)
        assert float(model.steps) == float(reference.steps) == 4

    on_mesh(shape, work)


@pytest.mark.parametrize("shape", [(1, 1), (2, 2)])
def test_gradients_add_up_over_calls_and_interleave(shape: tuple[int, int]) -> None:
    def work(model: ParallelModule, reference: Tiny, batch: torch.Tensor, mesh: DeviceMesh) -> None:
        for side in (model, reference):
            first, second = side(batch), side(batch * 2)
            (second["loss"] + second["out"].sum()).backward()
            first["out"].square().mean().backward()
            side(batch)["loss"].backward()
        check_gradients(model, reference)
        model.step(batch)
        reference(batch)["loss"].backward()
        check_gradients(model, reference)

    on_mesh(shape, work)


def test_input_gradient_torch_grad_and_evaluation() -> None:
    def work(model: ParallelModule, reference: Tiny, batch: torch.Tensor, mesh: DeviceMesh) -> None:
        grads = []
        for side in (model, reference):
            x = batch.clone().requires_grad_()
            loss = side(x)["loss"]
            grads.append(torch.autograd.grad(loss, [x, side.up.bias]))
            assert side.up.bias.grad is None
        torch.testing.assert_close(grads[0][0], grads[1][0])
        torch.testing.assert_close(whole(grads[0][1]), grads[1][1])
        model.eval(), reference.eval()
        assert not model._original.training
        with torch.no_grad():
            found, wanted = model(x=batch), reference(batch)
        torch.testing.assert_close(found, wanted)
        assert not found["loss"].requires_grad and type(found) is dict

    on_mesh((2, 2), work)


def test_same_face_as_the_original() -> None:
    def work(model: ParallelModule, reference: Tiny, batch: torch.Tensor, mesh: DeviceMesh) -> None:
        def names(module: nn.Module) -> list[list[str]]:
            return [
                [n for n, _ in module.named_parameters(remove_duplicate=False)],
                [n for n, _ in module.named_buffers()],
                [n for n, _ in module.named_modules()],
                list(module.state_dict()),
            ]

        assert names(model) == names(reference)
        with pytest.raises(AutoparError, match="no plan yet"):
            _ = model.plan
        model.step(batch)
        assert names(model) == names(reference)
        assert model.head.weight is model.up.weight and isinstance(model.up.weight, DTensor)
        assert model.config == {"name": "tiny"} and model.plan == f"plan for batch {BATCH}"
        assert "Tiny on mesh (2, 2)" in repr(model)
        with pytest.raises(AttributeError, match="nothing_such"):
            _ = model.nothing_such
        other = Tiny()
        torch.distributed.broadcast(other.up.weight.data, 0)
        for parameter in other.parameters():
            torch.distributed.broadcast(parameter.data, 0)
        model.load_state_dict(other.state_dict())
        check_weights(model, other)
        own = {key: value.clone() for key, value in model.state_dict().items()}
        model.load_state_dict(own)
        check_weights(model, other)
        torch.testing.assert_close(model.step(batch), other(batch)["loss"].detach())

    on_mesh((2, 2), work)


def test_written_weights_are_seen_however_written() -> None:
    def work(model: ParallelModule, reference: Tiny, batch: torch.Tensor, mesh: DeviceMesh) -> None:
        model.step(batch)
        model.up.weight.data.mul_(2)
        reference.up.weight.data.mul_(2)
        torch.testing.assert_close(model.step(batch), reference(batch)["loss"].detach())
        model.up.weight.data.mul_(2)
        reference.up.weight.data.mul_(2)
        torch.testing.assert_close(model.step(batch), reference(batch)["loss"].detach())

    on_mesh((2, 1), work)


def test_local_batch_and_dtensor_inputs() -> None:
    def work(model: ParallelModule, reference: Tiny, batch: torch.Tensor, mesh: DeviceMesh) -> tuple[int, ...]:
        local = model.local_batch(x=batch)["x"]
        assert isinstance(local, DTensor) and torch.equal(local.full_tensor(), batch)
        wanted = reference(batch)["loss"].detach()
        torch.testing.assert_close(model.step(x=local), wanted)
        (positional,) = model.local_batch(batch)
        torch.testing.assert_close(model.step(positional.redistribute(placements=[*[local.placements[1]] * 2])), wanted)
        return tuple(local.to_local().shape)

    assert on_mesh((2, 2), work) == [(3, FEATURES), (3, FEATURES), (2, FEATURES), (2, FEATURES)]


def test_another_batch_size_is_another_program() -> None:
    def work(model: ParallelModule, reference: Tiny, batch: torch.Tensor, mesh: DeviceMesh) -> None:
        for size in (5, 2, 5):
            torch.testing.assert_close(model.step(batch[:size]), reference(batch[:size])["loss"].detach())

    on_mesh((2, 2), work)


def test_errors_teach() -> None:
    def work(model: ParallelModule, reference: Tiny, batch: torch.Tensor, mesh: DeviceMesh) -> None:
        loss = model(batch, scale=1.0)["loss"]
        loss.backward(retain_graph=True)
        with pytest.raises(AutoparError, match="add the losses and call backward\\(\\) once"):
            loss.backward()
        with (
            pytest.raises(AutoparError, match="no second derivatives"),
            warnings.catch_warnings(action="ignore", category=UserWarning),
        ):
            torch.autograd.grad(model(batch)["loss"], list(model.parameters()), create_graph=True)
        with pytest.raises(AutoparError, match="positional inputs or keyword inputs"):
            model.local_batch(batch, scale=1.0)

    on_mesh((1, 2), work)


def test_a_gradient_at_an_output_without_tangent_asks_for_a_program_that_has_one() -> None:
    def work(model: ParallelModule, reference: Tiny, batch: torch.Tensor, mesh: DeviceMesh) -> None:
        call = model.prepare((batch,), {}, "all")
        object.__setattr__(call.program, "tangents", call.program.tangents[:1])
        for _ in range(2):
            for side in (model, reference):
                (side(batch)["out"] ** 3).sum().backward()
        check_gradients(model, reference)
        assert float(model.steps) == float(reference.steps) == 2
        assert [line.uses for line in model.programs()] == [2, 2], "the second call has it from the beginning"

    on_mesh((2, 2), work)


def test_ranks_that_disagree_are_named() -> None:
    def work(model: ParallelModule, reference: Tiny, batch: torch.Tensor, mesh: DeviceMesh) -> None:
        model.step(batch)

    with pytest.raises(PlanMismatchError, match="ranks 2, 3 have another plan"):
        on_mesh((4, 1), work, agree=False)
