"""Compiled calls by kind and guards: found, explained, listed and bounded."""

from __future__ import annotations

import copy
import logging
from typing import Any, cast

import pytest
import torch
from torch import nn

import autopar
from autopar.runtime import module_hooks
from autopar.runtime.call import Call
from autopar.runtime.call_kind import kind_of, named_leaves
from autopar.runtime.programs import MANY, Programs


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(2, 2), nn.Dropout()
        self.beta = 1.0

    def forward(self, x: torch.Tensor, scale: float = 1.0, mask: torch.Tensor | None = None) -> torch.Tensor:
        return cast(torch.Tensor, self.linear(self.drop(x))) * scale


class BetaIs:
    def __init__(self, beta: float) -> None:
        self.beta = beta

    def changed(self, module: nn.Module) -> str | None:
        found = module.beta
        return None if found == self.beta else f"beta was {self.beta} and is {found}"


def call(programs: Programs, model: Gated, *args: Any, grad: bool = True, **kwargs: Any) -> tuple[Any, str]:
    """The program of a call, made if there is none, and why it was made."""
    kind = kind_of(model, args, kwargs, grad, "all")
    found = programs.find(kind)
    if found is not None:
        return found, ""
    leaves = named_leaves(model, args, kwargs, kind)
    why, made = programs.why(kind, leaves), cast(Call, object())
    programs.add(kind, leaves, made, why=why, guards=BetaIs(model.beta), planned=not why, seconds=2.0)
    return made, "; ".join(difference.text for difference in why)


def test_what_differs_is_named() -> None:
    model, x = Gated(), torch.zeros(4, 2)
    programs = Programs(model)
    first, _ = call(programs, model, x)
    assert call(programs, model, torch.ones(4, 2)) == (first, "")
    assert call(programs, model, x, 0.5)[1] == "the input 'scale' was not given and is 0.5"
    assert call(programs, model, x, 0.25)[1] == "the input 'scale' was 0.5 and is 0.25"
    assert call(programs, model, x, True)[1] == "the input 'scale' was 0.25 and is True"
    assert call(programs, model, x, 1)[1] == "the input 'scale' was True and is 1"
    assert call(programs, model, x, float("nan"))[1] == "the input 'scale' was 1 and is nan"
    assert call(programs, model, x, float("nan"))[1] == ""
    assert call(programs, model, x[:3])[1] == "the input 'x' was f32[4, 2] and is f32[3, 2]"
    assert call(programs, model, x.double())[1] == "the input 'x' was f32[3, 2] and is f64[4, 2]"
    assert "by position, by keyword" in call(programs, model, x=x.double())[1]
    assert call(programs, model, x=x, mask=x)[1] == "the input 'mask' was not given and is f32[4, 2]"
    assert call(programs, model, mask=x, x=x)[1] == ""
    assert call(programs, model, x, grad=False)[1] == "no gradients are wanted"
    model.drop.eval()
    assert call(programs, model, x)[1] == "drop is now in evaluation mode"
    model.train().linear.requires_grad_(False)
    assert call(programs, model, x)[1] == "linear.weight and 1 more are now frozen"
    with torch.autocast("cpu", torch.bfloat16):
        assert "autocast" in call(programs, model, x)[1]


def test_guards_choose_among_programs_of_one_kind() -> None:
    model, x = Gated(), torch.zeros(4, 2)
    programs = Programs(model)
    first, _ = call(programs, model, x)
    model.beta = 3.0
    second, why = call(programs, model, x)
    assert why == "beta was 1.0 and is 3.0" and second is not first
    assert call(programs, model, x) == (second, "")
    model.beta = 1.0
    assert call(programs, model, x) == (first, "")
    lines = programs.listing()
    assert [line.uses for line in lines] == [2, 2] and [line.planned for line in lines] == [True, False]
    assert str(lines[0]) == "training (gradients, all outputs) of x f32[4, 2]: used 2x, made in 2.0 s, planned"
    assert str(lines[1]).endswith("because beta was 1.0 and is 3.0")


def test_few_are_kept_and_the_planned_one_among_them() -> None:
    model = Gated()
    programs = Programs(model, kept=2)
    planned, _ = call(programs, model, torch.zeros(4, 2))
    calls = {size: call(programs, model, torch.zeros(size, 2))[0] for size in (5, 6)}
    assert call(programs, model, torch.zeros(5, 2))[0] is calls[5]
    call(programs, model, torch.zeros(7, 2))
    assert call(programs, model, torch.zeros(5, 2))[0] is calls[5], "used after 6, so 6 went"
    assert call(programs, model, torch.zeros(6, 2))[0] is not calls[6]
    assert call(programs, model, torch.zeros(4, 2))[0] is planned
    assert len(programs.listing()) == 3
    assert len(programs._by_kind) == 3, "nothing is kept of kinds whose programs went"


def test_hooks_are_numbered_while_they_are_there() -> None:
    model, before = Gated(), len(module_hooks._numbers)

    def number() -> int:
        kept = model.linear.register_forward_hook(lambda *_: None)
        (hook,) = kind_of(model, (), {}, True, "all").hooks
        assert kind_of(model, (), {}, True, "all").hooks == (hook,)
        kept.remove()
        return hook.number

    assert number() < number(), "another hook, though it may be where the first one was"
    assert len(module_hooks._numbers) == before


def test_the_kind_says_modes_and_parameters_in_torchs_order() -> None:
    model = nn.Sequential(Gated().eval(), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].linear.weight
    model[0].linear.bias.requires_grad_(False)
    kind = kind_of(model, (), {}, True, "all")
    assert kind.modes == tuple(module.training for module in model.modules())
    assert kind.wanted == tuple(parameter.requires_grad for parameter in model.parameters()) == (True, False)


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.linear(x)
        return {"loss": y.square().mean(), "y": y}


def test_inputs_that_want_a_gradient_after_a_loss_of_ones_own() -> None:
    model = Both()
    parallel, x = autopar.parallelize(copy.deepcopy(model), (1,)), torch.randn(4, 2)
    for _ in range(2):
        out = parallel(x)
        (out["loss"] + out["y"].sum()).backward()
    found, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
    for each, given in ((parallel, found), (model, expected)):
        out = each(given)
        (out["loss"] + out["y"].sum()).backward()
    torch.testing.assert_close(found.grad, expected.grad)


@pytest.mark.parametrize(("by_shape", "advice"), [(True, "pad it to one of a few shapes"), (False, "make it a tensor")])
def test_an_input_that_keeps_on_changing_is_warned_of(
    by_shape: bool, advice: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, name = Gated(), "x" if by_shape else "scale"
    programs = Programs(model)

    def vary(turn: int) -> None:
        call(programs, model, torch.zeros(turn + 1 if by_shape else 4, 2), 1.0 if by_shape else float(turn))

    with caplog.at_level(logging.INFO, "autopar.programs"):
        for turn in range(MANY):
            vary(turn)
        with pytest.warns(UserWarning, match=f"{MANY} programs were made because {name} changed .*{advice}"):
            vary(MANY)
    assert [record.levelname for record in caplog.records] == ["WARNING"] + ["INFO"] * (MANY - 1)
    assert f"because the input {name!r} was" in caplog.messages[0]
