"""Samples that each rank reads for itself: joined to the global batch, taken as plans want them, and sampled."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import autopar
from autopar.ir.placements import parse_placements, take_local
from autopar.runtime import ParallelModule
from autopar.runtime.comm.exchange import Exchange
from autopar.runtime.comm.groups import mesh_groups
from autopar.runtime.inputs.rank_local import join, own_part, whole
from autopar.runtime.inputs.sampler import GlobalBatchSampler, shares
from tests.helpers.marks import needs_groups_in_order
from tests.helpers.planning import gradients_of, on, slow_devices

PLACEMENTS = [
    "R,R", "S(0),R", "R,S(0)", "S(0),S(0)", "S(1),R", "R,S(1)", "S(0),S(1)", "S(1),S(0)", "S(1),S(1)", "S(0/2),R",
    "S(0),S(0/4)", "S(0/2),S(1)",
]  # fmt: skip


def test_a_program_gets_the_parts_it_wants_of_what_ranks_read() -> None:
    """Even and uneven shares, on meshes that were laid out anew since the batch was read."""

    def work(rank: int, world: int) -> None:
        read_on, runs_on = mesh_groups(init_device_mesh("cpu", (4,))), mesh_groups(init_device_mesh("cpu", (2, 2)))
        for sizes in ((4, 4, 4, 4), (3, 5, 0, 8), (1, 1, 1, 1), (0, 0, 0, 0)):
            total = sum(sizes)
            batch = torch.randn(total, 6, generator=torch.Generator().manual_seed(1))
            ids = torch.arange(total)
            begin, end = sum(sizes[:rank]), sum(sizes[: rank + 1])
            for groups in (read_on, runs_on):
                leaves = [batch[begin:end], 3, ids[begin:end], torch.tensor(2.0)]
                names = ["x", "scale", "ids", "weight"]
                x, scale, y, weight = join(names, leaves, groups, Exchange(groups))
                assert (scale, float(weight)) == (3, 2.0) and not isinstance(weight, DTensor)
                assert x.shape == batch.shape and y.dtype == ids.dtype and x.device_mesh == groups.mesh
                for text in PLACEMENTS:
                    wanted = parse_placements(text)
                    if total % 16 and "/" in text:
                        continue
                    found = own_part(x, wanted, runs_on)
                    assert found is not None
                    torch.testing.assert_close(found, take_local(batch, wanted, (2, 2), runs_on.coordinate), msg=text)
                torch.testing.assert_close(whole(y, runs_on), ids)

    on(4, work)


@needs_groups_in_order
def test_ragged_samples_are_joined_in_the_order_of_a_transposed_mesh() -> None:
    def work(rank: int, world: int) -> None:
        groups = mesh_groups(DeviceMesh("cpu", torch.arange(4).reshape(2, 2).t().contiguous()))
        own = torch.full(((2, 3, 1, 2)[rank],), rank + 1)
        (x,) = join(["x"], [own], groups, Exchange(groups))
        assert whole(x, groups).tolist() == [1, 1, 3, 2, 2, 2, 4, 4]

    on(4, work)


def test_ranks_whose_samples_cannot_be_joined_are_all_told() -> None:
    def work(rank: int, world: int) -> str:
        model = autopar.parallelize(nn.Linear(4, 4), (world,))
        with pytest.raises(autopar.InputMismatchError) as raised:
            model.from_local(torch.zeros(2, 4 + rank))
        return str(raised.value)

    said = on(2, work)
    assert said[0] == said[1]
    assert "rank 0: input f32[2, 4]" in said[0] and "rank 1: input f32[2, 5]" in said[0] and "pad" in said[0]


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(24, 16), nn.Linear(16, 64), nn.Linear(64, 24)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = self.down(self.up(self.embed(ids)).relu())
        return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


def tokens(count: int) -> TensorDataset:
    source = torch.Generator().manual_seed(0)
    return TensorDataset(*(torch.randint(0, 24, (count, 8), generator=source) for _ in range(2)))


SETTINGS: dict[str, dict[str, Any]] = {
    "data": {"pins": {"embed": "S(0),S(0)"}},
    "tensor": {"pins": {"up.weight": "R,S(0)", "embed": "S(0),R"}},
    "sequence": {"pins": {"embed": "R,S(1)"}},
    "zero": {"zero": 3},
    "stages": {"stages": 2, "microbatches": 2},
}


@pytest.mark.parametrize(
    "name", [name if name == "tensor" else pytest.param(name, marks=pytest.mark.slow) for name in SETTINGS]
)
def test_a_loader_of_ddp_trains_as_one_process_with_the_whole_batch(name: str) -> None:
    """The loader reads with a DistributedSampler. Loss and every gradient, before there is a plan and after, also where
    ranks have different numbers of samples."""

    def work(rank: int, world: int) -> list[float]:
        torch.manual_seed(5)
        reference, data = Tokens(), tokens(30)
        stages = "stages" in SETTINGS[name]
        options = autopar.Options(**SETTINGS[name], mesh_search=stages)
        shape = (4,) if stages else (2, 2)
        model = autopar.parallelize(copy.deepcopy(reference), shape, options=options, cluster=slow_devices())
        loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False))
        losses = [float(check(model, reference, *batch)) for batch in loader]
        if not stages:
            losses.append(float(check(model, reference, *data[4 * rank : 4 * rank + 5 - 2 * (rank % 2)])))
        return losses

    def check(model: ParallelModule, reference: nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        batch = model.from_local(ids=ids, labels=labels)
        wanted, gradients = gradients_of(reference, {key: value.full_tensor() for key, value in batch.items()})
        loss = model.step(**batch)
        torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=0)
        for path, parameter in model.named_parameters():
            assert parameter.grad is not None
            found = model.full_tensor(parameter.grad)
            torch.testing.assert_close(found, gradients[path], rtol=1e-5, atol=1e-7, msg=path)
        model.zero_grad()
        with torch.no_grad():
            torch.testing.assert_close(model(**batch), wanted, rtol=1e-5, atol=0)
        return loss

    everyone = on(4, work)
    assert all(losses == everyone[0] for losses in everyone)


def test_a_batch_given_whole_may_be_placed_beforehand_under_stages_too() -> None:
    def work(rank: int, world: int) -> None:
        options = autopar.Options(stages=2, microbatches=2)
        model = autopar.parallelize(Tokens(), (world,), options=options)
        ids, labels = tokens(12)[:]
        placed = model.local_batch(ids=ids, labels=labels)
        assert all(isinstance(value, DTensor) for value in placed.values())
        torch.testing.assert_close(model.step(**placed), model.step(ids=ids, labels=labels))

    on(2, work)


def test_local_batch_says_that_it_takes_the_global_batch() -> None:
    def work(rank: int, world: int) -> None:
        model = autopar.parallelize(Tokens(), (world,))
        with pytest.raises(autopar.InputMismatchError, match="from_local"):
            model.local_batch(*tokens(8)[4 * rank : 4 * rank + 4])

    on(2, work)


@pytest.mark.parametrize("count", range(1, 20))
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8])
def test_shares_hold_every_sample_once_but_for_copies(count: int, ranks: int) -> None:
    copies, bounds = shares(count, ranks)
    assert len(bounds) == ranks and all(first < last for first, last in bounds)
    assert [place for first, last in bounds[::copies] for place in range(first, last)] == list(range(count))
    assert all(bounds[rank] == bounds[rank - rank % copies] for rank in range(ranks))
    assert max(b - a for a, b in bounds) - min(b - a for a, b in bounds) <= 1


def samplers(size: int, batch: int, ranks: int = 4, **options: Any) -> list[GlobalBatchSampler]:
    def join(args: Any, kwargs: Any, copies: int) -> int:
        return copies

    given = {"shuffle": False, "seed": 0, "drop_last": False, **options}
    return [GlobalBatchSampler(size, batch, rank=rank, ranks=ranks, join=join, **given) for rank in range(ranks)]


@pytest.mark.parametrize("size, batch, drop_last", [(37, 8, False), (37, 8, True), (33, 8, False), (5, 2, False)])
def test_a_sampler_gives_the_batches_of_one_process(size: int, batch: int, drop_last: bool) -> None:
    ranks = samplers(size, batch, shuffle=True, drop_last=drop_last)
    epochs = []
    for epoch in range(2):
        for sampler in ranks:
            sampler.set_epoch(epoch)
        whole_batches = []
        for parts in zip(*ranks, strict=True):
            (copies,) = {sampler.from_local() for sampler in ranks}
            whole_batches.append([index for part in parts[::copies] for index in part])
        sizes = [len(each) for each in whole_batches]
        assert sizes == [batch] * (size // batch) + ([size % batch] if size % batch and not drop_last else [])
        assert len(ranks[0]) == len(sizes) and len({i for each in whole_batches for i in each}) == sum(sizes)
        epochs.append(whole_batches)
    assert epochs[0] != epochs[1]


def test_a_sampler_continues_where_it_was_saved_whatever_was_read_ahead_and_on_other_ranks() -> None:
    (one,) = samplers(23, 4, ranks=1, shuffle=True, seed=3)
    one.set_epoch(2)
    epoch = list(one)
    ahead = iter(one)
    for _ in range(4):
        next(ahead)
    one.from_local(), one.from_local()
    state = one.state_dict()
    assert state == {"epoch": 2, "seed": 3, "batches": 2}
    others = samplers(23, 4, ranks=2, shuffle=True, seed=8)
    for sampler in others:
        sampler.load_state_dict(state)
        assert sampler.state_dict() == state
    assert [[*a, *b] for a, b in zip(*others, strict=True)] == epoch[2:]
    for sampler in others:
        sampler.set_epoch(2)
    assert [[*a, *b] for a, b in zip(*others, strict=True)] == epoch, "the epoch after it is whole again"


def test_a_sampler_says_what_it_cannot_do() -> None:
    with pytest.raises(autopar.OptionsError, match="batch_size=0"):
        samplers(8, 0)
    (sampler,) = samplers(8, 8, ranks=1)
    sampler.from_local()
    with pytest.raises(autopar.OptionsError, match="more batches than the 1 of an epoch"):
        sampler.from_local()


def test_a_sampler_of_the_model_joins_the_last_batch_too() -> None:
    """It has fewer samples than there are ranks. A worker reads them, and reads ahead, as docs/data.md advises: not
    forked from a process that runs threads."""

    def work(rank: int, world: int) -> list[list[int]]:
        model = autopar.parallelize(nn.Linear(4, 4), (world,))
        data = TensorDataset(torch.arange(9))
        sampler = model.sampler(data, 4)
        loader = DataLoader(data, batch_sampler=sampler, num_workers=1, multiprocessing_context="forkserver")
        return [sampler.from_local(ids)[0].full_tensor().tolist() for (ids,) in loader]

    assert on(2, work) == [[[0, 1, 2, 3], [4, 5, 6, 7], [8]]] * 2


def test_ranks_that_should_hold_the_same_part_and_do_not_are_told() -> None:
    """They read the same samples, and augment them by random numbers of their own."""

    def work(rank: int, world: int) -> str:
        mesh = init_device_mesh("cpu", (2, 2))
        model = autopar.parallelize(nn.Linear(4, 4), mesh)
        batch = DTensor.from_local(torch.full((2, 4), float(rank == 3)), mesh, [Shard(0), Replicate()])
        with pytest.raises(autopar.InputMismatchError) as raised:
            model(batch)
        return str(raised.value)

    said = on(4, work)
    assert len(set(said)) == 1 and "rank 3 has other values than rank 2 of a part" in said[0]
