"""Small models of Hugging Face, texts, and a Trainer's arguments, for every test of an integration, and a schedule."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import ConstantLR, LambdaLR, LinearLR, SequentialLR

from autopar.runtime.launch import run_local

WORDS = 64
BATCH = 8


def llama(layers: int = 2) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=WORDS, bos_token_id=0, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def bert(layers: int = 2) -> Any:
    """A classifier."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=32, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=64, vocab_size=WORDS,
        hidden_dropout_prob=0, attention_probs_dropout_prob=0, num_labels=3,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def t5(layers: int = 1) -> Any:
    """A translator."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=layers, num_heads=4, vocab_size=WORDS, dropout_rate=0, pad_token_id=0,
        eos_token_id=1, decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def texts(count: int, classes: int = 0) -> list[dict[str, Any]]:
    """Token ids of different lengths, with labels of one of ``classes``, or the ids themselves."""
    source = torch.Generator().manual_seed(1)
    found = []
    for index in range(count):
        ids = torch.randint(2, WORDS, (5 + index % 4,), generator=source).tolist()
        labels = index % classes if classes else ids
        found.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels})
    return found


def nested(optimizer: Any) -> Any:
    """A schedule whose first part is made of others, as torch allows. (It warns then that nothing has stepped.)"""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        first = SequentialLR(optimizer, [LinearLR(optimizer, 0.1, 1.0, 2), ConstantLR(optimizer, 0.3, 2)], [2])
        return SequentialLR(optimizer, [first, LambdaLR(optimizer, lambda step: 0.9**step)], [3])


def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pads to the longest."""
    width = max(len(sample["input_ids"]) for sample in samples)

    def column(key: str, fill: int) -> torch.Tensor:
        rows = [s[key] + [fill] * (width - len(s[key])) if isinstance(s[key], list) else s[key] for s in samples]
        return torch.tensor(rows)

    return {"input_ids": column("input_ids", 0), "attention_mask": column("attention_mask", 0),
            "labels": column("labels", -100)}  # fmt: skip


def arguments(folder: Path | str, world: int, cls: Any = None, **changes: Any) -> Any:
    """Training with global batches of :data:`BATCH`, on processors."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    given: dict[str, Any] = {
        "use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_steps": 1, "num_train_epochs": 2,
        "per_device_train_batch_size": BATCH // world, "per_device_eval_batch_size": BATCH // world,
        "learning_rate": 1e-2, "weight_decay": 0.1, "warmup_steps": 2, "max_grad_norm": 1.0, "save_strategy": "no",
        "seed": 3,
    }  # fmt: skip
    return (cls or transformers.TrainingArguments)(output_dir=str(folder), **{**given, **changes})


def together(count: int, work: Callable[..., Any], *args: Any, timeout: float = 280.0) -> Any:
    """What ``work(rank, world, *args)`` returns on the first of ``count`` processes."""

    def quietly(rank: int, world: int) -> Any:
        warnings.simplefilter("ignore")
        return work(rank, world, *args)

    return run_local(quietly, count, timeout=timeout)[0]
