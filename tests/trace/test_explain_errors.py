"""What cannot be traced says where, why, and what to do; what looks as if it could not, can."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autopar.errors import TraceError
from autopar.trace.tracer import trace
from tests.helpers.eager import assert_close
from tests.helpers.interpret import interpret
from tests.helpers.marks import slow_but


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if y.sum().item() > 0:  # the item
            y = y + 1
        return y.sum()


class Truth(Branch):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y.sum() if (y > 0).any() else y.mean()  # the truth


class Select(Branch):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y[y > 0].std()  # the selection


class Numpy(Branch):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sum() * float(x.detach().numpy().max())  # the array


class Listed(Branch):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sum() * sum(x[:, 0].tolist())  # the list


class Loop(Branch):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        for _ in range(int(x.abs().sum())):  # the loop
            y = y + 1
        return y.sum()


class Rows(Branch):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        for row in torch.nonzero(x[:, 0] > 0):  # the rows
            y[row] = 0
        return y.sum()


class Prints(Branch):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        print(f"{y.sum():.3f}")  # the print
        return y.sum()


class Steps(Branch):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).sum()
        y.backward()  # the backward
        return y


class Reads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad if x.sum() > 0 else -grad  # the gradient


class ReadsBackward(Branch):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Reads.apply(self.linear(x)).sum()  # type: ignore[no-any-return, no-untyped-call]


class OwnGenerator(Branch):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) + torch.randn(4, generator=torch.Generator())).sum()  # the generator


class Mismatch(Branch):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.t()).sum()  # the mismatch


class Clamps(Branch):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.linear.weight.data.clamp_(-1, 1)
        return self.linear(x).sum()


class Wrapper(torch.overrides.TorchFunctionMode):
    """Only hands on what it is given."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_mode_that_hands_calls_on_is_not_where_they_are_made() -> None:
    with Wrapper(), pytest.raises(TraceError, match="# the item"):
        trace(Branch(), (torch.randn(6, 4),), device="cpu")


def test_a_decision_in_backward_names_its_line() -> None:
    with pytest.raises(TraceError, match="the gradient"):
        trace(ReadsBackward(), (torch.randn(6, 4),), device="cpu")


def test_a_generator_of_its_own_names_module_and_line() -> None:
    model = nn.Sequential(nn.Identity(), OwnGenerator())
    with pytest.raises(TraceError, match=r"(?s)(?=.*a Generator)(?=.*'1').*test_explain_errors.py:\d+.*manual_seed"):
        trace(model, (torch.randn(6, 4),), device="cpu")


def test_a_parameter_changed_in_place_is_named() -> None:
    with pytest.raises(TraceError, match=r"'linear.weight' in place"):
        trace(Clamps(), (torch.randn(6, 4),), device="cpu")


class Counts(Branch):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(x).sum() * self.calls


class Recurrence(nn.Module):
    """Goes through a sequence, by an operation or by a module for each step."""

    def __init__(self, cell: bool) -> None:
        super().__init__()
        self.linear, self.cell = nn.Linear(4, 4), nn.Identity() if cell else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = y = self.linear(x)
        for _ in range(300):
            state = state * 0.5 if self.cell is None else self.cell(state)  # the step
        return (state + y).sum()


class Stacked(nn.Module):
    """As many layers, and an operation between each and the next."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ModuleList(nn.Identity() for _ in range(300))
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        for scale in self.scales:
            x = scale(x) * 0.5
        return x.sum()


@pytest.mark.parametrize("cell", slow_but([True], [False, True]))
def test_a_loop_over_steps_is_warned_of_by_its_line(cell: bool) -> None:
    name = "what calls Identity" if cell else "module '0'"
    with pytest.warns(
        UserWarning, match=rf"{name} runs .*{__file__}:\d+ more than 256 times in one call\n.*# the step"
    ) as said:
        trace(nn.Sequential(Recurrence(cell)), (torch.ones(2, 4),), device="cpu")
    assert [one.filename for one in said] == [__file__]


def test_a_loop_over_layers_is_none() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trace(Stacked(), (torch.ones(2, 4),), device="cpu")
    assert not said


def test_a_number_that_counts_calls_is_warned_of() -> None:
    model = nn.Sequential(nn.Identity(), Counts())
    with pytest.warns(UserWarning, match=r"1\.calls.*register_buffer"):
        traced = trace(model, (torch.randn(6, 4),), device="cpu")
    assert traced.signature.loss == "0" and model[1].calls == 0


class Square(torch.autograd.Function):
    """With a gradient that is not its derivative, to see that it is the one that runs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x * x * scale

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return 3 * x * grad * ctx.scale, None


class Squares(Branch):
    def forward(self, x: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        x[0]["a"].mul_(2)
        return Square.apply(self.linear(x[0]["a"]), 2.0).sum() + x[1]["b"].sum()  # type: ignore[no-any-return, no-untyped-call]


def test_custom_functions_inputs_in_trees_and_inputs_written_to() -> None:
    model, a, b = Squares(), torch.randn(6, 4), torch.randn(6, 3)
    traced = trace(model, ([{"a": a}, {"b": b}],), device="cpu")
    leaves = dict(zip(traced.signature.input_names, (a, b), strict=True))
    values = {**dict(model.named_parameters()), **{str(name): leaf.clone() for name, leaf in leaves.items()}}
    results = interpret(traced.graph.at(b=6), values)
    model([{"a": a.clone()}, {"b": b}]).backward()
    assert_close("gradient", results["gradient", "linear.weight"], model.linear.weight.grad, 1.0)


@pytest.mark.parametrize(
    ("model", "mark", "reason"),
    [
        (Branch(), "the item", "torch.where"),
        (Truth(), "the truth", "only an `if` statement"),
        (Select(), "the selection", "selected rows"),
        (Numpy(), "the array", "real values"),
        (Listed(), "the list", "torch.where"),
        (Loop(), "the loop", "torch.where"),
        (Rows(), "the rows", "iterated over"),
        (Prints(), "the print", "print outside the model"),
        (Steps(), "the backward", "return the loss"),
        (Mismatch(), "the mismatch", "[4, 6] X [4, 4]"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_what_cannot_be_traced_says_where_and_why(model: nn.Module, mark: str, reason: str) -> None:
    outer = nn.Sequential(nn.Identity(), model)
    with pytest.raises(TraceError) as caught:
        trace(outer, (torch.randn(6, 4),), device="cpu")
    message = str(caught.value)
    assert mark in message and reason in message, message
    assert "module '1" in message and f"{__file__}:" in message, message
    assert not torch.compiler._is_compiling_flag


class Remembers(nn.Module):
    state: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("state", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * (self.scale * self.state)
        self.state = y.detach().mean(0)
        return y.sum()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.LazyLinear(3), r"module '1' \(LazyLinear\).*call the model on one batch first"),
        (lambda: torch.jit.trace(nn.Linear(4, 3), torch.ones(1, 4)), "module '1' is TorchScript"),
        (Remembers, r"(?s)Sequential could not.*self.state.clone\(\)"),
    ],
    ids=["lazy", "scripted", "remembers"],
)
@pytest.mark.filterwarnings("ignore")
def test_modules_that_cannot_be_traced(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        trace(nn.Sequential(nn.Identity(), make()), (torch.randn(6, 4),), device="cpu")


def test_a_call_that_forward_does_not_take() -> None:
    with pytest.raises(TraceError, match=r"cannot be called so: too many positional arguments.*targets="):
        trace(nn.Linear(4, 2), (torch.randn(3, 4), torch.zeros(3)), device="cpu")
    with pytest.raises(TraceError, match=r"missing a required argument: 'input'; its forward is forward"):
        trace(nn.Linear(4, 2), (), {"inputs": torch.randn(3, 4)}, device="cpu")


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Conv1d(3, 2, 1))

    def forward(self, ids: torch.Tensor | None = None, rows: torch.Tensor | None = None) -> torch.Tensor:
        x = rows if ids is None else self.table(ids)
        return self.body(x).square().mean()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"ids": torch.rand(2, 3)},
            r"'table' \(Embedding\).*given input f32\[[2b], 3\] \(the input 'ids'\).*\.long\(\)",
        ),
        (
            {"rows": torch.ones(2, 3, 4, dtype=torch.int64)},
            r"'body.0' \(Linear\).*i64\[.*\(the input 'rows'\).*'body.0.weight'.*rows\.to\(torch\.float32\)",
        ),
        ({"rows": torch.rand(2, 3, 5)}, r"Linear was given input f32\[2, 3, 5\].*weight f32\[4, 4\]"),
    ],
    ids=["ids", "integers", "shape"],
)
def test_inputs_of_the_wrong_dtype_are_named(given: dict[str, torch.Tensor], says: str) -> None:
    with pytest.raises(TraceError, match=f"(?s){says}"):
        trace(Words(), (), given, device="cpu")


@pytest.mark.parametrize(("dtype", "said"), [(torch.int64, "i64"), (torch.float64, "f64")], ids=str)
def test_an_input_by_position_is_named_as_forward_names_it(dtype: torch.dtype, said: str) -> None:
    says = rf"{said}\[b, 4\] \(the input 'input'\).*'weight'.*input\.to\(torch\.float32\)"
    with pytest.raises(TraceError, match=says):
        trace(nn.Linear(4, 4), (torch.ones(2, 4, dtype=dtype),), device="cpu")


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64], ids=str)
def test_a_number_put_where_a_mask_says_is_converted(dtype: torch.dtype) -> None:
    class Filled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.clone()
            y[x > 0] = torch.tensor(2, dtype=dtype)
            return y

    Filled()(torch.ones(2, 4))
    trace(Filled(), (torch.ones(2, 4),), device="cpu")
