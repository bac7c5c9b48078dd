"""Lightning's Fabric and Trainer: the losses of one process, and checkpoints that resume."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import autopar

from .small_models import BATCH, collate, llama, texts, together

pytest.importorskip("lightning", reason="needs Lightning: pip install 'autopar[lightning]'")


def alone(steps: int) -> list[float]:
    """The losses of a plain loop in one process."""
    model = llama(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    batches = list(DataLoader(texts(BATCH * 3), BATCH, collate_fn=collate))  # type: ignore[arg-type]
    for step in range(steps):
        loss = model(**batches[step % 3]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def fabric_of(world: int) -> Any:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    from autopar.integrations.lightning import parallelize_fn

    os.environ["TORCHELASTIC_RUN_ID"] = "test"
    parallel = parallelize_fn(example_inputs=collate(texts(BATCH)), options=autopar.Options(zero=3))
    strategy = ModelParallelStrategy(parallel, data_parallel_size=1, tensor_parallel_size=world)
    fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy)
    fabric.launch()
    return fabric


def by_fabric(rank: int, world: int, folder: Path) -> tuple[list[float], list[float]]:
    fabric = fabric_of(world)

    def new() -> tuple[Any, Any]:
        model = fabric.setup(llama(1))
        return model, fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))

    batches = list(DataLoader(texts(BATCH * 3), BATCH, collate_fn=collate))  # type: ignore[arg-type]

    def steps(model: Any, optimizer: Any, numbers: range) -> list[float]:
        losses = []
        for step in numbers:
            loss = model(**batches[step % 3]).loss
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    model, optimizer = new()
    first = steps(model, optimizer, range(2))
    fabric.save(folder, {"model": model, "optimizer": optimizer, "step": 2})
    first += steps(model, optimizer, range(2, 4))
    model, optimizer = new()
    state = {"model": model, "optimizer": optimizer, "step": 0}
    fabric.load(folder, state)
    return first, steps(model, optimizer, range(2, 4))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_fabric(tmp_path: Path, ranks: int) -> None:
    losses, resumed = together(ranks, by_fabric, tmp_path / "fabric")
    wanted = alone(4)
    torch.testing.assert_close(losses, wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(resumed, wanted[2:], rtol=1e-4, atol=1e-5)


def by_trainer(rank: int, world: int, folder: Path, whole: bool) -> tuple[list[float], list[float]]:
    import lightning.pytorch as pl

    from autopar.integrations.lightning import AutoparStrategy

    os.environ["TORCHELASTIC_RUN_ID"] = "test"

    class Learner(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = llama(1)
            self.losses: list[float] = []

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(**batch).loss
            self.losses.append(float(loss.detach()))
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("held_out", self.model(**batch).loss)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return self.model.optimizer(torch.optim.AdamW, lr=1e-2)  # type: ignore[no-any-return,operator]

    def fit(steps: int, resumed: Path | None) -> tuple[Any, list[float]]:
        strategy = AutoparStrategy(save_distributed_checkpoint=not whole, options=autopar.Options(zero=3))
        trainer = pl.Trainer(
            accelerator="cpu", devices=world, strategy=strategy, max_steps=steps, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=1.0,
            default_root_dir=folder, num_sanity_val_steps=0, use_distributed_sampler=False,  # It would shuffle.
        )  # fmt: skip
        learner = Learner()
        loaders = [DataLoader(texts(BATCH * 3), BATCH, collate_fn=collate) for _ in range(2)]  # type: ignore[arg-type]
        trainer.fit(learner, *loaders, ckpt_path=resumed, weights_only=False)
        assert torch.isfinite(trainer.callback_metrics["loss"])
        return trainer, learner.losses

    trainer, losses = fit(3, None)  # An epoch: in the middle of one, Lightning begins its loaders anew.
    trainer.save_checkpoint(folder / "saved.ckpt")
    return losses, fit(5, folder / "saved.ckpt")[1]


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True])
def test_trainer(tmp_path: Path, whole: bool) -> None:
    losses, resumed = together(4, by_trainer, tmp_path, whole)
    wanted = alone(5)
    torch.testing.assert_close(losses, wanted[:3], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(resumed, wanted[3:], rtol=1e-4, atol=1e-5)
