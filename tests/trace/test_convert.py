"""Modules that convert themselves within forward, as routers do that compute in float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.trace.tracer import trace
from tests.helpers.interpret import interpret


class Converts(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate, self.body, self.dtype = nn.Linear(8, 8), nn.Linear(8, 8), dtype

    def forward(self, x: Tensor) -> Tensor:
        self.gate = self.gate.to(self.dtype)
        return self.body(x) * self.gate(x.to(self.dtype)).softmax(-1).to(x.dtype)  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self, blocks: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Converts(dtype) for _ in range(blocks)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
@pytest.mark.parametrize("blocks", (1, 3))
def test_a_converted_parameter_has_its_gradient(blocks: int, dtype: torch.dtype) -> None:
    model, x = Model(blocks, dtype), torch.randn(6, 5, 8)
    traced = trace(model, (x,), device="cpu")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}, "tracing changes no parameter"
    (name,) = (node.target for node in traced.graph.placeholders("input"))
    state = {path: parameter.detach().clone() for path, parameter in model.named_parameters()}
    found = interpret(traced.graph.at(b=6), {**state, name: x})
    model(x).backward()
    for path, parameter in model.named_parameters():
        gradient = found["gradient", path]
        assert gradient is not None and parameter.grad is not None, path
        torch.testing.assert_close(gradient.double(), parameter.grad.double(), rtol=1e-5, atol=1e-7)
