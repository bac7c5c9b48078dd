"""Gradients that the compiled backward adds to ``.grad`` by itself, and those that it leaves to autograd, against the
plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

import autopar
from autopar.runtime import ParallelModule
from autopar.runtime.comm.groups import MeshGroups, mesh_of_one
from autopar.runtime.launch import run_local
from autopar.runtime.state.parameters import local_of, wrap
from autopar.runtime.state.weights import add_gradient, gradient_like
from tests.helpers.runtime_tiny import Tiny
from tests.runtime.test_parallel_module import check_gradients, on_mesh, whole

Work = Callable[[nn.Module, torch.Tensor], None]


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _same(shape: tuple[int, ...], do: Work, turns: int = 2) -> None:
    """Does the same to the parallel and to the plain model, and compares gradients each time."""

    def work(model: ParallelModule, reference: Tiny, batch: torch.Tensor, mesh: DeviceMesh) -> None:
        for _ in range(turns):
            do(model, batch)
            do(reference, batch)
            check_gradients(model, reference)

    on_mesh(shape, work)


@pytest.mark.parametrize("shape", [(1, 1), (2, 2)])
def test_gradients_accumulate_over_backwards(shape: tuple[int, ...]) -> None:
    _same(shape, lambda model, batch: model(batch)["loss"].backward(), turns=3)


def test_gradients_are_those_of_everything_that_reads_a_parameter() -> None:
    """Autograd adds the penalty's gradient to the same ``.grad``."""

    def do(model: nn.Module, batch: torch.Tensor) -> None:
        model(batch)  # The first call places the parameters.
        penalty = sum(_full(parameter).pow(2).sum() for parameter in model.parameters())
        (model(batch)["loss"] + 0.1 * penalty).backward()

    _same((1, 1), do)


def test_no_grad_is_set_where_gradients_are_returned() -> None:
    def work(model: ParallelModule, reference: Tiny, batch: torch.Tensor, mesh: DeviceMesh) -> None:
        found = torch.autograd.grad(model(batch)["loss"], [*model.parameters()][:2])
        wanted = torch.autograd.grad(reference(batch)["loss"], [*reference.parameters()][:2])
        for own, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(whole(own), other)
        assert all(parameter.grad is None for parameter in model.parameters())

    on_mesh((2, 2), work)


def test_backward_of_some_inputs_leaves_the_others() -> None:
    def do(model: nn.Module, batch: torch.Tensor) -> None:
        model(batch)["loss"].backward(inputs=[*model.parameters()][:2])

    def work(model: ParallelModule, reference: Tiny, batch: torch.Tensor, mesh: DeviceMesh) -> None:
        for each in (model, reference):
            do(each, batch)
        for (name, own), other in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert (own.grad is None) == (other.grad is None), name
            if own.grad is not None and other.grad is not None:
                torch.testing.assert_close(whole(own.grad), other.grad)

    on_mesh((1, 1), work)


def test_a_parameter_frozen_since_forward_gets_none() -> None:
    def work(model: ParallelModule, reference: Tiny, batch: torch.Tensor, mesh: DeviceMesh) -> None:
        for each in (model, reference):
            loss = each(batch)["loss"]
            next(each.parameters()).requires_grad_(False)
            loss.backward()
            assert next(each.parameters()).grad is None
            assert all(parameter.grad is not None for parameter in [*each.parameters()][1:])

    on_mesh((1, 1), work)


def test_a_gradient_that_the_user_replaced_is_added_to() -> None:
    """Of other placements than the parameter's."""

    def work(model: ParallelModule, reference: Tiny, batch: torch.Tensor, mesh: DeviceMesh) -> None:
        model(batch)["loss"].backward()
        reference(batch)["loss"].backward()
        for parameter in model.parameters():
            assert isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor)
            parameter.grad = parameter.grad.redistribute(placements=[Replicate()] * mesh.ndim)
        model(batch)["loss"].backward()
        reference(batch)["loss"].backward()
        for own, other in zip(model.parameters(), reference.parameters(), strict=True):
            assert own.grad is not None
            torch.testing.assert_close(_full(own.grad), other.grad)

    on_mesh((2, 2), work)


def test_hooks_on_the_nodes_of_autograd_run_when_the_gradient_is_there() -> None:
    def work(model: ParallelModule, reference: Tiny, batch: torch.Tensor, mesh: DeviceMesh) -> None:
        model(batch)  # The first call places the parameters.
        parameter, seen = next(model.parameters()), []
        node = torch.autograd.graph.get_gradient_edge(parameter).node
        node.register_hook(lambda *_: seen.append(parameter.grad is not None))
        model(batch)["loss"].backward()
        assert seen == [True]

    on_mesh((1, 1), work)


def test_anomaly_detection_sees_gradients() -> None:
    def work(model: ParallelModule, reference: Tiny, batch: torch.Tensor, mesh: DeviceMesh) -> None:
        loss = model(batch)["loss"]
        with pytest.raises(RuntimeError, match="nan values"), torch.autograd.set_detect_anomaly(True):
            (loss * float("nan")).backward()

    on_mesh((1, 1), work)


def test_gradients_lie_as_their_parameters_do() -> None:
    """As autograd's do: fused optimizers take no others."""
    parameter = nn.Parameter(wrap(torch.randn(4, 3, 2, 2), MeshGroups(mesh_of_one("cpu"))))
    elsewhere = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    made = gradient_like(parameter, elsewhere)
    assert add_gradient(parameter, elsewhere) and parameter.grad is not None
    for gradient in (made, parameter.grad):
        assert local_of(gradient).stride() == local_of(parameter).stride()
        torch.testing.assert_close(local_of(gradient), elsewhere)
    same = torch.randn(4, 3, 2, 2)
    assert local_of(gradient_like(parameter, same)).data_ptr() == same.data_ptr()


class Classifies(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)]
        self.layers = nn.Sequential(*layers, nn.Flatten(), nn.Linear(150, 5))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layers(x), labels)


def _bf16_step(rank: int, world: int) -> None:
    torch.manual_seed(0)
    plain, x, labels = Classifies(), torch.randn(6, 3, 9, 9), torch.randint(0, 5, (6,))
    module = autopar.parallelize(copy.deepcopy(plain), (world,), options=autopar.Options(precision="bf16"))
    with torch.autocast("cpu", torch.bfloat16):
        expected = plain(x, labels)
    expected.backward()
    # The sum of a few numbers, in another order.
    torch.testing.assert_close(module.step(x, labels), expected.detach())
    for (name, own), other in zip(module.named_parameters(), plain.parameters(), strict=True):
        assert own.grad is not None and other.grad is not None
        assert torch.equal(local_of(own.grad), other.grad), name
    for (name, found), wanted in zip(module.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(found, wanted), name


def test_batch_norms_under_bf16_give_what_eager_gives_to_the_bit() -> None:
    """Nothing is sharded on a mesh of one, so convolutions and batch norms are torch's own on 16 bits."""
    run_local(_bf16_step, 1, timeout=120)
