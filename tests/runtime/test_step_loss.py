"""``model.step(...).backward()``, as people write it out of habit."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch

import autopar
from tests.helpers.models import Plain, plain


@pytest.mark.parametrize(
    "scaled",
    [
        lambda loss: loss,
        lambda loss: loss / 3,
        lambda loss: 0.5 * loss.mean() + 1,
        lambda loss: (loss * torch.tensor(2.0) + loss).sum(),
    ],
)
def test_backward_of_a_step_says_that_it_ran(scaled: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model = autopar.parallelize(Plain(), (1,))
    loss = scaled(model.step(*plain()[1]))
    with pytest.raises(autopar.AutoparError, match=r"run backward already .* call optimizer.step\(\)"):
        loss.backward()
    assert model.get_parameter("up.weight").grad is not None


def test_the_loss_is_a_plain_tensor_in_all_else() -> None:
    model = autopar.parallelize(Plain(), (1,))
    loss = model.step(*plain()[1])
    assert not loss.requires_grad and float(loss) == loss.item() and repr(loss).startswith("tensor(")
    assert all(type(made) is torch.Tensor for made in (loss.detach(), loss.exp(), torch.stack([loss, loss])))
    total = torch.zeros(())
    kept = total
    total += loss
    assert total is kept and type(total) is torch.Tensor and total == loss
    own = (loss + torch.ones((), requires_grad=True)) * 2
    own.backward()  # What is computed from it has an ordinary backward().


def test_copies_and_files_of_the_loss_are_plain() -> None:
    loss = autopar.parallelize(Plain(), (1,)).step(*plain()[1])
    file = io.BytesIO()
    torch.save({"loss": loss}, file)
    file.seek(0)
    kept = torch.load(file, weights_only=True)["loss"]
    for made in (kept, copy.deepcopy(loss), copy.copy(loss)):
        assert torch.equal(made, loss) and type(made) is torch.Tensor
