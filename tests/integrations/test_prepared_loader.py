"""The loaders of AutoparAccelerator give the samples of Accelerate in one process, wherever an epoch begins."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
)

from autopar.errors import OptionsError

from .small_models import together

pytest.importorskip("accelerate", reason="needs Accelerate: pip install 'autopar[hf]'")

SAMPLES = 22
GLOBAL_BATCH = 8  # 8, 8 and 6 samples are an epoch.


def dataset() -> TensorDataset:
    return TensorDataset(torch.arange(float(SAMPLES))[:, None])


def samples(loader: Any, most: int = SAMPLES) -> list[list[int]]:
    """Those of each batch, of at most so many batches."""
    found = []
    for (batch,) in loader:
        found.append(batch.flatten().int().tolist())
        if len(found) == most:
            break
    return found


class Accelerators:
    """Makes accelerators of a kind, with the model, optimizer and shuffled loader of a training; ``world``: the number
    of processes by which a batch is divided."""

    model: Any

    def __init__(self, cls: Callable[..., Any], world: int, **options: Any) -> None:
        self.cls, self.world, self.options = cls, world, options

    def new(self) -> Any:
        torch.manual_seed(0)
        return self.cls(cpu=True, **self.options)

    def loader(self, accelerator: Any, **options: Any) -> Any:
        given = {"batch_size": GLOBAL_BATCH // self.world, "shuffle": True, **options}
        return accelerator.prepare(DataLoader(dataset(), **given))

    def training(self) -> Any:
        accelerator = self.new()
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = self.loader(accelerator)
        self.model, _ = accelerator.prepare(model, optimizer)
        return accelerator, loader


def positions(of: Accelerators) -> dict[str, list[list[list[int]]]]:
    """What iterations give, whose epochs are chosen."""
    accelerator, loader = of.training()
    found = {"two epochs": [samples(loader), samples(loader)]}
    part = accelerator.skip_first_batches(loader, 2)
    loader.set_epoch(2)
    assert (len(part), len(loader)) == (1, 3)
    found["skipped in the third"] = [samples(part)]
    loader.set_epoch(3)
    found["the fourth"] = [samples(loader, 1), samples(loader)]  # One that is stopped begins anew.
    part = accelerator.skip_first_batches(loader, 1)
    part.set_epoch(6)  # As Trainer does.
    found["the seventh"] = [samples(part, 1)]
    loader.set_epoch(7)
    return {**found, "the eighth": [samples(loader)]}


def saved(of: Accelerators, folder: Path) -> list[list[list[int]]]:
    """Three epochs, with states saved after the first batch and the last one of the second."""
    accelerator, loader = of.training()
    of.model(torch.ones(GLOBAL_BATCH, 1))  # Plans it.
    found: list[list[list[int]]] = []
    for epoch in range(3):
        found.append([])
        for batch, (values,) in enumerate(loader):
            found[-1].append(values.flatten().int().tolist())
            if epoch == 1 and batch in (0, 2):
                accelerator.save_state(str(folder / f"after-{batch}"))
    return found


def resumed(of: Accelerators, folder: Path, skip: int | None) -> list[list[list[int]]]:
    """Goes on in the second epoch, as Accelerate's documentation says (``skip``), or with what the state says."""
    accelerator, loader = of.training()
    accelerator.load_state(str(folder))
    assert len(loader) == 3
    if skip is None:
        return [samples(loader), samples(loader)]
    loader.set_epoch(1)  # Accelerate does not restore it.
    part = accelerator.skip_first_batches(loader, skip)
    found = [samples(part)]
    loader.set_epoch(2)
    return [*found, samples(loader)]


class Buckets(Sampler[list[int]]):
    """Batches of different sizes, in an order of the epoch; knows neither a size nor a sampler."""

    epoch = 0

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(5) if self.epoch % 2 else reversed(range(5)):
            yield list(range(start, SAMPLES, 5))

    def __len__(self) -> int:
        return 5

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def batch_samplers(of: Accelerators) -> dict[str, list[list[list[int]]]]:
    """Two epochs of global batches, of samplers that give batches for each process."""
    accelerator, size = of.training()[0], GLOBAL_BATCH // of.world
    random = BatchSampler(RandomSampler(range(SAMPLES)), size, drop_last=False)
    found = {}
    for name, sampler in (("random", random), ("complete", complete_batches(size))):
        loader = accelerator.prepare(DataLoader(dataset(), batch_sampler=sampler))
        assert loader.total_batch_size == GLOBAL_BATCH
        found[name] = [samples(loader), samples(loader)]
    return found


def complete_batches(size: int) -> BatchSampler:
    return BatchSampler(SequentialSampler(range(SAMPLES)), size, drop_last=True)


def by_autopar(rank: int, world: int, folder: Path) -> Any:
    from autopar.integrations.accelerate import AutoparAccelerator

    of = Accelerators(AutoparAccelerator, world)
    as_one = positions(of), saved(of, folder), batch_samplers(of), resumed(of, folder / "after-0", 1)
    by_state = resumed(of, folder / "after-0", None), resumed(of, folder / "after-2", None)
    freed(of, folder / "freed")
    return as_one, by_state, other_loaders(of)


def other_loaders(of: Accelerators) -> dict[str, list[list[list[int]]]]:
    accelerator, size = of.training()[0], GLOBAL_BATCH // of.world
    loaders = {
        "workers": of.loader(accelerator, num_workers=2, persistent_workers=True),
        "buckets": accelerator.prepare(DataLoader(dataset(), batch_sampler=Buckets())),
        "no collation": accelerator.prepare(DataLoader(dataset(), batch_size=None, sampler=complete_batches(size))),
    }
    found = {name: [samples(loader), samples(loader)] for name, loader in loaders.items()}
    assert len(active_children()) == 2, "workers are kept"
    accelerator.free_memory()
    assert active_children() == []
    return found


def freed(of: Accelerators, folder: Path) -> None:
    accelerator, original = of.new(), nn.Linear(1, 1)
    model, loader = accelerator.prepare(original, DataLoader(dataset(), 4))
    samples(loader, 1)
    accelerator.free_memory()
    assert accelerator.parallels == ()
    assert accelerator.prepare(original) is model, "the model is not planned again"
    gone = weakref.ref(model), weakref.ref(original)
    model, original = accelerator.free_memory(model, original)
    gc.collect()
    assert gone[0]() is None
    assert gone[1]() is None
    model = accelerator.prepare(nn.Linear(1, 1))
    assert accelerator.parallel_module is model
    model(torch.ones(GLOBAL_BATCH, 1))
    accelerator.save_state(str(folder))
    assert not (folder / "autopar-1").exists()
    assert len(samples(loader)) == 3, "the loader serves the new model"


def by_accelerate(rank: int, world: int, folder: Path) -> Any:
    from accelerate import Accelerator, DataLoaderConfiguration

    of = Accelerators(Accelerator, 1, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    return positions(of), saved(of, folder), batch_samplers(of), resumed(of, folder / "after-0", 1)


def test_samples_are_those_of_one_process(tmp_path: Path) -> None:
    found, (from_first, from_last), others = together(2, by_autopar, tmp_path / "two")
    wanted = together(1, by_accelerate, tmp_path / "one")
    for one, other in zip(found, wanted, strict=True):
        assert one == other
    two_epochs, (_, second, third) = wanted[0]["two epochs"], wanted[1]
    assert from_first == [second[1:], third] == wanted[3]
    assert from_last[0] == third, "after the last batch comes the next epoch"
    assert others["workers"] == two_epochs
    assert others["no collation"] == wanted[2]["complete"]
    lists = [list(range(start, SAMPLES, 5)) for start in range(5)]
    assert others["buckets"][1] == [lists[0] + lists[1], lists[2] + lists[3], lists[4]]
    assert others["buckets"][0] == [lists[4] + lists[3], lists[2] + lists[1], lists[0]]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from dataset()


@pytest.mark.parametrize("data", [dataset(), Stream()])
def test_a_loader_without_samples_is_refused(data: Any) -> None:
    from autopar.integrations.joined_batches import with_joined_batches

    with pytest.raises(OptionsError, match="let the dataset give samples"):
        with_joined_batches(DataLoader(data, batch_size=None), 2)


def test_joined_batches_pass_on_what_their_sampler_has() -> None:
    from autopar.integrations.joined_batches import JoinedBatches

    buckets = JoinedBatches(Buckets(), 2)
    assert not hasattr(buckets, "batch_size")
    assert not hasattr(buckets, "sampler")
    batches = JoinedBatches(complete_batches(4), 2)
    assert (batches.batch_size, len(batches), len(list(batches))) == (8, 2, 2)
    batches.sampler = range(9, 17)
    assert list(batches) == [list(range(9, 17))]
