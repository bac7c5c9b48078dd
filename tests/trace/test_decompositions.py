"""What is taken apart while tracing gives eager's numbers, forward and backward, and leaves no averaging
operation behind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.passes.normalise.standard import normalise
from autopar.trace.tracer import trace
from tests.helpers.eager import assert_close, assert_same_step
from tests.helpers.interpret import interpret
from tests.helpers.marks import slow_but

LEFT_BEHIND = (
    "mean",
    "var",
    "std",
    "nll_loss",
    "log_softmax",
    "batch_norm",
    "addmm",
    "mse_loss",
    "smooth_l1",
    "cross_entropy",
    "embedding_bag",
    "glu",
    "trilinear",
)

Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Calls(nn.Module):
    """``function(scaled input, target)``: a gradient flows through it into a parameter."""

    def __init__(self, function: Function, width: int) -> None:
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.function(x * self.scale, target).sum()}


def classes(size: int) -> dict[str, torch.Tensor]:
    target = torch.randint(0, 5, (size,))
    target[0] = -100
    return {"x": torch.randn(size, 5), "target": target}


def pixels(size: int) -> dict[str, torch.Tensor]:
    target = torch.randint(0, 5, (size, 3, 4))
    target[:, 0] = 2
    return {"x": torch.randn(size, 3, 4, 5), "target": target}


def reals(size: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(size, 5), "target": torch.rand(size, 5)}


STARTS = torch.tensor([0, 3, 3, 11, 26])


def bags(t: torch.Tensor) -> torch.Tensor:
    """Positions in a table of five rows."""
    return (t * 5).long().clamp(0, 4)


def table(x: torch.Tensor) -> torch.Tensor:
    """Five rows of four."""
    return x[:5, :4] + x.sum()


WEIGHT = torch.tensor([0.5, 1.0, 2.0, 0.1, 3.0])

FUNCTIONS: dict[str, tuple[Function, Callable[[int], dict[str, torch.Tensor]]]] = {
    "cross entropy": (F.cross_entropy, classes),
    "weighted": (lambda x, t: F.cross_entropy(x, t, weight=WEIGHT.to(x.dtype)), classes),
    "sum": (lambda x, t: F.cross_entropy(x, t, reduction="sum"), classes),
    "each": (lambda x, t: F.cross_entropy(x, t, reduction="none"), classes),
    "smoothed": (lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1), classes),
    "2d ignoring": (lambda x, t: F.cross_entropy(x.permute(0, 3, 1, 2), t, ignore_index=2), pixels),
    "mse": (F.mse_loss, reals),
    "l1": (F.l1_loss, reals),
    "smooth l1": (F.smooth_l1_loss, reals),
    "huber": (F.huber_loss, reals),
    "bce": (lambda x, t: F.binary_cross_entropy(x.sigmoid(), t), reals),
    "bce logits": (F.binary_cross_entropy_with_logits, reals),
    "kl": (lambda x, t: F.kl_div(x.log_softmax(-1), t, reduction="batchmean"), reals),
    "soft margin": (lambda x, t: F.soft_margin_loss(x, t.sign()), reals),
    "mean": (lambda x, t: x.mean() + (x.mean((0,), keepdim=True) * t).mean(1), reals),
    "var": (lambda x, t: x.var(0) + x.std(0, correction=0) + (x.var() * t).mean(0), reals),
    "var_mean": (
        lambda x, t: torch.cat(torch.var_mean(x, 0)) + torch.cat(torch.std_mean(x, 1))[:10].sum(),
        reals,
    ),
    "logsumexp": (lambda x, t: x.logsumexp(0) + t.sum(0), reals),
    "norms": (lambda x, t: x.norm(dim=1) + x.norm(p=1, dim=1) + x.norm(p=3, dim=1) + x.norm(), reals),
    "addmm": (
        lambda x, t: torch.addmm(t, x, x[:5].t() if x.shape[0] < 5 else x.t() @ x, beta=0.5, alpha=2.0),
        reals,
    ),
    "baddbmm": (
        lambda x, t: torch.baddbmm(t[:, None], x[:, None], torch.ones(x.shape[0], 5, 5, dtype=x.dtype)),
        reals,
    ),
    "mv and dot": (lambda x, t: torch.mv(x, t.sum(0)) + torch.dot(x.sum(0), t.sum(0)), reals),
    "glu": (lambda x, t: F.glu(torch.cat([x, x * t], 1), 1), reals),
    "bilinear": (lambda x, t: F.bilinear(x, t, torch.arange(50.0, dtype=x.dtype).view(2, 5, 5)), reals),
    "eye": (lambda x, t: x @ torch.eye(5, dtype=x.dtype) * t, reals),
    "bags": (lambda x, t: F.embedding_bag(bags(t), table(x), mode="sum"), reals),
    "padded bags": (lambda x, t: F.embedding_bag(bags(t), table(x), padding_idx=2), reals),
    "weighted bags": (
        lambda x, t: F.embedding_bag(bags(t), table(x), mode="sum", per_sample_weights=t.to(x.dtype)),
        reals,
    ),
    "runs": (lambda x, t: F.embedding_bag(bags(t).flatten(), table(x), STARTS), reals),
    "runs to an end": (
        lambda x, t: F.embedding_bag(
            bags(t).flatten(),
            table(x),
            torch.cat([STARTS, torch.full((1,), t.numel())]),
            mode="sum",
            include_last_offset=True,
            padding_idx=1,
        ),
        reals,
    ),
    "unbind and stack": (lambda x, t: torch.stack(x.unbind(1)[::-1], 1) * t, reals),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_same_as_eager(name: str) -> None:
    function, make = FUNCTIONS[name]

    def batch(size: int) -> dict[str, Any]:
        return {k: v.double() if v.is_floating_point() else v for k, v in make(size).items()}

    model = Calls(function, batch(6)["x"].shape[-1]).double()
    traced = trace(model, (), batch(6), device="cpu")
    graph = normalise(traced.graph)
    assert graph.symbols, "the batch size was specialised"
    left = {node.op for node in graph if any(f".{stem}" in node.op for stem in LEFT_BEHIND)}
    assert left == set()
    for size in (6, 9):
        assert_same_step(graph.at(b=size), traced, model, batch(size), loss_of=lambda out: out["loss"])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("options", [{}, {"affine": False}, {"momentum": 0.3}, {"track_running_stats": False}], ids=str)
def test_batch_norm(training: bool, options: dict[str, Any]) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3, **options))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).square().sum(1).tanh().sum()

    model = Normed().double().train(training)
    if options.get("track_running_stats", True):
        model.inner[1].running_var.uniform_(0.5, 2.0)
    traced = trace(model, (), {"x": torch.randn(4, 2, 3, 3).double()}, device="cpu")
    graph = normalise(traced.graph)
    assert not any("batch_norm" in node.op for node in graph)
    for size in (4, 6) if graph.symbols else (4,):
        batch = {"x": torch.randn(size, 2, 3, 3).double()}
        assert_same_step(graph.at(b=size), traced, model, batch, loss_of=lambda out: out)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_accumulates_as_torch_does(dtype: torch.dtype) -> None:
    """The sum of 4096 values of 100 overflows float16; their mean does not."""

    class Mean(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return x.mean(), x.var(), x.log_softmax(-1), torch.linalg.vector_norm(x, dim=1)

    x = (100 + torch.randn(4, 4096)).to(dtype)
    traced = trace(Mean(), (x,), device="cpu")
    results = interpret(traced.graph.at(), {"0": x})
    for index, expected in enumerate(Mean()(x)):
        found = results["output", str(index)]
        assert found is not None and found.dtype == dtype
        torch.testing.assert_close(found, expected)


def test_dropout_that_drops_nothing_disappears() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), nn.Dropout(0.5))
    x = torch.randn(3, 4)
    graph = normalise(trace(model, (x,), device="cpu", training=False).graph)
    assert [n.op for n in graph if n.phase == "forward" and not n.is_placeholder] == [
        "aten.permute.default",
        "aten.mm.default",
        "aten.add.Tensor",
    ]
    results = interpret(graph.at(), {**dict(model.named_parameters()), "0": x})
    assert_close("output", results["output", "0"], model.eval()(x).detach(), 0.0)


def test_dropout_that_drops_stays_and_is_never_merged() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * self.scale
            return (F.dropout(y, 0.5) - F.dropout(y, 0.5)).abs().sum()

    graph = normalise(trace(Twice(), (torch.ones(3, 4),), device="cpu", training=True).graph)
    random = [node for node in graph if not node.is_placeholder and ("bernoulli" in node.op or "rand" in node.op)]
    assert len([node for node in random if node.phase == "forward"]) == 2


def test_what_is_repeated_can_be_viewed() -> None:
    """As torch's is, whatever lies in which order: of one element, repeated as often as there are samples."""

    def biased(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        every = bias.permute(2, 0, 1).unsqueeze(0).repeat(x.shape[0], 1, 1, 1)
        return (x @ x.transpose(-1, -2)).view(-1, 3, 3) * every.view(-1, 3, 3)

    def batch(size: int) -> dict[str, torch.Tensor]:
        return {"x": torch.randn(size, 2, 3, 5).double(), "target": torch.arange(18.0).view(3, 3, 2).double()}

    model = Calls(biased, 5).double()
    traced = trace(model, (), batch(4), device="cpu")
    assert_same_step(normalise(traced.graph).at(), traced, model, batch(4), loss_of=lambda out: out["loss"])


STRIDED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], bool]] = {
    # A function of [b, 6, 4, 1], and whether its reads by strides are permutations and reshapes.
    "pool": (lambda x: F.adaptive_avg_pool2d(x, 1), True),
    "pool over one dim": (lambda x: F.adaptive_avg_pool1d(x.flatten(2), 1), True),
    "same": (lambda x: x.as_strided(x.shape, x.stride()), True),
    "in another order": (lambda x: x.as_strided((4, x.shape[0], 6), (1, 24, 4)), True),
    "of another order": (lambda x: x.transpose(0, 1).as_strided((x.shape[0], 24), (24, 1)), True),
    "one sample alone": (lambda x: x[1:2].as_strided((6, 4), (4, 1)), True),
    "one sample alone, from its place in memory": (lambda x: x[1:2].as_strided((6, 4), (4, 1), 24), True),
    "some": (lambda x: x.as_strided((x.shape[0], 5), (24, 1)), False),
    "some twice": (lambda x: x.as_strided((x.shape[0], 2, 24), (24, 0, 1)), False),
    "some of a part of the memory": (lambda x: x[1:].as_strided((5, 3), (4, 1), 26), False),
    "across samples": (lambda x: x.as_strided((24 * x.shape[0] - 5, 6), (1, 1)), False),
}


@pytest.mark.parametrize("name", slow_but(["pool", "in another order", "some of a part of the memory"], STRIDED))
def test_reads_by_strides(name: str) -> None:
    """Forward and backward are those of torch; what reads every element once shows it."""
    function, plain = STRIDED[name]
    model = Calls(lambda x, target: function(x).tanh() * function(target), 1).double()
    inputs = {"x": torch.randn(3, 6, 4, 1).double(), "target": torch.randn(3, 6, 4, 1).double()}
    traced = trace(model, (), inputs, device="cpu")
    graph = normalise(traced.graph)
    assert any("as_strided" in node.op for node in graph) != plain
    assert not plain or graph.symbols or "alone" in name
    assert_same_step(graph.at(**dict(graph.symbols)), traced, model, inputs, loss_of=lambda out: out["loss"])
