"""A graph is that of every device: attention is one operation, and what a model says of its device is said of any."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from autopar.trace.tracer import trace
from tests.helpers.marks import slow_but


class Attends(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.projection, self.dropout = nn.Linear(8, 24), dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.projection(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=self.dropout).sum()


class NamesItsDevice(nn.Module):
    """Code written for a GPU, as much of it is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[-1], device="cuda")
        shift = torch.ones(x.shape[-1], device=torch.device("cuda", 0)).cuda().to("cuda:1").to(0)
        shift = shift + torch.zeros(x.shape[-1], device=0)
        return (x.cuda() * positions + shift.to(device="cuda", dtype=torch.float32)).sum()


@pytest.mark.parametrize("dtype", slow_but([None], [None, torch.bfloat16, torch.float16]))
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_graphs_for_all_devices_are_equal(dropout: float, dtype: torch.dtype | None) -> None:
    model, x = Attends(dropout), torch.randn(3, 5, 8)
    graphs = [trace(model, (x,), device=kind, autocast=dtype).graph.to_text() for kind in ("cpu", "cuda", "xpu")]
    assert graphs[0] == graphs[1] == graphs[2]


def test_attention_is_one_operation_of_a_graph() -> None:
    lines = trace(Attends(), (torch.randn(3, 5, 8),), device="cpu").graph.to_text().splitlines()
    ops = [line.split(" = ")[1].split("(")[0] for line in lines if "ttention" in line and " = " in line]
    assert ops[0] == "autopar.attention.default" and "autopar.attention_backward.default" in ops
    assert not [op for op in ops if op.startswith("aten._scaled")]


def test_the_device_that_a_model_names_is_the_one_it_runs_on() -> None:
    graph = trace(NamesItsDevice(), (torch.randn(3, 4),), device="cuda").graph
    assert "cuda" not in graph.to_text()


def test_the_autocast_of_the_models_device_counts() -> None:
    model, x = nn.Linear(4, 2), torch.randn(3, 4)
    plain = trace(model, (x,), device="cuda").graph.to_text()
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    try:
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        torch.set_autocast_enabled("cuda", True)
        cast = trace(model, (x,), device="cuda").graph.to_text()
        assert trace(model, (x,), device="cpu").graph.to_text() == plain
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])
    assert "bf16" in cast and "bf16" not in plain
    assert trace(model, (x,), device="cpu", autocast=torch.bfloat16).graph.to_text() == cast


class CastsItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            x = self.inner(x)
        with torch.autocast("cuda", enabled=False):
            return self.outer(x.float()).sum()


@pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda':UserWarning")
def test_autocast_of_the_device_within_a_model_is_kept() -> None:
    lines = trace(CastsItself(), (torch.randn(3, 4),), device="cuda").graph.to_text().splitlines()
    products = [line for line in lines if "aten.mm" in line or "aten.addmm" in line]
    assert products and all(("bf16" in line) == line.endswith("@inner") for line in products)


class ChoosesItsKernel(nn.Module):
    def __init__(self, backend: SDPBackend) -> None:
        super().__init__()
        self.backend = backend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(self.backend):
            return F.scaled_dot_product_attention(x, x, x).sum()


@pytest.mark.parametrize("backend", [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION])
def test_a_kernel_of_gpus_that_a_model_chooses_is_attention(backend: SDPBackend) -> None:
    x = torch.randn(2, 3, 4, 8, requires_grad=True)
    assert "autopar.attention" in trace(ChoosesItsKernel(backend), (x,), device="cuda").graph.to_text()


def test_another_default_device_changes_nothing() -> None:
    class Counts(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * torch.arange(4)).sum()

    x = torch.randn(3, 4)
    graph = trace(Counts(), (x,), device="cuda").graph.to_text()
    torch.set_default_device("cuda")
    try:
        assert trace(Counts(), (x,), device="cuda").graph.to_text() == graph
    finally:
        torch.set_default_device(None)
