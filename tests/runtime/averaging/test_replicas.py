"""What a user sees of replicas: rows, random numbers, copies, buffers, optimizers, and others that leave."""

from __future__ import annotations

import copy
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import autopar
from autopar import DiLoCo, FaultError, Gossip, LocalSGD, Options
from autopar.runtime import run_local
from autopar.runtime.averaging.mean import WholeMean
from autopar.runtime.averaging.pending import Pending
from tests.runtime.averaging.test_local_sgd import mean_every
from tests.runtime.averaging.training import Normed, Tied, adam, assert_same, batches, made, simulated, trained


def on_two(work: Any) -> list[Any]:
    return run_local(work, 2, timeout=120.0, backend="gloo")


def test_an_optimizer_of_the_users_exchanges_too() -> None:
    found = trained(LocalSGD(every=2), (2,), data := batches(4), own_optimizer=True)
    assert_same(found, simulated(mean_every(2), 2, data))
    assert_same(found[:1], found[1:], 0.0)


@pytest.mark.slow
def test_running_statistics_take_the_mean() -> None:
    found = trained(LocalSGD(every=2), (2,), data := batches(5, rows=8), Normed)
    assert_same(found, simulated(mean_every(2, buffers=True), 2, data, Normed))


@pytest.mark.slow
def test_sixteen_bits_are_averaged_in_thirty_two() -> None:
    def kind() -> nn.Module:
        return Tied(torch.bfloat16)

    data = batches(6, dtype=torch.bfloat16)
    found = trained(LocalSGD(every=2), (2,), data, kind)
    assert_same(found[:1], found[1:], 0.0)
    assert all(value.dtype == torch.bfloat16 for value in found[0].values())

    def exchange(models: list[nn.Module], step: int) -> None:
        if step % 2 == 0:
            for group in zip(*(model.parameters() for model in models), strict=True):
                mean = torch.stack([own.float() for own in group]).mean(0)
                for own in group:
                    own.copy_(mean)

    assert_same(found, simulated(exchange, 2, data, kind), 2e-2)


def test_rows_losses_and_evaluation() -> None:
    """Training takes the replica's rows, evaluation all; the loss of all is the mean of the replicas'."""
    data = batches(1, rows=6)[0]

    def work(rank: int, world: int) -> tuple[float, float, float, Any]:
        model = autopar.parallelize(made(), (2,), data, options=Options(sync=Gossip()))
        assert isinstance(model, autopar.ReplicaModule)
        assert (model.replica, model.replicas) == (rank, 2)
        loss = model.step(**data)
        with torch.no_grad():
            everything = model(**data)
        own = model(**data)  # with gradients
        torch.testing.assert_close(own.detach(), loss)
        return float(loss.detach()), float(everything), float(model.average_loss(loss)), model.own_rows(data["x"])

    plain, found = made(), on_two(work)
    for rank, (loss, everything, mean, rows) in enumerate(found):
        own = {name: value.tensor_split(2)[rank] for name, value in data.items()}
        assert loss == pytest.approx(float(plain(**own).detach()))
        assert everything == pytest.approx(float(plain(**data).detach())) == pytest.approx(mean)
        assert torch.equal(rows, own["x"])


class Dropping(nn.Module):
    """Half of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(x * self.weight).sum()


def test_replicas_draw_as_trainings_with_the_seeds_that_follow() -> None:
    rows = torch.ones(2, 16)

    def replica(rank: int, world: int) -> torch.Tensor:
        model = autopar.parallelize(Dropping(), (2,), (rows,), options=Options(sync=LocalSGD(every=9), seed=7))
        model.step(rows)
        return model.full_tensor(next(model.parameters()).grad)

    found = on_two(replica)
    for rank, gradient in enumerate(found):
        one = autopar.parallelize(Dropping(), (1,), (rows[:1],), options=Options(seed=7 + rank))
        one.step(rows[:1])
        torch.testing.assert_close(gradient, one.full_tensor(next(one.parameters()).grad))
    assert not torch.equal(*found)


@pytest.mark.slow
def test_loaders_give_a_replica_its_own_samples() -> None:
    samples = [{"x": torch.full((5,), float(n)).double(), "y": torch.zeros(9).double()} for n in range(14)]

    def work(rank: int, world: int) -> list[list[float]]:
        model = autopar.parallelize(made(), (2, 2), batches(rows=6)[0], options=Options(sync=LocalSGD(every=2)))
        loader = model.dataloader(samples, batch_size=6, shuffle=True, seed=1)
        seen = []
        for batch in loader:
            model.step(**batch)
            seen.append(batch["x"].full_tensor()[:, 0].tolist())
        sampler = model.sampler(samples, 6)
        own = [model.full_tensor(sampler.from_local(x=samples[i[0]]["x"][None])["x"]).shape[0] for i in sampler][:2]
        assert own == [2, 2]
        return seen

    found = run_local(work, 4, timeout=120.0, backend="gloo")
    assert found[0] == found[1] and found[2] == found[3]
    assert [len(first) + len(second) for first, second in zip(found[0], found[2], strict=True)] == [6, 6, 2]
    assert sorted(number for batch in found[0] + found[2] for number in batch) == [float(n) for n in range(14)]


@pytest.mark.slow
def test_a_copy_takes_no_part() -> None:
    data = batches(2)

    def work(rank: int, world: int) -> None:
        model = autopar.parallelize(made(), (2,), data[0], options=Options(sync=LocalSGD(every=1)))
        apart = copy.deepcopy(model)
        if rank == 0:  # The other would have to join an exchange.
            optimizer = adam(apart.parameters())
            apart.step(**data[0])
            optimizer.step()
            with pytest.raises(autopar.AutoparError, match="takes no part"):
                apart.average_loss(torch.ones(()))

    on_two(work)


def test_who_loses_the_others_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    data = batches(1)[0]
    model = autopar.parallelize(made(), (1,), data, options=Options(sync=DiLoCo(every=1)))
    optimizer = model.optimizer(torch.optim.AdamW, lr=0.01)
    model.step(**data)

    def broken(*_: Any) -> Any:
        raise RuntimeError("Connection closed by peer [127.0.0.1]:1234")

    work = Mock(**{"wait.side_effect": broken, "is_completed.return_value": False})

    monkeypatch.setattr(WholeMean, "start", lambda *_: lambda _peers: Pending([work], dict))
    with pytest.raises(FaultError, match="replica 0 of 1 lost the others in the exchange after optimizer step 1: Conn"):
        optimizer.step()


def test_few_rows_are_an_error_before_anything_runs() -> None:
    def work(rank: int, world: int) -> str:
        model = autopar.parallelize(made(), (2,), options=Options(sync=LocalSGD(every=2)))
        with pytest.raises(autopar.OptionsError) as error:
            model.step(**batches(1, rows=1)[0])
        return str(error.value)

    assert all("a batch of 1 row for 2 replicas" in said for said in on_two(work))
