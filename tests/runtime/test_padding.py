"""Options(last_batch="pad"): a smaller batch runs the planned program, and gives what eager execution does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from tests.helpers.planning import on, slow_devices

SIZES = (8, 5, 3, 8, 1, 9)


class Sequences(nn.Module):
    """Attention within each row; what it returns besides has rows along dim 1, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(20, 8), nn.Linear(8, 24)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(ids) + mask[:, :, None]
        q, k, v = self.mix(x).chunk(3, -1)
        x = self.norm(x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return {"scores": self.head(x).flatten(0, 1), "turned": x.transpose(0, 1), "weight": self.norm.weight * 2}


def loss_of(out: dict[str, torch.Tensor]) -> torch.Tensor:
    return out["scores"].logsumexp(-1).mean() + out["turned"].square().mean() + out["weight"].sum()


def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(rows)
    return torch.randint(0, 20, (rows, 6), generator=made), torch.randn(rows, 6, generator=made)


@pytest.mark.parametrize("ranks", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4))])
def test_smaller_batches_are_those_of_one_device(ranks: int) -> None:
    def work(rank: int, world: int) -> int:
        torch.manual_seed(0)
        net = Sequences()
        reference = copy.deepcopy(net)
        mesh = (2, 2) if world == 4 else (world,)
        model = autopar.parallelize(net, mesh, options=autopar.Options(last_batch="pad"), cluster=slow_devices())
        for rows in SIZES:
            for network in (model, reference):
                network.zero_grad()
            found, wanted = model(*batch(rows)), reference(*batch(rows))
            assert {k: v.shape for k, v in found.items()} == {k: v.shape for k, v in wanted.items()}
            torch.testing.assert_close(found, wanted)
            loss_of(found).backward()
            loss_of(wanted).backward()
            for name, parameter in reference.named_parameters():
                gradient = model.get_parameter(name).grad
                assert gradient is not None
                torch.testing.assert_close(model.full_tensor(gradient), parameter.grad, rtol=1e-5, atol=1e-6)
        model.eval()
        with torch.no_grad():
            for rows in (5, 8, 2):
                torch.testing.assert_close(model(*batch(rows)), reference(*batch(rows)))
        return len(model.programs())

    # Training, evaluation, and those of one row and of more than planned.
    assert on(ranks, work) == [4] * ranks


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.up(x), 0.5)


def test_random_numbers_are_those_of_the_smaller_batch() -> None:
    made = []
    for how in ("pad", "replicate"):
        torch.manual_seed(3)
        options = autopar.Options(last_batch=how, seed=7)
        model = autopar.parallelize(Dropped(), (1,), options=options, cluster=slow_devices())
        model(torch.ones(8, 6))
        made.append(model(torch.ones(5, 6)).detach())
        assert len(model.programs()) == (1 if how == "pad" else 2)
    torch.testing.assert_close(made[0], made[1])


class Counted(nn.Module):
    """``how`` rows influence each other."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.up, self.norm = how, nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.up(x)
        if self.how == "norm":
            return self.norm(y)
        if self.how == "mean":
            return y - x.mean(0)
        if self.how == "size":
            return y / x.shape[0]
        if self.how == "ones":
            return y / x.new_ones(x.shape[0]).sum()
        return {"scores": y, "loss": y.square().mean()}


class Pictures(nn.Module):
    """Group norm has statistics of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.first(x)).relu().mean((2, 3)))


def test_group_norm_is_padded() -> None:
    torch.manual_seed(0)
    net = Pictures()
    reference, options = copy.deepcopy(net), autopar.Options(last_batch="pad")
    model = autopar.parallelize(net, (1,), options=options, cluster=slow_devices())
    x = torch.randn(8, 3, 6, 6)
    for rows in (8, 5):
        found, wanted = model(x[:rows]), reference(x[:rows])
        torch.testing.assert_close(found, wanted)
        found.square().sum().backward()
        wanted.square().sum().backward()
    assert len(model.programs()) == 1
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad.to_local(), parameter.grad, rtol=1e-5, atol=1e-5)


WORDS = {
    "norm": "in norm",
    "mean": "computed from all rows together",
    "size": "size of the batch",
    "ones": "size of the batch",
    "loss": "output ['loss'] is computed from all rows",
}


@pytest.mark.parametrize("how", WORDS)
def test_rows_that_influence_each_other_are_refused(how: str) -> None:
    options = autopar.Options(last_batch="pad")
    model = autopar.parallelize(Counted(how), (1,), options=options, cluster=slow_devices())
    model(torch.randn(8, 6))
    before = model.norm.num_batches_tracked.clone()
    with pytest.raises(autopar.AutoparError, match=r"last_batch=\"pad\" would change.*replicate") as raised:
        model(torch.randn(5, 6))
    assert WORDS[how] in str(raised.value)
    torch.testing.assert_close(model.norm.num_batches_tracked, before)


def test_a_step_of_fewer_rows_is_refused() -> None:
    options = autopar.Options(last_batch="pad")
    model = autopar.parallelize(Counted("loss"), (1,), options=options, cluster=slow_devices())
    model.step(torch.randn(8, 6))
    with pytest.raises(autopar.AutoparError, match="this step has 5 rows, the plan has 8"):
        model.step(torch.randn(5, 6))
