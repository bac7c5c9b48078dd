"""Exchanges that begin in mid-training, end with their model, or fail for another reason than a lost replica."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar import DiLoCo, Gossip, LocalSGD, checkpoint
from autopar.runtime import run_local
from tests.runtime.averaging.training import Weights, batches, made, whole

DATA = batches(9, rows=8)


def on_two(work: Any, *args: Any) -> list[Any]:
    return run_local(work, 2, timeout=120.0, backend="gloo", args=args)


def begun(sync: Any) -> tuple[autopar.ParallelModule, torch.optim.Optimizer]:
    model = autopar.parallelize(made(), (2,), DATA[0], options=autopar.Options(sync=sync))
    return model, model.optimizer(torch.optim.SGD, lr=0.1)


def train(model: autopar.ParallelModule, optimizer: torch.optim.Optimizer, data: list[Any]) -> None:
    for batch in data:
        optimizer.zero_grad()
        model.step(**batch)
        optimizer.step()


@pytest.mark.parametrize(
    "sync",
    [
        DiLoCo(every=4),
        pytest.param(LocalSGD(every=4, compression="int8"), marks=pytest.mark.slow),
        pytest.param(Gossip(every=4, compression="bf16", consensus=1.0), marks=pytest.mark.slow),
    ],
)
def test_an_optimizer_that_is_made_after_replicas_have_drifted(sync: Any) -> None:
    """Its exchanges begin from the mean: after a due one, replicas are as close as the code allows."""

    def work(rank: int, world: int) -> Weights:
        model, optimizer = begun(sync)
        train(model, optimizer, DATA[:3])
        layers = [p for name, p in model.named_parameters() if not name.startswith("inside")]
        train(model, model.optimizer(torch.optim.SGD, layers, lr=0.01), DATA[3:7])
        return {name: value for name, value in whole(model).items() if not name.startswith("inside")}

    first, second = on_two(work)
    for name, value in first.items():
        assert (value - second[name]).abs().max() < 2e-5, name


@pytest.mark.parametrize("way", ["load", pytest.param("write back", marks=pytest.mark.slow)])
def test_weights_that_are_loaded_stay(way: str) -> None:
    def work(rank: int, world: int) -> float:
        model, optimizer = begun(DiLoCo(every=2))
        train(model, optimizer, DATA[:3])
        torch.manual_seed(7)
        loaded = {name: torch.randn_like(value) for name, value in made().state_dict().items()}
        loaded["outside.weight"] = loaded["middle.weight"]
        if way == "load":
            model.load_state_dict(loaded)
        else:
            with model.full_params(writeback=True) as original:
                original.load_state_dict(loaded)
        optimizer.param_groups[0]["lr"] = 0.0
        train(model, optimizer, DATA[3:5])
        return max(float((value - loaded[name]).abs().max()) for name, value in whole(model).items())

    assert on_two(work) == [0.0, 0.0]


def test_a_checkpoint_of_the_beginning_is_a_new_beginning(tmp_path: Path) -> None:
    def work(rank: int, world: int) -> float:
        model, optimizer = begun(DiLoCo(every=2))
        checkpoint.save(tmp_path, model, optimizer, step=0)
        train(model, optimizer, DATA[:3])
        checkpoint.load(tmp_path, model, optimizer)
        train(model, optimizer, DATA[:5])
        straight, other = begun(DiLoCo(every=2))
        train(straight, other, DATA[:5])
        again, wanted = whole(model), whole(straight)
        return max(float((again[name] - value).abs().max()) for name, value in wanted.items())

    assert on_two(work) == [0.0, 0.0]


def test_a_model_is_freed() -> None:
    def work(rank: int, world: int) -> bool:
        model, optimizer = begun(LocalSGD(every=2))
        train(model, optimizer, DATA[:2])
        freed = weakref.ref(model)
        del model, optimizer
        gc.collect()
        return freed() is None

    assert on_two(work) == [True, True]


class Exhausted(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        raise RuntimeError("out of memory: tried to allocate 2 GiB")


def test_an_error_of_the_outer_optimizer_is_its_own() -> None:
    def work(rank: int, world: int) -> str:
        model, optimizer = begun(DiLoCo(every=1, outer=lambda parameters: Exhausted(parameters, lr=1.0)))
        with pytest.raises(RuntimeError) as raised:
            train(model, optimizer, DATA[:1])
        return str(raised.value)

    assert on_two(work) == ["out of memory: tried to allocate 2 GiB"] * 2


@pytest.mark.parametrize("kind", ["loader", pytest.param("sampler", marks=pytest.mark.slow)])
def test_a_last_batch_of_fewer_rows_than_replicas_is_the_same_error_everywhere(kind: str) -> None:
    def work(rank: int, world: int) -> tuple[int, str]:
        model, optimizer = begun(LocalSGD(every=2))
        samples = [{"x": row[:5], "y": row[5:]} for row in torch.randn(9, 14, dtype=torch.float64).unbind()]
        steps = 0
        with pytest.raises(autopar.OptionsError) as raised:
            if kind == "sampler":
                model.sampler(len(samples), batch_size=4)
            for batch in model.dataloader(samples, batch_size=4):
                train(model, optimizer, [batch])
                steps += 1
        return steps, str(raised.value)

    first, second = on_two(work)
    assert first == second
    assert first[0] == (2 if kind == "loader" else 0)
    assert first[1].startswith("a batch of 1 row for 2 replicas") and "drop_last=True" in first[1]
