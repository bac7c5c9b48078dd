"""The calling convention of traced graphs, and what is said about models that cannot be traced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from autopar.errors import TraceError
from autopar.ir.node import symbol
from autopar.trace.tracer import trace
from tests.helpers.eager import assert_close
from tests.helpers.interpret import interpret


class Nested(nn.Module):
    """Inputs and outputs in trees, with constants among them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, pair: tuple[torch.Tensor, int], *, options: dict[str, Any]) -> Any:
        y = self.linear(x) * pair[1] + pair[0]
        return {"main": y, "extra": [options["mode"], y.sum(-1), None], "input": x}


def test_inputs_and_outputs_are_trees() -> None:
    args = (torch.randn(5, 4), (torch.randn(5, 4), 3))
    traced = trace(Nested(), args, {"options": {"mode": "fast", "mask": torch.ones(2)}}, device="cpu")
    signature, graph = traced.signature, traced.graph
    assert signature.input_names == ("0", "1.0", None, None, "options.mask")
    assert signature.constants == {2: 3, 3: "fast"}
    assert {n.target: str(n.type) for n in graph.placeholders("input")} == {
        "0": "f32[b, 4]",
        "1.0": "f32[b, 4]",
        "options.mask": "f32[2]",
    }
    assert signature.output_names == ("0", None, "2", None, "4")
    assert signature.output_constants == {1: "fast", 3: None}
    assert signature.loss is None and signature.differentiable == ("0", "2")
    assert [n.target for n in graph.placeholders("tangent")] == ["0", "2"]


def test_a_batch_of_one_and_a_scalar_input_have_no_symbol() -> None:
    args = (torch.randn(1, 4), (torch.tensor(2.0), 3))
    assert trace(Nested(), args, {"options": {"mode": ""}}, device="cpu").graph.symbols == ()


def test_batch_equal_to_another_size_is_not_confused() -> None:
    traced = trace(nn.Linear(4, 4), (torch.randn(4, 4),), device="cpu")
    (given,) = traced.graph.placeholders("input")
    assert given.type.shape == (symbol("b"), 4)
    assert traced.graph.symbols == (("b", 4),)


class Fixed(nn.Module):
    """Fixes its batch size in Python."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * len(x)).sum() + torch.zeros(int(x.shape[0])).sum()


def test_a_model_that_fixes_the_batch_size_is_traced_with_it() -> None:
    graph = trace(Fixed(), (torch.randn(6, 2, requires_grad=True),), device="cpu").graph
    assert graph.symbols == ()
    assert graph.placeholders("input")[0].type.shape == (6, 2)


class InBatch(nn.Module):
    """Says the batch size as ``len(x)``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = x @ x.mT / len(x) + (1 if len(x.shape) == 2 and len([x]) == 1 and len(x) else 2)
        return nn.functional.cross_entropy(scores, torch.arange(len(x)))


@pytest.mark.parametrize("size", [2, 6, 11])
def test_the_length_of_a_tensor_is_symbolic(size: int) -> None:
    graph = trace(InBatch(), (torch.randn(6, 4, requires_grad=True),), device="cpu").graph
    assert graph.symbols == (("b", 6),)
    x = torch.randn(size, 4, requires_grad=True)
    expected = InBatch()(x)
    expected.backward()  # type: ignore[no-untyped-call]
    found = interpret(graph.at(b=size), {"0": x})
    assert_close("loss", found["output", "0"], expected.detach(), 0.0)
    assert_close("gradient", found["input_gradient", "0"], x.grad, 0.0)


class Threshold(nn.Module):
    """Behaves differently from a batch size of 5 on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum() if x.shape[0] < 5 else x.sum() * 2


@pytest.mark.parametrize(("size", "others"), [(3, {2: True, 4: True, 5: False}), (7, {5: True, 4: False})])
def test_guards_say_for_which_batch_sizes_the_graph_holds(size: int, others: dict[int, bool]) -> None:
    traced = trace(Threshold(), (torch.ones(size, 2, requires_grad=True),), device="cpu")
    results = interpret(traced.graph.at(b=size), {"0": torch.ones(size, 2)})
    assert results["output", "0"] == (size * 2 if size < 5 else size * 4)
    if traced.graph.symbols:
        assert {other: traced.holds_for(other) for other in others} == others


def test_loss_functions_with_and_without_batch() -> None:
    model, x, y = nn.Linear(4, 2), torch.randn(3, 4), torch.randn(3, 2)
    plain = trace(model, (x,), device="cpu", loss_fn=lambda output: output.pow(2).mean())
    assert plain.signature.loss == "loss" and plain.signature.differentiable == ("loss",)
    found = interpret(plain.graph.at(), {**dict(model.named_parameters()), "0": x})
    assert_close("loss", found["output", "loss"], model(x).pow(2).mean().detach(), 0.0)
    assert_close("output", found["output", "0"], model(x).detach(), 0.0)

    class Keyword(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    batch = {"x": x, "y": y}
    with_batch = trace(Keyword(), (), batch, device="cpu", loss_fn=lambda output, batch: (output - batch["y"]).sum())
    found = interpret(with_batch.graph.at(), {**dict(Keyword().named_parameters()), **batch})
    assert_close("loss", found["output", "loss"], (model(x) - y).sum().detach(), 1.0)


def test_differentiating_all_outputs() -> None:
    model = Nested()
    args, kwargs = (torch.randn(5, 4), (torch.randn(5, 4), 3)), {"options": {"mode": ""}}
    loss = {"loss_fn": lambda output: output["main"].mean()}
    one = trace(model, args, kwargs, device="cpu", **loss)
    every = trace(model, args, kwargs, device="cpu", differentiate="all", **loss)
    assert one.signature.differentiable == ("loss",)
    assert every.signature.differentiable == ("0", "2", "loss")


def test_without_gradients() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    x = torch.randn(6, 4)
    traced = trace(model, (x,), device="cpu", grad=False, training=False)
    assert {o.kind for o in traced.graph.outputs} == {"output"}
    assert all(node.phase == "forward" for node in traced.graph)
    results = interpret(traced.graph.at(), {**model.state_dict(), "0": x})
    assert_close("output", results["output", "0"], model.eval()(x).detach(), 0.0)


def test_gradients_of_inputs() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    model = nn.Linear(4, 1)
    graph = trace(model, (x,), device="cpu", loss_fn=torch.sum).graph
    results = interpret(graph.at(), {**dict(model.named_parameters()), "0": x})
    assert_close("gradient", results["input_gradient", "0"], model.weight.detach().expand(3, 4), 0.0)


@dataclass
class Result:
    """An output type that nobody registered."""

    value: torch.Tensor
    name: str


class Constants(nn.Module):
    """Tensors in plain attributes, and made from numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.shift = torch.tensor([1.0, 2.0, 3.0])

    def forward(self, x: torch.Tensor) -> Result:
        return Result(x * self.weight + self.shift + torch.tensor([0.5, 0.25, 0.0]) * torch.tensor(2.0), "done")


def test_constants_are_lifted_and_dataclasses_come_back() -> None:
    from torch.utils import _pytree as pytree

    model, x = Constants(), torch.randn(4, 3)
    traced = trace(model, (x,), device="cpu")
    assert len(traced.graph.constants) == 2 and traced.parameters == {"weight": True}
    results = interpret(traced.graph.at(), {"weight": model.weight, "0": x})
    expected = model(x)
    assert_close("value", results["output", "0"], expected.value.detach(), 0.0)
    signature = traced.signature
    leaves = [signature.output_constants.get(i, results.get(("output", str(i)))) for i in range(2)]
    assert pytree.tree_unflatten(leaves, signature.output_spec).name == "done"


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"x": object()}, "'x'"),
        ({"x": {"a": [1, {2}]}}, "'x.a.1'"),
        ({"x": [__import__("numpy").ones(2)]}, "from_numpy"),
    ],
)
def test_inputs_that_are_no_tensors(given: dict[str, Any], name: str) -> None:
    with pytest.raises(TraceError, match=name):
        trace(nn.Linear(2, 2), (), given, device="cpu")


def test_a_function_is_no_module() -> None:
    with pytest.raises(TraceError, match="wrap the function"):
        trace(torch.sin, (torch.ones(2),), device="cpu")  # type: ignore[arg-type]


def test_a_loss_that_is_no_scalar() -> None:
    with pytest.raises(TraceError, match=r"loss_fn returned a tensor of shape \(3, 2\)"):
        trace(nn.Linear(4, 2), (torch.randn(3, 4),), device="cpu", loss_fn=lambda output: output)
