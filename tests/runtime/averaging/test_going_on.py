"""Trainings that go on when a replica leaves, against the same in one process."""

from __future__ import annotations

import os
import signal
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar import DiLoCo, FaultError, Gossip, LocalSGD, Options, PowerSGD, TopK, checkpoint
from autopar.runtime import run_local
from tests.runtime.averaging.test_compression import CODES, choco, coded_mean, power_mean
from tests.runtime.averaging.test_diloco import OUTER, outer_steps
from tests.runtime.averaging.test_gossip import matrix, mixed, ring
from tests.runtime.averaging.test_local_sgd import mean_every
from tests.runtime.averaging.training import (
    Leaving,
    Normed,
    Weights,
    assert_same,
    batches,
    made,
    simulated,
    trained,
    whole,
)

PATIENCE = 30.0
# The exchange of the step at which a rank dies is without it.
AT_ONCE = Leaving(dies=4, missed=4, noticed=4)
SGD_OF_ONE = partial(torch.optim.SGD, lr=1.0)


def exponential(count: int, number: int) -> torch.Tensor:
    return matrix("exponential", count, number)


@pytest.mark.parametrize(
    "sync, mesh, reference, leaving",
    [
        (LocalSGD(every=2, patience=PATIENCE), (3,), lambda: mean_every(2), AT_ONCE),
        pytest.param(
            LocalSGD(every=2, patience=PATIENCE), (2,), lambda: mean_every(2), AT_ONCE, marks=pytest.mark.slow
        ),
        pytest.param(
            LocalSGD(every=2, patience=PATIENCE),
            (2,),
            lambda: mean_every(2),
            # Between two exchanges: the batch of the step after it is divided among both still.
            Leaving(dies=3, missed=3, noticed=4),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            LocalSGD(every=2, compression="int8", patience=PATIENCE),
            (3,),
            lambda: coded_mean(2, CODES["int8"][1]),
            AT_ONCE,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            DiLoCo(every=2, compression=TopK(0.1), patience=PATIENCE),
            (3,),
            lambda: coded_mean(2, CODES["top-k"][1], OUTER["default"][1]),
            AT_ONCE,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            LocalSGD(every=2, compression=PowerSGD(1), patience=PATIENCE),
            (3,),
            lambda: power_mean(2, 1),
            AT_ONCE,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            DiLoCo(every=2, patience=PATIENCE),
            (3,),
            lambda: outer_steps(2, 1, 0, 0.0, OUTER["default"][1]),
            AT_ONCE,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            # In flight: the exchange that began after step 4 and ends after step 6 is sent again at its end.
            LocalSGD(every=4, delay=2, mix=0.25, patience=PATIENCE),
            (3,),
            lambda: outer_steps(4, 1, 2, 0.25, SGD_OF_ONE),
            Leaving(dies=5, missed=4, noticed=6),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            DiLoCo(every=4, fragments=2, delay=1, patience=PATIENCE),
            (3,),
            lambda: outer_steps(4, 2, 1, 0.5, OUTER["default"][1]),
            Leaving(dies=5, missed=4, noticed=5),
            marks=pytest.mark.slow,
        ),
        pytest.param(Gossip("ring", patience=PATIENCE), (3,), lambda: mixed(1, ring), AT_ONCE, marks=pytest.mark.slow),
        pytest.param(
            Gossip("exponential", patience=PATIENCE),
            (4,),
            lambda: mixed(1, exponential),
            AT_ONCE,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Gossip("random", seed=5, patience=PATIENCE),
            (4,),
            lambda: mixed(1, lambda n, k: matrix("random", n, k, 5)),
            AT_ONCE,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Gossip(compression="int8", consensus=0.9, patience=PATIENCE),
            (4,),
            lambda: choco(1, CODES["int8"][1], 0.9),
            AT_ONCE,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_others_go_on_as_if_it_had_not_been_there(
    sync: Any, mesh: tuple[int, ...], reference: Any, leaving: Leaving
) -> None:
    data = batches(10, rows=12)
    found = trained(sync, mesh, data, leaving=leaving)
    expected = simulated(reference(), mesh[0], data, leaving=leaving)
    assert_same(found, expected, 1e-6 if isinstance(sync.compression, PowerSGD) else 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"zero": 3}, {"pins": {"middle.weight": "S(0)"}, "mesh_search": False}])
def test_a_replica_leaves_with_any_of_its_ranks(options: dict[str, Any]) -> None:
    """The second rank of two dies; the first ends with an error."""
    data, sync = batches(8, rows=12), LocalSGD(every=2, patience=PATIENCE)
    found = trained(sync, (3, 2), data, leaving=AT_ONCE, **options)
    assert_same(found, simulated(mean_every(2), 3, data, leaving=AT_ONCE))
    assert_same(found[:1], found[1:], 0.0)


@pytest.mark.slow
def test_running_statistics_are_those_of_the_replicas_that_are_left() -> None:
    data, sync = batches(8, rows=12), LocalSGD(every=2, patience=PATIENCE)
    found = trained(sync, (3,), data, Normed, leaving=AT_ONCE)
    assert_same(found, simulated(mean_every(2, buffers=True), 3, data, Normed, leaving=AT_ONCE))


@pytest.mark.slow
def test_a_replica_that_was_stopped_is_told_that_it_has_left() -> None:
    data = batches(8, rows=12)

    def work(rank: int, world: int) -> tuple[str, int, Weights]:
        model = autopar.parallelize(made(), (3,), data[0], options=Options(sync=LocalSGD(every=2, patience=8.0)))
        assert isinstance(model, autopar.ReplicaModule)
        optimizer = model.optimizer(torch.optim.AdamW, lr=0.01)
        said = ""
        try:
            for step, batch in enumerate(data, 1):
                optimizer.zero_grad()
                model.step(**batch)
                if (rank, step) == (2, 4):
                    own = os.getpid()
                    subprocess.Popen(["sh", "-c", f"sleep 16; kill -CONT {own}"], start_new_session=True)
                    os.kill(own, signal.SIGSTOP)
                optimizer.step()
        except FaultError as error:
            said = str(error)
        return said, model.replicas, whole(model)

    found = run_local(work, 3, timeout=120.0, backend="gloo")
    assert [said == "" for said, _, _ in found] == [True, True, False]
    assert "replica 2 of 3 has left, and the others have gone on without it since the exchange after" in found[2][0]
    assert "later than patience=8 seconds" in found[2][0]
    assert [count for _, count, _ in found] == [2, 2, 3]
    assert_same([each for _, _, each in found[:2]], simulated(mean_every(2), 3, data, leaving=AT_ONCE))


@pytest.mark.slow
def test_loaders_divide_later_batches_among_those_that_are_left() -> None:
    samples = [{"x": torch.full((5,), float(n)).double(), "y": torch.zeros(9).double()} for n in range(60)]
    sync = LocalSGD(every=2, patience=PATIENCE)

    def work(rank: int, world: int) -> tuple[list[list[float]], list[list[float]], float]:
        model = autopar.parallelize(made(), (3,), batches(rows=6)[0], options=Options(sync=sync))
        assert isinstance(model, autopar.ReplicaModule)
        optimizer = model.optimizer(torch.optim.AdamW, lr=0.01)
        loader, sampler = model.dataloader(samples, batch_size=6, shuffle=True, seed=1), model.sampler(samples, 6)
        seen, sampled = [], []
        for step, (batch, indices) in enumerate(zip(loader, sampler, strict=True), 1):
            joined = sampler.from_local(x=torch.stack([samples[i]["x"] for i in indices]))["x"]
            optimizer.zero_grad()
            loss = model.step(**batch)
            if (rank, step) == (1, 4):
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            seen.append(batch["x"].full_tensor()[:, 0].tolist())
            sampled.append(joined.full_tensor()[:, 0].tolist())
        return seen, sampled, float(model.average_loss(loss))

    first, gone, third = run_local(work, 3, timeout=120.0, backend="gloo", may_die=True)
    assert gone is None
    assert first[2] == third[2]
    for one, other in zip(first[:2], third[:2], strict=True):
        assert [len(each) for each in one] == [len(each) for each in other] == [2] * 4 + [3] * 6
        later = sorted(number for batch in (*one[4:], *other[4:]) for number in batch)
        assert len(set(later)) == 36
    order = torch.randperm(60, generator=torch.Generator().manual_seed(1)).tolist()
    assert sorted(number for batch in (*first[0][4:], *third[0][4:]) for number in batch) == sorted(order[24:])


@pytest.mark.slow
def test_those_that_are_left_save_for_any_number(tmp_path: Path) -> None:
    """As many replicas as were left go on to the bit; another number begins from the first's weights."""
    data, sync = batches(10, rows=12), DiLoCo(every=2, patience=PATIENCE)

    def train(model: Any, optimizer: Any, part: list[Any], rank: int = -1) -> None:
        for step, batch in enumerate(part, 1):
            optimizer.zero_grad()
            model.step(**batch)
            if (rank, step) == (0, 4):  # The replica of the first rank.
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()

    def start(replicas: int, plan: Any = None) -> tuple[Any, Any]:
        model = autopar.parallelize(made(), (replicas,), data[0], options=Options(sync=sync), plan=plan)
        return model, model.optimizer(torch.optim.AdamW, lr=0.01)

    def work(rank: int, world: int) -> tuple[Weights, Weights, str]:
        model, optimizer = start(3)
        train(model, optimizer, data[:7], rank)
        checkpoint.save(tmp_path, model, optimizer, step=7)
        saved = whole(model)
        train(model, optimizer, data[7:])
        return saved, whole(model), model.plan.to_json()

    gone, (saved, ended, plan), (_, other, _) = run_local(work, 3, timeout=120.0, backend="gloo", may_die=True)
    assert gone is None
    assert_same([ended], [other], 0.0)

    def resume(rank: int, world: int) -> Weights:
        model, optimizer = start(2, autopar.Plan.from_json(plan))
        assert checkpoint.load(tmp_path, model, optimizer).step == 7
        train(model, optimizer, data[7:])
        return whole(model)

    assert_same(run_local(resume, 2, timeout=120.0, backend="gloo"), [ended, ended])
    plain = made()
    checkpoint.load(tmp_path, plain)
    assert_same([dict(plain.state_dict())], [saved], 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("seconds", [0.0, 0.02, 0.05, 0.1, 0.2])
def test_a_loss_in_the_middle_of_a_save_is_a_warning(seconds: float, asynchronous: bool, tmp_path: Path) -> None:
    data, sync = batches(12, rows=12), LocalSGD(every=2, patience=PATIENCE)

    def work(rank: int, world: int) -> Weights:
        model = autopar.parallelize(made(), (3,), data[0], options=Options(sync=sync))
        optimizer = model.optimizer(torch.optim.AdamW, lr=0.01)
        with checkpoint.Checkpointer(tmp_path, model, optimizer, every=3, asynchronous=asynchronous) as checkpointer:
            for step, batch in enumerate(data, 1):
                optimizer.zero_grad()
                model.step(**batch)
                optimizer.step()
                if (rank, step) == (1, 6):
                    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -KILL {os.getpid()}"], start_new_session=True)
                checkpointer.step(step)
        return whole(model)

    first, _, third = run_local(work, 3, timeout=120.0, backend="gloo", may_die=True)
    assert_same([first], [third], 0.0)
    plain = made()
    assert checkpoint.load(tmp_path, plain).step == 12
    assert_same([dict(plain.state_dict())], [first], 0.0)
