"""Texts of many lengths: seconds that the first step of each new length takes beyond a step of a known one.

    python -m benchmarks.lengths [--model llama|gpt2|bert] [--layers N] [--processes N] [--json] [--output FILE]

Local processes train on texts of one length, then of others. A first other length is traced with the length open; from
then on a new length costs the lowering of its program alone. Nothing is kept from earlier runs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import transformers as hf

import autopar
from autopar.runtime.launch import run_local

from .report import describe_machine, emit, make_table

ROWS, WIDTH, WORDS = 8, 128, 1000
# The length that is planned, the first other one, then others.
LENGTHS = (48, 56, 40, 64, 33, 57, 72, 50, 61)


def make(model: str, layers: int) -> torch.nn.Module:
    """A small model of transformers with random weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": layers, "num_attention_heads": 4, "vocab_size": WORDS}
    made: torch.nn.Module
    if model == "gpt2":
        made = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=WORDS, n_embd=WIDTH, n_layer=layers, n_head=4))
    elif model == "bert":
        made = hf.BertForMaskedLM(hf.BertConfig(intermediate_size=4 * WIDTH, **sizes))
    else:
        made = hf.LlamaForCausalLM(hf.LlamaConfig(intermediate_size=4 * WIDTH, num_key_value_heads=2, **sizes))
    return made


def work(rank: int, world: int, model: str, layers: int) -> list[tuple[float, float]]:
    """For each length, the seconds of its first step and of the next."""
    parallel = autopar.parallelize(make(model, layers), (world,))
    found = []
    for length in LENGTHS:
        ids = torch.randint(WORDS, (ROWS, length), generator=torch.Generator().manual_seed(length))
        seconds = []
        for _ in range(2):
            dist.barrier()
            begin = time.perf_counter()
            parallel.step(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)
            seconds.append(time.perf_counter() - begin)
            parallel.zero_grad()
        found.append((seconds[0], seconds[1]))
    return found


def figures(model: str, layers: int, processes: int) -> dict[str, Any]:
    """All figures of a run: the slowest rank's."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["AUTOPAR_CACHE"] = folder
        ranks = run_local(work, processes, timeout=1000, args=(model, layers))
    more = [max(rank[at][0] - rank[at][1] for rank in ranks) for at in range(len(LENGTHS))]
    return {
        "machine": describe_machine(),
        "model": model,
        "layers": layers,
        "processes": processes,
        "lengths": LENGTHS,
        "seconds_beyond_a_step": more,
        "planned": more[0],
        "first_other_length": more[1],
        "median_of_later_lengths": statistics.median(more[2:]),
        "longest_of_later_lengths": max(more[2:]),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("llama", "gpt2", "bert"), default="llama")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--output", help="also write the JSON to this file")
    given = parser.parse_args(arguments)
    result = figures(given.model, given.layers, given.processes)
    rows = [[str(length), f"{more:.2f}"] for length, more in zip(LENGTHS, result["seconds_beyond_a_step"], strict=True)]
    emit(result, make_table("new lengths", ["length", "seconds beyond a step"], rows), given.json, given.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
