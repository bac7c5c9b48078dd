"""LoRA on a frozen base, and TRL's SFTTrainer: losses of one process, and adapters that load elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import autopar

from .small_models import WORDS, arguments, collate, llama, texts, together

pytest.importorskip("peft", reason="adapters are PEFT's: pip install 'autopar[hf]'")

# PEFT asks transformers' models by a name that they have renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
IDS = torch.randint(0, WORDS, (8, 8), generator=torch.Generator().manual_seed(0))


def adapted(layers: int = 2) -> Any:
    from peft import LoraConfig, get_peft_model

    base = llama(layers)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return get_peft_model(base, config)


def step_by_step(model: Any, step: Any, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for _ in range(3):
        losses.append(float(step(input_ids=IDS, labels=IDS)))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def in_one(model: Any) -> list[float]:
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)

    def step(**batch: Any) -> torch.Tensor:
        loss = model(**batch).loss
        loss.backward()
        return loss.detach()  # type: ignore[no-any-return]

    return step_by_step(model, step, optimizer)


def by_hand(rank: int, world: int, folder: Path, layers: int) -> tuple[list[float], bool]:
    original = adapted(layers)
    frozen = {name: p.detach().clone() for name, p in original.named_parameters() if not p.requires_grad}
    model = autopar.parallelize(original, (world,))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    losses = step_by_step(model, model.step, model.optimizer(torch.optim.AdamW, params=trained, lr=1e-2))
    model.save_pretrained(str(folder))
    same = all(torch.equal(model.full_tensor(model.get_parameter(name)), value) for name, value in frozen.items())
    return losses, same


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_adapters_train_on_a_frozen_base_and_are_saved(tmp_path: Path, ranks: int) -> None:
    from peft import PeftModel

    losses, same = together(ranks, by_hand, tmp_path, 1)
    assert same, "the base is frozen"
    reference = adapted(1)
    torch.testing.assert_close(losses, in_one(reference), rtol=1e-4, atol=1e-5)
    assert "model.safetensors" not in {path.name for path in tmp_path.iterdir()}, "the adapter alone"
    loaded = PeftModel.from_pretrained(llama(1), tmp_path)
    with torch.no_grad():
        found, wanted = (model(input_ids=IDS).logits for model in (loaded, reference))
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


def by_trainer(rank: int, world: int, folder: Path, plan: dict[str, Any]) -> Any:
    from transformers import Trainer

    from autopar.integrations.transformers import AutoparTrainer

    changes = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2,
               "load_best_model_at_end": True, "max_steps": 4}  # fmt: skip

    def new() -> Any:
        return (AutoparTrainer if plan else Trainer)(
            model=adapted(), args=arguments(folder, world, **changes), train_dataset=texts(22), data_collator=collate,
            eval_dataset=texts(10), **plan,
        )  # fmt: skip

    trainer = new()
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    final = trainer.evaluate()["eval_loss"]
    again = new()
    again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    return losses, [line["loss"] for line in again.state.log_history if "loss" in line], final


@pytest.mark.slow
def test_trainer_trains_adapters(tmp_path: Path) -> None:
    losses, resumed, final = together(4, by_trainer, tmp_path / "four", {"mesh": (2, 2)})
    wanted, _, wanted_final = together(1, by_trainer, tmp_path / "one", {})
    torch.testing.assert_close(losses, wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(resumed, wanted, rtol=1e-4, atol=1e-5)
    assert final == pytest.approx(wanted_final, rel=1e-4)
    saved = {path.name for path in (tmp_path / "four" / "checkpoint-4").iterdir()}
    assert "adapter_model.safetensors" in saved and "model.safetensors" not in saved


def supervised(rank: int, world: int, folder: Path, plan: dict[str, Any]) -> list[float]:
    import datasets
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    from autopar.integrations.transformers import AutoparTrainerMixin

    class AutoparSFTTrainer(AutoparTrainerMixin, SFTTrainer):
        pass

    rows = datasets.Dataset.from_list([{"input_ids": row["input_ids"]} for row in texts(22)])
    trainer = (AutoparSFTTrainer if plan else SFTTrainer)(
        model=llama(),
        args=arguments(folder, world, SFTConfig, max_steps=3, bf16=False, gradient_checkpointing=False),
        train_dataset=rows,
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words(), pad_token="0", eos_token="1"),
        **plan,
    )
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def words() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    return Tokenizer(WordLevel({str(number): number for number in range(WORDS)}, unk_token="0"))


@pytest.mark.slow
def test_sft_trainer(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="SFTTrainer is TRL's: pip install trl")
    found = together(4, supervised, tmp_path / "four", {"mesh": (4,)})
    wanted = together(1, supervised, tmp_path / "one", {})
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
