"""AutoparAccelerator: a loop of Accelerate has the losses of one process, and its saved state resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import autopar
from autopar.errors import AutoparError

from .small_models import BATCH, collate, llama, texts, together

pytest.importorskip("accelerate", reason="needs Accelerate: pip install 'autopar[hf]'")


def loop(accelerator: Any, world: int, steps: int, folder: Path, *, save_at: int = -1, resume: bool = False) -> Any:
    """Accelerate's documented loop, with accumulation, clipping and a schedule."""
    model = llama(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(texts(22), BATCH // world, shuffle=True, collate_fn=collate)  # type: ignore[arg-type]
    held_out = DataLoader(texts(10), BATCH // world, collate_fn=collate)  # type: ignore[arg-type]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step // world))
    model, optimizer, loader, held_out, scheduler = accelerator.prepare(model, optimizer, loader, held_out, scheduler)
    if resume:
        accelerator.load_state(str(folder))
    losses, step = [], save_at if resume else 0
    while step < steps:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(float(loss.detach()))
            step += 1
            if step == save_at and not resume:
                accelerator.save_state(str(folder))
            if step == steps:
                break
    model.eval()
    rows = 0
    for batch in held_out:
        with torch.no_grad():
            rows += len(accelerator.gather_for_metrics(model(**batch).logits))
    return losses, rows, optimizer.param_groups[0]["lr"], accelerator.get_state_dict(model)


def by_autopar(rank: int, world: int, folder: Path) -> Any:
    from autopar.integrations.accelerate import AutoparAccelerator

    def new() -> Any:
        torch.manual_seed(0)
        return AutoparAccelerator(cpu=True, gradient_accumulation_steps=2, options=autopar.Options(stages=1))

    with pytest.raises(AutoparError, match="prepare"):
        _ = new().parallel_module
    losses, rows, rate, weights = loop(new(), world, 5, folder, save_at=2)
    resumed = loop(new(), world, 5, folder, save_at=2, resume=True)[0]
    return losses, rows, rate, {name: value.clone() for name, value in weights.items()}, resumed


def by_accelerate(rank: int, world: int, folder: Path) -> Any:
    from accelerate import Accelerator, DataLoaderConfiguration

    torch.manual_seed(0)
    shuffled = DataLoaderConfiguration(use_seedable_sampler=True)
    return loop(Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=shuffled), 1, 5, folder)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_loop_of_accelerate(tmp_path: Path, ranks: int) -> None:
    losses, rows, rate, weights, resumed = together(ranks, by_autopar, tmp_path / "state")
    wanted, wanted_rows, wanted_rate, wanted_weights = together(1, by_accelerate, tmp_path)
    torch.testing.assert_close(losses, wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(resumed, wanted[2:], rtol=1e-4, atol=1e-5)
    assert rows == wanted_rows == 10
    assert rate == pytest.approx(wanted_rate)
    for name, value in wanted_weights.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=1e-4)
