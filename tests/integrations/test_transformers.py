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

from .small_models import arguments, bert, collate, llama, nested, t5, texts, together

pytest.importorskip("accelerate", reason="Trainer needs accelerate: pip install 'autopar[hf]'")

# What is compared of the log.
LOGGED = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy", "train_loss", "epoch")


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((np.asarray(prediction.predictions).argmax(-1) == prediction.label_ids).mean())}


def trainer_of(kind: str, folder: Path, world: int, changes: dict[str, Any], *, layers: int = 2, **plan: Any) -> Any:
    """autopar's Trainer, or transformers' own if there is nothing to plan."""
    import transformers

    from autopar.integrations.transformers import AutoparTrainerMixin

    classes = 3 if kind == "bert" else 0
    stock: Any = transformers.Seq2SeqTrainer if kind == "t5" else transformers.Trainer
    arguments_class = transformers.Seq2SeqTrainingArguments if kind == "t5" else transformers.TrainingArguments
    return (type("Planned", (AutoparTrainerMixin, stock), {}) if plan else stock)(
        model={"bert": bert, "llama": llama, "t5": t5}[kind](layers),
        args=arguments(folder, world, arguments_class, **changes),
        train_dataset=texts(22, classes),
        eval_dataset=texts(10, classes),
        data_collator=collate,
        compute_metrics=None if kind == "t5" else accuracy,
        **plan,
    )


def logged(trainer: Any) -> list[dict[str, float]]:
    return [{key: line[key] for key in LOGGED if key in line} for line in trainer.state.log_history]


def assert_same_log(found: list[dict[str, float]], wanted: list[dict[str, float]], tolerance: float = 1e-4) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, rel=tolerance)


def train(rank: int, world: int, kind: str, folder: Path, changes: dict[str, Any], plan: dict[str, Any]) -> Any:
    trainer = trainer_of(kind, folder, world, changes, **plan)
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
    "workers": ("bert", {"dataloader_num_workers": 2, "dataloader_persistent_workers": True}, {"mesh": (4,)}),
    "generation": ("t5", {"predict_with_generate": True, "generation_max_length": 6, "eval_strategy": "epoch"},
                   {"mesh": (4,)}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_four_processes_train_as_one(tmp_path: Path, name: str) -> None:
    kind, changes, plan = CASES[name]
    log, loss, predictions = together(4, train, kind, tmp_path / "four", changes, plan)
    wanted_log, wanted_loss, wanted_predictions = together(1, train, kind, tmp_path / "one", changes, {})
    assert_same_log(log, wanted_log)
    assert loss == pytest.approx(wanted_loss, rel=1e-4)
    assert predictions.shape == wanted_predictions.shape
    if name == "lengths":  # Positions that Trainer fills up with -100 have predictions if the plan's program has them.
        predictions = np.where(wanted_predictions == -100, -100, predictions)
    np.testing.assert_allclose(predictions, wanted_predictions, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision(tmp_path: Path, precision: str) -> None:
    """fp16 as an option of the plan: Accelerate has fp16 on GPUs alone, so it is compared with fp32."""
    changes, planned = {"max_steps": 3}, {"mesh": (4,), "options": autopar.Options(precision=precision)}  # type: ignore[arg-type]
    if precision == "bf16":
        changes, planned = {**changes, "bf16": True}, {"mesh": (4,)}
    log, *_ = together(4, train, "llama", tmp_path / "four", changes, planned)
    wanted, *_ = together(1, train, "llama", tmp_path / "one", changes, {})
    assert_same_log(log, wanted, 3e-2)


Samples = list[list[list[int]]]


def recorded(trainer: Any) -> Samples:
    """The token ids of each batch that ``trainer`` is going to train on."""
    seen: Samples = []
    step = trainer.training_step

    def training_step(model: Any, inputs: Any, *rest: Any) -> torch.Tensor:
        seen.append(inputs["input_ids"].tolist())
        return step(model, inputs, *rest)  # type: ignore[no-any-return]

    trainer.training_step = training_step
    return seen


def resume(rank: int, world: int, folder: Path, planned: bool) -> Any:
    """Eight steps with a checkpoint after four, in the middle of the second of three epochs, and the last four again,
    on another mesh."""
    changes = {"save_strategy": "steps", "save_steps": 4, "max_steps": 8}
    plans: list[dict[str, Any]] = [{}, {}]
    if planned:
        plans = [{"mesh": (world,)}, {"mesh": (1, world), "options": autopar.Options(zero=3)}]
    trainer, again = (trainer_of("llama", folder, world, changes, layers=1, **plan) for plan in plans)
    samples, resumed_samples = recorded(trainer), recorded(again)
    trainer.train()
    again.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
    found = (samples, logged(trainer)), (resumed_samples, logged(again))
    if not planned:
        return found, {}
    again.save_model(str(folder / "exported"))
    return found, {name: again.parallel_model.full_tensor(p) for name, p in again.model.named_parameters()}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_training_resumes_and_is_exported(tmp_path: Path, ranks: int) -> None:
    from transformers import LlamaForCausalLM

    found, weights = together(ranks, resume, tmp_path, True)
    wanted, _ = together(1, resume, tmp_path / "one", False)
    for (samples, log), (wanted_samples, wanted_log) in zip(found, wanted, strict=True):
        assert samples == wanted_samples
        assert_same_log(log, wanted_log)
    assert found[1][0] == found[0][0][4:]
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
    from autopar.integrations.transformers import AutoparTrainer

    with pytest.raises(OptionsError, match="auto_find_batch_size=True"):
        trainer_of("llama", folder, world, {"auto_find_batch_size": True}, mesh=(1,))
    with pytest.raises(OptionsError, match="args="):
        AutoparTrainer(llama(), None, mesh=(1,))
    (folder / "checkpoint-1").mkdir()
    with pytest.raises(OptionsError, match="without autopar"):
        trainer_of("llama", folder, world, {}, mesh=(1,)).train(str(folder / "checkpoint-1"))


def train_twice(rank: int, world: int, folder: Path) -> Any:
    """Evaluates before training, between and after, with an optimizer and a schedule of its own."""
    trainer = trainer_of("bert", folder, world, {"max_steps": 1}, layers=1, mesh=(1,))
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=1.0)
    trainer.lr_scheduler = nested(trainer.optimizer)
    rates, losses = [], [trainer.evaluate()["eval_loss"]]
    parallel = trainer.parallel_model
    for _ in range(2):
        trainer.train()
        assert trainer.parallel_model is parallel
        rates.append(trainer.optimizer.param_groups[0]["lr"])
        losses.append(trainer.evaluate()["eval_loss"])
    assert trainer.accelerator.parallels == (parallel,)
    assert len(set(losses)) == 3
    return rates


def test_a_trainer_plans_its_model_once(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    schedule, wanted = nested(optimizer), []
    for _ in range(2):
        optimizer.step()
        schedule.step()
        wanted.append(optimizer.param_groups[0]["lr"])
    assert together(1, train_twice, tmp_path) == pytest.approx(wanted)


def test_a_parallel_model_is_refused() -> None:
    from autopar.integrations.transformers import AutoparTrainer

    parallel = autopar.parallelize(torch.nn.Linear(2, 2), (1,))
    for given, named in (((parallel,), {}), ((), {"model": parallel})):
        with pytest.raises(OptionsError, match="give the plain model, and mesh=, options="):
            AutoparTrainer(*given, **named)


def test_what_excludes_a_plan_is_refused(tmp_path: Path) -> None:
    from autopar.integrations.trainer_arguments import check_arguments, options_of

    together(1, refuse, tmp_path)
    for name in ("fsdp", "deepspeed", "parallelism_config"):
        with pytest.raises(OptionsError, match=f"{name}='given'"):
            check_arguments(SimpleNamespace(**{name: "given"}))
    with pytest.raises(OptionsError, match="leave it out; bf16=True"):
        check_arguments(SimpleNamespace(bf16_full_eval=True))
    asked = SimpleNamespace(gradient_checkpointing=True, torch_compile=True)
    assert options_of(asked, autopar.Options()) == autopar.Options(recompute="full", compile=True)
    assert options_of(asked, autopar.Options(recompute="none", compile=False)).recompute == "none"
