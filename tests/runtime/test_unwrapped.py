"""Models that torch or autopar has wrapped already: the error says which module to give."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DataParallel, DistributedDataParallel

import autopar
from autopar.errors import AutoparError, OptionsError
from tests.helpers.models import Plain, plain
from tests.helpers.planning import CLUSTER, on


class Holder(nn.Module):
    """A model of which a part is wrapped."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **batch: Any) -> Any:
        return self.inner(**batch)


def compiled() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Of torch's own modules, which it imports.
        made = torch.compile(Plain())
    assert isinstance(made, nn.Module)
    return made


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DataParallel(Plain()), r"model is wrapped by torch's DataParallel: .* inside, model.module"),
        (lambda: Holder(DataParallel(Plain())), r"model.inner is wrapped .* inside, model.inner.module"),
        (compiled, r"before torch.compile \(model._orig_mod\).* Options\(compile=True\)"),
    ],
)
def test_wrapped_models(make: Callable[[], nn.Module], words: str) -> None:
    for call in (autopar.parallelize, autopar.verify, autopar.plan):
        with pytest.raises(OptionsError, match=words):
            call(make(), (1,), plain()[1], cluster=CLUSTER)


def test_a_parallel_model_given_again() -> None:
    model = autopar.parallelize(Plain(), (1,))
    for call in (autopar.parallelize, autopar.verify, autopar.plan):
        with pytest.raises(AutoparError, match=r"parallel already.* a new instance of the plain model; .*model.plan"):
            call(model, (1,), plain()[1])


def test_what_is_no_module() -> None:
    with pytest.raises(OptionsError, match=r"the model is a function and no torch.nn.Module"):
        autopar.plan(plain, (1,), plain()[1])  # type: ignore[arg-type]


def test_wrappers_with_processes() -> None:
    def work(rank: int, world: int) -> None:
        for make, words in (
            (
                DistributedDataParallel,
                r"wrapped by torch's DistributedDataParallel: .* give the model inside, model.mod",
            ),
            (fully_shard, r"by torch's FSDPModule: .* leave fully_shard out"),
        ):
            with pytest.raises(OptionsError, match=words):
                autopar.parallelize(make(Plain()), (1,))
        device = torch.device("cpu")
        warnings.simplefilter("ignore", UserWarning)  # FSDP warns of a world of one.
        with pytest.raises(OptionsError, match=r"by torch's FullyShardedDataParallel: .* flattened the parameters"):
            autopar.parallelize(FullyShardedDataParallel(nn.Linear(2, 2), device_id=device), (1,))
        sharded = nn.Sequential(nn.Linear(4, 4))
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        parallelize_module(sharded, mesh, {"0": ColwiseParallel()})
        with pytest.raises(AutoparError, match=r"0.weight and 1 more parameters .* or by torch's parallelize_module"):
            autopar.parallelize(sharded, (1,))
        with pytest.raises(AutoparError, match=r"DistributedDataParallel of a parallel model.*AutoparTrainer"):
            DistributedDataParallel(autopar.parallelize(Plain(), (1,)))

    on(1, work)


def test_models_and_batches_on_the_meta_device() -> None:
    model, batch = plain()
    next(model.children()).to("meta")
    with pytest.raises(OptionsError, match=r"of \d+ parameters are on the meta device, .* torch.device\('meta'\)"):
        autopar.parallelize(model, (1,))
    whole, (x, *others) = autopar.parallelize(Plain(), (1,)), batch
    with pytest.raises(autopar.PlanMismatchError, match=r"on the meta device, .* the input x\. Pass real tensors"):
        whole.step(x.to("meta"), *others)
