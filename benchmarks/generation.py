"""Tokens per second of generation, beside transformers' own ``generate`` in one process.

    python -m benchmarks.generation [--rounds N] [--tokens N] [--json] [--output FILE]

A Llama of random weights generates greedily for a batch of prompts, in one run by: transformers with its default
(dynamic) cache and with its static cache, autopar in one process, and autopar on four processes under the plan that the
search takes, under tensor and under pipeline parallelism. Every process has one thread; four processes share the cores
of the machine. Planning and compilation are not counted. What is given are medians of rounds that alternate between the
ways of one number of processes, the first token included, and ratios to transformers' static cache.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.runtime.launch import run_local

from .report import describe_machine, emit, make_table

CONFIG = LlamaConfig(
    hidden_size=512, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4, intermediate_size=1408,
    vocab_size=8192, pad_token_id=0, eos_token_id=None, bos_token_id=None,
)  # fmt: skip
ROWS, PROMPT = 8, 32
_HEADS = {f"*.{name}_proj": "S(1)" for name in ("q", "k", "v")}
# What autopar is asked for, by name and number of processes.
WAYS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"autopar": {}},
    4: {
        "autopar, as planned": {},
        "autopar, tensor 4": {
            "stages": 1,
            "mesh_search": False,
            "pins": {**_HEADS, "*o_proj.weight": "S(1)", "*down_proj.weight": "S(1)"},
        },
        "autopar, 4 stages": {"stages": 4, "microbatches": 4},
    },
}
Generate = Callable[[], torch.Tensor]


def plain() -> LlamaForCausalLM:
    """The model, the same each time."""
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG).eval()


def ways(processes: int, tokens: int) -> tuple[dict[str, Generate], dict[str, str]]:
    """What generates, by name, and a line on each plan."""
    prompts = torch.randint(1, 8192, (ROWS, PROMPT), generator=torch.Generator().manual_seed(1))
    length = PROMPT + tokens
    made: dict[str, Generate] = {}
    plans: dict[str, str] = {}
    if processes == 1:
        for name, cache in (("transformers, dynamic cache", None), ("transformers, static cache", "static")):
            model = plain()

            def by_transformers(model: Any = model, cache: str | None = cache) -> torch.Tensor:
                tokens_of: torch.Tensor = model.generate(prompts, max_new_tokens=tokens, cache_implementation=cache)
                return tokens_of

            made[name] = by_transformers
    for name, asked in WAYS[processes].items():
        options = autopar.Options(cache_length=length, check_inputs="never", **asked)
        parallel = autopar.parallelize(plain(), (processes,), mode="inference", options=options)

        def by_autopar(model: Any = parallel) -> torch.Tensor:
            tokens_of: torch.Tensor = model.generate(prompts, max_new_tokens=tokens)
            return tokens_of

        made[name] = by_autopar
        by_autopar()
        plan = parallel.plan
        plans[name] = (
            f"{plan.stages} stages of {plan.mesh}, predicted {1e3 * plan.predicted.step_seconds:.1f} ms a token"
        )
    return made, plans


def work(rank: int, processes: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Seconds of each way in each round, and whether all generated the same tokens."""
    made, plans = ways(processes, tokens)
    seconds: dict[str, list[float]] = {name: [] for name in made}
    results = {name: generate() for name, generate in made.items()}
    for _ in range(rounds):
        for name, generate in made.items():
            dist.barrier()
            begin = time.perf_counter()
            generate()
            seconds[name].append(time.perf_counter() - begin)
    return {"seconds": seconds, "plans": plans, "tokens": results}


def figures(rounds: int, tokens: int) -> dict[str, Any]:
    """All figures of a run."""
    rows: list[dict[str, Any]] = []
    right: torch.Tensor | None = None
    for processes in WAYS:
        found = run_local(work, processes, timeout=900, args=(tokens, rounds))[0]
        for name, seconds in found["seconds"].items():
            generated = found["tokens"][name]
            right = generated if right is None else right
            rows.append({
                "processes": processes, "way": name, "tokens_per_second": ROWS * tokens / statistics.median(seconds),
                "seconds": seconds, "same_tokens": torch.equal(generated, right), "plan": found["plans"].get(name, ""),
            })  # fmt: skip
    base = next(row for row in rows if row["way"] == "transformers, static cache")["tokens_per_second"]
    for row in rows:
        row["against_transformers"] = row["tokens_per_second"] / base
    sizes = {
        "rows": ROWS,
        "prompt": PROMPT,
        "tokens": tokens,
        "parameters": sum(p.numel() for p in plain().parameters()),
    }
    sizes["load_average"] = os.getloadavg()[0]  # Of the last minute: above the processes, others were at work too.
    return {"benchmark": "generation", "machine": describe_machine(), "rounds": rounds, **sizes, "ways": rows}


def table(found: dict[str, Any]) -> Table:
    """For people."""
    cells = [
        [
            f"{row['way']}, {row['processes']} process{'es' if row['processes'] > 1 else ''}",
            f"{row['tokens_per_second']:.0f}",
            f"{row['against_transformers']:.2f}",
            "yes" if row["same_tokens"] else "no",
        ]
        for row in found["ways"]
    ]
    return make_table("generation", ["", "tokens/s", "against transformers' static cache", "same tokens"], cells)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--output", help="also write the JSON to this file")
    given = parser.parse_args(arguments)
    found = figures(given.rounds, given.tokens)
    emit(found, table(found), given.json, given.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
