"""AutoparTrainer: the losses of ``transformers.Trainer`` in one process with the same global batch."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import autopar
from autopar.errors import OptionsError

from .small_models import arguments, bert, collate, llama, texts, together

pytest.importorskip("accelerate", reason="Trainer needs accelerate: pip install 'autopar[hf]'")

# What is compared of the log.
LOGGED = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy", "train_loss", "epoch")


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((np.asarray(prediction.predictions).argmax(-1) == prediction.label_ids).mean())}


def trainer_of(kind: str, args: Any, *, layers: int = 2, samples: int = 22, **plan: Any) -> Any:
    """autopar's Trainer, or transformers' own if there is nothing to plan."""
    from transformers import Trainer

    from autopar.integrations.transformers import AutoparTrainer

    classes = 3 if kind == "bert" else 0
    model = bert(layers) if kind == "bert" else llama(layers)
    return (AutoparTrainer if plan else Trainer)(
        model=model,
        args=args,
        train_dataset=texts(samples, classes),
        eval_dataset=texts(10, classes),
        data_collator=collate,
        compute_metrics=accuracy,
        **plan,
    )


def logged(trainer: Any) -> list[dict[str, float]]:
    return [{key: line[key] for key in LOGGED if key in line} for line in trainer.state.log_history]


def assert_same_log(found: list[dict[str, float]], wanted: list[dict[str, float]], tolerance: float = 1e-4) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, rel=tolerance)


def train(rank: int, world: int, kind: str, folder: Path, changes: dict[str, Any], plan: dict[str, Any]) -> Any:
    trainer = trainer_of(kind, arguments(folder, world, **changes), **plan)
    trainer.train()
    predicted = trainer.predict(texts(10, 3 if kind == "bert" else 0))
    return logged(trainer), trainer.evaluate()["eval_loss"], predicted.predictions


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {"eval_strategy": "epoch"}, {"mesh": (2, 2)}),
    "accumulation": ("bert", {"gradient_accumulation_steps": 2, "eval_strategy": "epoch"}, {"mesh": (2, 2)}),
    "lengths": ("llama", {}, {"options": autopar.Options(pad_to=8)}),
    "stages": ("llama", {"gradient_accumulation_steps": 2}, {"options": autopar.Options(stages=2, microbatches=2)}),
    "recomputation": ("llama", {"gradient_checkpointing": True, "max_steps": 2}, {"mesh": (4,)}),
    "smoothing": ("llama", {"label_smoothing_factor": 0.1, "max_steps": 3}, {"mesh": (4,)}),
    "best": ("bert", {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True,
                      "metric_for_best_model": "loss", "learning_rate": 0.1}, {"mesh": (4,)}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_four_processes_train_as_one(tmp_path: Path, name: str) -> None:
    kind, changes, plan = CASES[name]
    log, loss, predictions = together(4, train, kind, tmp_path / "four", changes, plan)
    wanted_log, wanted_loss, wanted_predictions = together(1, train, kind, tmp_path / "one", changes, {})
    assert_same_log(log, wanted_log)
    assert loss == pytest.approx(wanted_loss, rel=1e-4)
    np.testing.assert_allclose(predictions[:, ...], wanted_predictions, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_bf16(tmp_path: Path) -> None:
    changes = {"bf16": True, "max_steps": 3}
    log, *_ = together(4, train, "llama", tmp_path / "four", changes, {"mesh": (4,)})
    wanted, *_ = together(1, train, "llama", tmp_path / "one", changes, {})
    assert_same_log(log, wanted, 3e-2)


def resume(rank: int, world: int, folder: Path, layers: int) -> Any:
    """Six steps with a checkpoint after four, and the last two again on another mesh."""
    changes = {"save_strategy": "steps", "save_steps": 4, "max_steps": 6}
    trainer = trainer_of("llama", arguments(folder, world, **changes), layers=layers, mesh=(world,))
    trainer.train()
    for_ever = logged(trainer)
    again = trainer_of(
        "llama", arguments(folder, world, **changes), layers=layers, mesh=(1, world), options=autopar.Options(zero=3)
    )
    again.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
    again.save_model(str(folder / "exported"))
    weights = {name: again.parallel_model.full_tensor(p) for name, p in again.model.named_parameters()}
    return for_ever, logged(again), weights


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_training_resumes_and_is_exported(tmp_path: Path, ranks: int) -> None:
    from transformers import LlamaForCausalLM

    log, resumed, weights = together(ranks, resume, tmp_path, 1)
    assert_same_log([line for line in resumed if "loss" in line], [line for line in log if "loss" in line])
    exported = LlamaForCausalLM.from_pretrained(tmp_path / "exported").state_dict()
    for name, value in weights.items():
        torch.testing.assert_close(exported[name], value)
    checkpoint = tmp_path / "checkpoint-4"
    assert {"config.json", "model.safetensors", "autopar-0", "trainer_state.json"} <= {
        path.name for path in checkpoint.iterdir()
    }
    assert json.loads((checkpoint / "trainer_state.json").read_text())["global_step"] == 4
    arguments_saved = torch.load(checkpoint / "training_args.bin", weights_only=False)
    assert arguments_saved.per_device_train_batch_size == 8 // ranks, "as they were given"


def refuse(rank: int, world: int, folder: Path) -> None:
    with pytest.raises(OptionsError, match="auto_find_batch_size=True"):
        trainer_of("llama", arguments(folder, world, auto_find_batch_size=True), mesh=(1,))
    with pytest.raises(OptionsError, match="args="):
        trainer_of("llama", None, mesh=(1,))
    (folder / "checkpoint-1").mkdir()
    with pytest.raises(OptionsError, match="without autopar"):
        trainer_of("llama", arguments(folder, world), mesh=(1,)).train(str(folder / "checkpoint-1"))


def test_what_excludes_a_plan_is_refused(tmp_path: Path) -> None:
    from autopar.integrations.trainer_arguments import check_arguments, options_of

    together(1, refuse, tmp_path)
    for name in ("fsdp", "deepspeed", "parallelism_config"):
        with pytest.raises(OptionsError, match=f"{name}='given'"):
            check_arguments(SimpleNamespace(**{name: "given"}))
    asked = SimpleNamespace(gradient_checkpointing=True, torch_compile=True)
    assert options_of(asked, autopar.Options()) == autopar.Options(recompute="full", compile=True)
    assert options_of(asked, autopar.Options(recompute="none", compile=False)).recompute == "none"
