"""``model.step(...).backward()``, as people write it out of habit."""

from __future__ import annotations

import copy
import io

import pytest
import torch

import autopar
from tests.helpers.models import Plain, plain


def test_backward_of_a_step_says_that_it_ran() -> None:
    model = autopar.parallelize(Plain(), (1,))
    loss = model.step(*plain()[1])
    with pytest.raises(autopar.AutoparError, match=r"run backward already .* call optimizer.step\(\)"):
        loss.backward()
    assert model.get_parameter("up.weight").grad is not None


def test_the_loss_is_a_plain_tensor_in_all_else() -> None:
    model = autopar.parallelize(Plain(), (1,))
    loss = model.step(*plain()[1])
    assert type(loss) is torch.Tensor and not loss.requires_grad and float(loss) == loss.item()
    own = (loss + torch.ones((), requires_grad=True)) * 2
    own.backward()  # What is computed from it has an ordinary backward().
    file = io.BytesIO()
    torch.save({"loss": loss}, file)
    file.seek(0)
    kept = torch.load(file, weights_only=True)["loss"]
    assert torch.equal(kept, loss) and not kept.__dict__
    assert torch.equal(copy.deepcopy(loss), loss)
