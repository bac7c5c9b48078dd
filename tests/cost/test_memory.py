"""Bytes of optimizer state, compared with what torch's optimizers really allocate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import optim

from autopar.cluster.description import Cluster
from autopar.cost import reserve, usable_bytes
from autopar.errors import OptionsError
from autopar.ir.assignment import ParameterPlacement
from autopar.ir.graph import Graph
from autopar.ir.node import TensorType
from autopar.ir.placements import parse_placements
from autopar.optimizers import OPTIMIZERS, optimizer_bytes
from autopar.passes.annotate.annotate import annotate
from autopar.placement.item_prices import optimizer_seconds, parameter_bytes
from autopar.placement.prices import Prices

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


PARAMETER = """
graph()
%w: f32[4, 6] = param("w")
%x: f32[8, 4] = input("x")
%y: f32[8, 6] = aten.mm.default(%x, %w)
return output "0" = %y
"""


def test_a_parameter_holds_what_its_resting_places_say() -> None:
    graph = annotate(Graph.from_text(PARAMETER), (2, 2))
    prices = Prices.of(Cluster.get("dgx-a100-80gb"), (2, 2), graph)
    node = graph.parameters["w"]

    def held(
        optimizer: str, weight: str, gradient: str, state: str, offload: Literal["", "host"] = ""
    ) -> tuple[int, int, int]:
        place = ParameterPlacement(*map(parse_placements, (weight, gradient, state)), offload=offload)
        return parameter_bytes(prices, node, place, optimizer)

    assert held("adamw", "R,R", "R,R", "R,R") == (96, 96, 192)
    assert held("amsgrad", "S(0),R", "S(0),R", "S(0),R") == (48, 48, 144)
    assert held("adamw", "R,R", "R,R", "R,R", offload="host") == (96, 96, 0)
    # The stored shard stays beside the gathered weight; Adafactor has a row and a column of its shard [2, 6] or [2, 3].
    assert held("adafactor", "R,R", "S(0),R", "S(0),R") == (48 + 96, 48, 4 * (2 + 6))
    assert held("adafactor", "S(0),S(1)", "S(0),S(1)", "S(0),S(1)") == (24, 24, 4 * (2 + 3))
    whole = ParameterPlacement(*[parse_placements("R,R")] * 3)
    moved = optimizer_seconds(prices, node, whole, "adamw") * prices.cluster.device.memory_bandwidth
    assert round(moved) == 3 * 96 + 2 * 192
