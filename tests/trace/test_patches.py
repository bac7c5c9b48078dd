"""What tracing says differently of torch, and what it leaves as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from autopar.errors import TraceError
from autopar.trace.patches import patched
from autopar.trace.tracer import trace
from tests.helpers.interpret import interpret


class Remembers(nn.Module):
    """Keeps a table between calls, and hooks it installs at the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.tables: dict[int, Tensor] = {}
        self.seen: list[Tensor] = []
        self.hooked = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.hooked:
            self.layer.register_forward_hook(lambda _module, _args, output: self.seen.append(output))
            self.hooked = True
        size = x.shape[1]
        if size not in self.tables:
            self.tables[size] = torch.arange(size) * 1.0
        y = self.layer(x) + self.tables[size]
        return sum((kept.sum() for kept in self.seen), y.square().mean())


def test_caches_and_hooks_are_as_before() -> None:
    model = Remembers()
    traced = trace(model, (torch.randn(3, 4),), device="cpu")
    assert traced.signature.loss == "0"
    assert (model.tables, model.seen, model.hooked, len(model.layer._forward_hooks)) == ({}, [], False, 0)
    assert model(torch.randn(3, 4)).isfinite()


def test_torch_is_as_before() -> None:
    before = (checkpoint.CheckpointFunction.apply, nn.BatchNorm1d.forward, nn.SyncBatchNorm.forward)
    with patched():
        assert checkpoint.CheckpointFunction.apply != before[0]
        assert nn.SyncBatchNorm.forward is nn.BatchNorm1d.forward
    assert (checkpoint.CheckpointFunction.apply, nn.BatchNorm1d.forward, nn.SyncBatchNorm.forward) == before


def test_the_length_of_anything_else_is_that_of_python() -> None:
    plain = len
    with patched():
        assert len is not plain
        assert (len([1, 2]), len("abc"), len(torch.zeros(4, 2)), len(nn.ModuleList([nn.ReLU()]))) == (2, 3, 4, 1)
        for wrong in (3, torch.zeros(())):
            with pytest.raises(TypeError, match=r"len\(\)"):
                len(wrong)  # type: ignore[arg-type]
    assert len is plain


def test_batch_norm_over_processes_is_batch_norm() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    both = [model, nn.SyncBatchNorm.convert_sync_batchnorm(model)]
    x = torch.randn(6, 4)
    texts = [trace(m, (x,), device="cpu", loss_fn=_mean).graph.to_text() for m in both]
    assert texts[0] == texts[1]


def _mean(output: Any) -> Tensor:
    return output.mean()


def test_sparse_gradients_are_dense() -> None:
    model = nn.Sequential(nn.Embedding(7, 4, sparse=True), nn.Linear(4, 1))
    text = trace(model, (torch.randint(0, 7, (6, 5)),), device="cpu", loss_fn=_mean).graph.to_text()
    assert "embedding_dense_backward" in text and "sparse_coo" not in text


class Balances(nn.Module):
    """Weighs scores by how often each is the largest."""

    def __init__(self, **counting: Any) -> None:
        super().__init__()
        self.gate, self.counting = nn.Linear(4, 5), counting

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x)
        counts = torch.bincount(scores.argmax(-1).int(), minlength=5) + scores.argmin(-1).bincount(**self.counting)
        return (scores.mean(0) * counts).sum()


@pytest.mark.parametrize("weighted", [False, True])
def test_counts_of_a_least_length_have_it(weighted: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 4)
    model = Balances(minlength=5, **({"weights": torch.rand(6)} if weighted else {}))
    loss = model(x)
    loss.backward()
    graph = trace(model, (x,), device="cpu", loss_fn=None).graph.at(b=6)
    found = interpret(graph, {**dict(model.named_parameters()), "0": x})
    torch.testing.assert_close(found["output", "0"], loss.detach())
    torch.testing.assert_close(found["gradient", "gate.weight"], model.gate.weight.grad)


def test_counts_of_any_length_are_an_error_that_says_what_to_do() -> None:
    with pytest.raises(TraceError, match=r"torch\.bincount\(x, minlength=n\)"):
        trace(Balances(), (torch.randn(6, 4),), device="cpu", loss_fn=None)
