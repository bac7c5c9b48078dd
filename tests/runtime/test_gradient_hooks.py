"""Hooks on the gradients of parameters, registered before and after ``parallelize``, against the plain model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar.errors import AutoparError
from autopar.runtime import ParallelModule, run_local
from tests.helpers.runtime_tiny import HIDDEN, Tiny
from tests.runtime.test_parallel_module import check_gradients, on_mesh, whole


def hook(model: nn.Module, seen: list[torch.Tensor]) -> list[Any]:
    """Hooks as users write them: a plain mask, a norm, a tied weight, and one that watches."""
    mask = (torch.arange(HIDDEN) % 3 > 0).float().unsqueeze(1)
    named = dict(model.named_parameters())
    named["down.weight"].register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))  # type: ignore[arg-type]
    return [
        named["up.weight"].register_hook(lambda g: g * mask),
        named["up.bias"].register_hook(lambda g: g / (g.norm() + 1)),
        named["down.weight"].register_hook(lambda g: seen.append(g.clone())),  # type: ignore[func-returns-value]
    ]


@pytest.mark.parametrize("shape", [(1, 1), (2, 2)])
@pytest.mark.filterwarnings("ignore:While redistributing")
def test_hooks_do_what_they_do_on_one_device(shape: tuple[int, int]) -> None:
    def work(model: ParallelModule, reference: Tiny, batch: torch.Tensor, mesh: DeviceMesh) -> None:
        ours: list[torch.Tensor] = []
        theirs: list[torch.Tensor] = []
        handles = list(zip(hook(model, ours), hook(reference, theirs), strict=True))
        for turn in range(3):
            if turn == 1:
                model.step(batch)
            else:
                model(batch)["loss"].backward()
            reference(batch)["loss"].backward()
            check_gradients(model, reference)
            for handle in handles.pop() if turn else ():
                handle.remove()
        assert len(ours) == len(theirs) == 5  # Three times after accumulation, twice before.
        for found, wanted in zip(ours[:2], theirs[:2], strict=True):
            torch.testing.assert_close(whole(found), wanted)

    on_mesh(shape, work)


@pytest.mark.parametrize("options", [autopar.Options(stages=1), autopar.Options(stages=2, microbatches=2)], ids=str)
def test_hooks_from_before_go_with_the_parameters(options: autopar.Options) -> None:
    def work(rank: int, world: int) -> None:
        torch.manual_seed(0)
        model, reference = (nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 6)) for _ in range(2))
        reference.load_state_dict(model.state_dict())
        counts: dict[str, int] = {"ours": 0, "theirs": 0}
        for side, name in ((model, "ours"), (reference, "theirs")):
            mask = torch.arange(4.0).unsqueeze(1)
            side[0].weight.register_hook(lambda g, mask=mask: g * mask)
            side[2].bias.register_hook(lambda g: g.clamp(-0.01, 0.01))

            def count(_: torch.Tensor, name: str = name) -> None:
                counts[name] += 1

            side[2].weight.register_post_accumulate_grad_hook(count)
        parallel = autopar.parallelize(model, (2,), options=options, loss_fn=lambda out: out.square().mean())
        batch = torch.randn(8, 6)
        for _ in range(2):
            parallel.step(batch)
            reference(batch).square().mean().backward()
        for (name, found), wanted in zip(parallel.named_parameters(), reference.parameters(), strict=True):
            gradient = parallel.full_tensor(found.grad)  # type: ignore[arg-type]
            torch.testing.assert_close(gradient, wanted.grad, msg=lambda m, n=name: f"{n}: {m}")
        assert counts == {"ours": 2, "theirs": 2}

    run_local(work, 2, timeout=120)


def test_a_hook_that_returns_another_shape_is_named() -> None:
    def work(model: ParallelModule, reference: Tiny, batch: torch.Tensor, mesh: DeviceMesh) -> None:
        def first_row(gradient: torch.Tensor) -> torch.Tensor:
            return gradient[0]

        model.get_parameter("down.weight").register_hook(first_row)
        with pytest.raises(AutoparError, match=r"hook .*first_row on a parameter returned shape \[7\]"):
            model.step(batch)

    on_mesh((1, 1), work)
