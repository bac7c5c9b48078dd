"""Hooks on modules of a parallel model: honoured, said to be traced, or refused."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations, parametrize, weight_norm

import autopar
from autopar.errors import AutoparError

warnings.filterwarnings("ignore", message=".*weight_norm", category=FutureWarning)


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 6))


def doubled(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return 2 * output


def mean_loss(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def gradient(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    mean_loss(model(batch)).backward()
    found = next(model.parameters()).grad
    assert found is not None
    return getattr(found, "full_tensor", lambda: found)()  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_hooks_on_the_model_run_at_every_call() -> None:
    plain, reference, batch, seen = make(), make(), torch.randn(4, 6), list[tuple[Any, ...]]()

    def note(module: nn.Module, *what: Any) -> None:
        seen.append(tuple(type(one).__name__ for one in what))

    def negated(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return (-args[0],), kwargs

    first = plain.register_forward_hook(doubled)
    reference.register_forward_hook(doubled)
    for model in (plain, reference):
        model.register_forward_pre_hook(negated, with_kwargs=True)
        model.register_full_backward_hook(note)
    parallel = autopar.parallelize(plain, 1)
    later = parallel.register_forward_hook(note)
    for _ in range(2):
        torch.testing.assert_close(gradient(parallel, batch), gradient(reference, batch))
    assert len(seen) == 2 + 2 * 2 and seen[0] == ("tuple", "Tensor")
    with pytest.raises(AutoparError, match=r"step\(\) computes the loss alone, but the forward hook doubled"):
        parallel.step(batch)
    later.remove()
    assert len(parallel._forward_hooks) == 1
    first.remove()
    assert not parallel._forward_hooks


def test_inputs_of_a_step_pass_through_hooks() -> None:
    plain, batch = make(), torch.randn(4, 6)
    parallel = autopar.parallelize(plain, 1, loss_fn=mean_loss)
    wanted = parallel.step(-batch)
    parallel.register_forward_pre_hook(lambda module, args: -args[0])
    torch.testing.assert_close(parallel.step(batch), wanted)


def test_forward_hooks_inside_are_part_of_the_program_and_come_and_go() -> None:
    plain, reference, batch = make(), make(), torch.randn(4, 6)
    parallel = autopar.parallelize(plain, 1)
    torch.testing.assert_close(gradient(parallel, batch), gradient(reference, batch))
    handles = [model[0].register_forward_hook(doubled) for model in (parallel.module, reference)]  # type: ignore[index]
    with pytest.warns(UserWarning, match=r"forward hook doubled of 0 \(Linear\).*return it from forward"):
        found = gradient(parallel, batch)
    torch.testing.assert_close(found, gradient(reference, batch))
    for handle in handles:
        handle.remove()
    torch.testing.assert_close(gradient(parallel, batch), gradient(reference, batch))
    assert "doubled of 0 (Linear) was registered" in str(parallel.programs()[1])
    assert len(parallel.programs()) == 2


def test_backward_hooks_inside_are_refused() -> None:
    def clipped(module: nn.Module, inputs: Any, outputs: Any) -> None:
        return None

    plain = make()
    handle = plain[0].register_full_backward_hook(clipped)
    with pytest.raises(AutoparError, match=r"backward hook .*clipped of 0 \(Linear\) would not run"):
        autopar.parallelize(plain, 1)
    handle.remove()
    parallel = autopar.parallelize(plain, 1)
    parallel(torch.randn(4, 6))
    plain[2].register_full_backward_pre_hook(clipped)
    with pytest.raises(AutoparError, match=r"backward pre hook .*clipped of 2 \(Linear\) would not run"):
        parallel(torch.randn(4, 6))


def test_a_hook_on_every_module_is_warned_of() -> None:
    handle = register_module_forward_hook(lambda *_: None)
    try:
        parallel = autopar.parallelize(make(), 1)
        with pytest.warns(UserWarning, match="of every module runs only while a program is compiled"):
            parallel(torch.randn(4, 6))
    finally:
        handle.remove()


@pytest.mark.parametrize("kind", ["parametrization", "hook", "own"])
def test_parametrized_weights_train_without_a_word(kind: str) -> None:
    class Symmetric(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.triu() + x.triu(1).T

    models = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 5), nn.Tanh())
        if kind == "parametrization":
            parametrizations.weight_norm(model[0])
        elif kind == "hook":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                weight_norm(model[0])
        else:
            parametrize.register_parametrization(model[0], "weight", Symmetric())
        models.append(model)
    batch = torch.randn(4, 5)
    parallel = autopar.parallelize(models[0], 1, loss_fn=mean_loss)
    parallel.step(batch)
    mean_loss(models[1](batch)).backward()
    for (name, found), wanted in zip(parallel.named_parameters(), models[1].parameters(), strict=True):
        assert found.grad is not None
        torch.testing.assert_close(found.grad.full_tensor(), wanted.grad, msg=lambda m, n=name: f"{n}: {m}")
