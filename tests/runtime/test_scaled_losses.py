"""``loss = model(...)`` whose multiples, means and sums are differentiated, against the plain model; with microbatches
and stages too, where backward has run before the factor is known."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.runtime import run_local

TOLERANCE = 1e-5
Loss = Callable[[torch.Tensor], torch.Tensor]
LOSSES: tuple[Loss, ...] = (
    lambda loss: loss / 3,
    lambda loss: loss.mean(),
    lambda loss: loss * 0.7 + torch.tensor(0.3, requires_grad=True).square(),
    lambda loss: -2.5 * loss.sum() + loss.square(),
)
PLANS = {
    "one program": autopar.Options(),
    "microbatches": autopar.Options(stages=1, microbatches=3),
    "stages": autopar.Options(stages=2, microbatches=3),
    "stages under bf16": autopar.Options(stages=2, microbatches=3, precision="bf16"),
}


class Classifier(nn.Module):
    """A tied weight, a buffer that every call changes, and an output beside the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(7, 12), nn.Linear(12, 12), nn.Linear(12, 7, bias=False)
        self.again = nn.Linear(12, 12)
        self.again.weight = self.middle.weight
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.again(torch.tanh(self.middle(torch.tanh(self.first(x)))))
        logits = self.last(hidden)
        self.seen += 1
        return {"loss": nn.functional.cross_entropy(logits, y), "logits": logits}


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(n, 7, generator=generator), torch.randint(7, (n,), generator=generator)) for n in (12, 12, 6, 12)
    ]


def pair(options: autopar.Options, world: int) -> tuple[Classifier, Any]:
    torch.manual_seed(0)
    reference = Classifier()
    mesh = init_device_mesh("cpu", (world,))
    return reference, autopar.parallelize(copy.deepcopy(reference), mesh, options=options)


def largest_error(reference: nn.Module, model: Any) -> float:
    errors = [0.0]
    for name, parameter in reference.named_parameters():
        found = model.full_tensor(model.get_parameter(name).grad)
        wanted = parameter.grad
        assert wanted is not None
        errors.append(float((found - wanted).abs().max() / wanted.abs().max()))
    return max(errors)


@pytest.mark.parametrize(
    ("plan", "world"),
    [
        ("one program", 2),
        ("microbatches", 2),
        ("stages", 2),
        pytest.param("stages", 4, marks=pytest.mark.slow),
        pytest.param("stages under bf16", 2, marks=pytest.mark.slow),
    ],
)
def test_gradients_of_scaled_losses_add_up_as_on_one_device(plan: str, world: int) -> None:
    """Four passes of one step, each with another loss of the model's loss, and one smaller batch."""

    def work(rank: int, world: int) -> float:
        reference, model = pair(PLANS[plan], world)
        half = PLANS[plan].precision == "bf16"
        for scaled, batch in zip(LOSSES, batches(), strict=True):
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                wanted = scaled(reference(*batch)["loss"].float())
            wanted.backward()
            out = model(*batch)
            found = scaled(out["loss"].float())
            found.backward()
            assert out["logits"].shape == (len(batch[0]), 7)
            torch.testing.assert_close(found, wanted, rtol=2e-2 if half else TOLERANCE, atol=1e-6)
        assert model.get_buffer("seen") == reference.seen
        return largest_error(reference, model)

    bound = 5e-2 if PLANS[plan].precision == "bf16" else TOLERANCE
    assert max(run_local(work, world, timeout=200, backend="gloo")) <= bound


def test_losses_of_several_calls_are_added_before_backward() -> None:
    def work(rank: int, world: int) -> float:
        reference, model = pair(PLANS["stages"], world)
        one, other = batches()[:2]
        (reference(*one)["loss"] * 2 - reference(*other)["loss"] / 3).backward()
        (model(*one)["loss"] * 2 - model(*other)["loss"] / 3).backward()
        model(*one)  # Nothing is added without backward().
        return largest_error(reference, model)

    assert max(run_local(work, 2, timeout=200, backend="gloo")) <= TOLERANCE


def test_what_microbatches_cannot_differentiate_is_said() -> None:
    def work(rank: int, world: int) -> None:
        _, model = pair(PLANS["stages"], world)
        batch = batches()[0]
        out = model(*batch)
        with pytest.raises(autopar.AutoparError, match=r"arrived at output \['logits'\]: .* loss_fn"):
            (out["loss"] + out["logits"].square().mean()).backward()
        loss = model(*batch)["loss"]
        loss.backward(retain_graph=True)
        with pytest.raises(autopar.AutoparError, match="gone after the first backward"):
            loss.backward()
        with pytest.raises(autopar.AutoparError, match=r"requires a gradient"):
            model(batch[0].clone().requires_grad_(), batch[1])
        with torch.no_grad():
            assert not model(*batch)["loss"].requires_grad

    run_local(work, 2, timeout=200, backend="gloo")


def test_gradients_that_overflow_under_fp16_are_dropped() -> None:
    """Of the passes of one step the last overflows by its factor, which is known after the others were scaled."""

    def work(rank: int, world: int) -> tuple[bool, bool, float]:
        options = autopar.Options(stages=2, microbatches=3, precision="fp16")
        reference, model = pair(options, world)
        batch = batches()[0]
        held = model(*batch)["loss"]
        (model(*batch)["loss"] * math.inf).backward()
        held.backward()
        dropped = model.overflowed and all(p.grad is None for p in model.parameters())
        model.zero_grad()
        held = model(*batch)["loss"]
        (held / 3).backward()
        with torch.autocast("cpu", torch.float16):
            (reference(*batch)["loss"] / 3).backward()
        return dropped, model.overflowed, largest_error(reference, model)

    for dropped, overflowed, error in run_local(work, 2, timeout=200, backend="gloo"):
        assert dropped and not overflowed and error < 1e-2


def test_values_are_checked_where_backward_begins() -> None:
    def work(rank: int, world: int) -> None:
        options = autopar.Options(stages=2, microbatches=3, check_every=1, nonfinite="skip")
        reference, model = pair(options, world)
        batch = batches()[0]
        (model(*batch)["loss"] * math.nan).backward()
        assert all(p.grad is None for p in model.parameters())
        assert model.get_buffer("seen") == 0
        (model(*batch)["loss"] / 3).backward()
        (reference(*batch)["loss"] / 3).backward()
        assert largest_error(reference, model) <= TOLERANCE

    run_local(work, 2, timeout=200, backend="gloo")
