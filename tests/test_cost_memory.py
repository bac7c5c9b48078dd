"""Bytes of optimizer state, compared with what torch's optimizers really allocate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import optim

from autopar.cluster import Cluster
from autopar.cost import (
    OPTIMIZERS,
    optimizer_bytes,
    parameter_bytes,
    reserve,
    state_bytes_per_element,
    usable_bytes,
)
from autopar.errors import OptionsError
from autopar.graph import TensorType, symbol

Parameters = list[torch.nn.Parameter]
REAL: dict[str, Callable[[Parameters], optim.Optimizer]] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: optim.Adam(p),
    "adamw": lambda p: optim.AdamW(p),
    "amsgrad": lambda p: optim.AdamW(p, amsgrad=True),
    "adamax": lambda p: optim.Adamax(p),
    "nadam": lambda p: optim.NAdam(p),
    "radam": lambda p: optim.RAdam(p),
    "adagrad": lambda p: optim.Adagrad(p),
    "adadelta": lambda p: optim.Adadelta(p),
    "adafactor": lambda p: optim.Adafactor(p),
    "asgd": lambda p: optim.ASGD(p),
    "rmsprop": lambda p: optim.RMSprop(p),
    "rprop": lambda p: optim.Rprop(p),
    "muon": lambda p: optim.Muon(p),
}


def allocated(optimizer: optim.Optimizer, parameters: Parameters) -> int:
    """Bytes of the state after a step, counters left out."""
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    tensors = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    return sum(t.nbytes for t in tensors if t.ndim > 0)


@pytest.mark.parametrize("name", sorted(REAL))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_what_torch_allocates(name: str, dtype: torch.dtype) -> None:
    shapes = [(6, 4)] if name == "muon" else [(6, 4), (5,), (2, 3, 4)]
    parameters = [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes]
    expected = sum(int(optimizer_bytes(name, TensorType(shape, dtype))) for shape in shapes)
    assert allocated(REAL[name](parameters), parameters) == expected


def test_names_are_forgiving_and_errors_list_them() -> None:
    weight = TensorType((6, 4), torch.float32)
    assert optimizer_bytes("AdamW", weight) == 2 * 24 * 4
    assert optimizer_bytes("sgd momentum", weight) == optimizer_bytes("SGD-momentum", weight) == 24 * 4
    with pytest.raises(OptionsError, match=r"unknown optimizer 'adamww'.*adamw, .*sgd"):
        optimizer_bytes("adamww", weight)


def test_bytes_of_a_parameter() -> None:
    weight = TensorType((6, 4), torch.bfloat16)
    held = parameter_bytes("adamw", weight)
    assert (held.weight, held.gradient, held.optimizer, held.total) == (48, 48, 96, 192)
    assert parameter_bytes("adamw", weight, trained=False).total == 48
    assert state_bytes_per_element("adamw") == 8
    b = symbol("b")
    assert parameter_bytes("adam", TensorType((b, 2), torch.float32)).total == 32 * b


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_state_is_known_for_any_rank(name: str) -> None:
    for shape in ((), (3,), (3, 2), (2, 3, 2)):
        held = optimizer_bytes(name, TensorType(shape, torch.float32))
        assert 0 <= int(held) <= 3 * 4 * 12


def test_reserve() -> None:
    cluster = Cluster.get("dgx-a100-80gb")
    device = replace(cluster.device, memory_bytes=1000, reserve_bytes=100, reserve_fraction=0.25)
    assert reserve(replace(cluster, device=device)) == 350
    assert usable_bytes(replace(cluster, device=device)) == 650
    assert 70 * 2**30 < usable_bytes(cluster) < 75 * 2**30
    with pytest.raises(OptionsError, match="reserves 1250 of 1000 bytes"):
        usable_bytes(replace(cluster, device=replace(device, reserve_bytes=1000)))
