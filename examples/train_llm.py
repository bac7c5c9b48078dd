"""A small language model learns Python from the standard library's source: a whole training in a plain loop.

    autopar run --nproc 4 examples/train_llm.py --folder runs/llm

Texts of different lengths, evaluation, checkpoints (started again, it goes on where it was), parameter groups, a
schedule, clipping, and figures for TensorBoard (``tensorboard --logdir runs/llm``) where that is installed.
"""

from __future__ import annotations

import argparse
import ast
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tokenizers import ByteLevelBPETokenizer
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

import autopar
from autopar.checkpoint import Checkpointer
from autopar.monitor import Monitor

WORDS, LONGEST = 1024, 96
CONFIG = LlamaConfig(
    vocab_size=WORDS, hidden_size=96, intermediate_size=256, num_hidden_layers=2, num_attention_heads=6,
    num_key_value_heads=6, max_position_embeddings=LONGEST, use_cache=False, pad_token_id=0,
)  # fmt: skip


def functions() -> list[str]:
    """The functions of some modules of the standard library."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-d]*.py"))
    sources = [(text, ast.parse(text)) for text in (file.read_text(errors="replace") for file in files)]
    found = [(text, node) for text, tree in sources for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return [ast.get_source_segment(text, node) or "" for text, node in found]


def tokens() -> list[torch.Tensor]:
    """The functions as token ids, of a tokenizer that is trained on them: the same on every rank."""
    texts = functions()
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=WORDS, special_tokens=["<pad>"], show_progress=False)
    return [torch.tensor(encoded.ids[:LONGEST]) for encoded in tokenizer.encode_batch(texts)]


def collate(texts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """A batch; the loader makes it as long as those of all ranks, and a multiple of ``pad_to``."""
    labels = pad_sequence(texts, batch_first=True, padding_value=-100)
    mask = labels.ne(-100).long()
    return {"input_ids": labels.clamp(min=0), "attention_mask": mask, "labels": labels}


def train(arguments: argparse.Namespace) -> float:
    """The loss on held-out texts at the end."""
    data = tokens()
    torch.manual_seed(0)
    model = autopar.parallelize(LlamaForCausalLM(CONFIG), (dist.get_world_size(),), options=autopar.Options(pad_to=32))
    loader = model.dataloader(data[:-64], arguments.batch, collate_fn=collate, shuffle=True, seed=0)
    held_out = model.dataloader(data[-64:], 16, collate_fn=collate)

    matrices, others = ([p for p in model.parameters() if (p.dim() > 1) is wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = model.optimizer(torch.optim.AdamW, params=groups, lr=3e-3)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 10, arguments.steps)

    def evaluate() -> float:
        model.eval()
        with torch.no_grad():
            losses = [float(model(**batch).loss) for batch in held_out]
        model.train()
        return sum(losses) / len(losses)

    def batches() -> Any:
        while True:
            yield from loader

    keeps: dict[str, Any] = {"scheduler": scheduler, "dataloader": loader, "every": arguments.every, "keep": 2}
    with Checkpointer(arguments.folder, model, optimizer, **keeps) as checkpoints:
        begin = checkpoints.resume().step
        with Monitor(model, folder=arguments.folder, total=arguments.steps, first=begin) as monitor:
            for step, batch in zip(range(begin, arguments.steps), batches(), strict=False):
                loss = model.step(**batch)
                model.clip_grad_norm_(1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                monitor.step(loss, tokens=batch["input_ids"].numel())
                checkpoints.step(step + 1)
                if (step + 1) % arguments.every == 0:
                    loss = evaluate()
                    if dist.get_rank() == 0:
                        print(f"step {step + 1}: loss {loss:.3f} on held-out functions", flush=True)
        return evaluate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="runs/llm")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=32, help="functions in the global batch")
    parser.add_argument("--every", type=int, default=50, help="steps between evaluations and checkpoints")
    dist.init_process_group("gloo")
    train(parser.parse_args())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
