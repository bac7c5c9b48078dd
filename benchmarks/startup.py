"""From the start of a script to its first step: with an empty cache, with a filled one, and under DDP.

    python -m benchmarks.startup --output benchmarks/results/startup.json

Each row is one run of torchrun with 4 gloo processes. ``first_step_seconds`` is counted from before torchrun starts,
``second_model_seconds`` is what another model of the same kind takes in the same processes, construction included. The
runs of one model follow one another, so ratios between them count, and seconds depend on the machine.
``processor_seconds`` are those of all processes of a run, with both models: other work on the machine moves them less.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

PROCESSES = 4


def _llama() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model of examples/demo.py."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=128,
        use_cache=False,
    )
    ids = torch.randint(256, (16, 128))
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


def _gpt2() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=4, use_cache=False)
    ids = torch.randint(256, (8, 32))
    return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}


MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, torch.Tensor]]]] = {"demo llama": _llama, "tiny gpt2": _gpt2}


def _step(kind: str, name: str) -> None:
    """Makes a model, and one step of it."""
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    if kind == "ddp":
        parallel = nn.parallel.DistributedDataParallel(model)
        parallel(**batch).loss.backward()
        return
    import autopar

    autopar.parallelize(model, (PROCESSES,)).step(**batch)


def worker(kind: str, name: str, started: float) -> None:
    """What each rank runs; the first prints figures."""
    torch.distributed.init_process_group("gloo")
    _step(kind, name)
    first = time.time() - started
    torch.distributed.barrier()
    again = time.perf_counter()
    _step(kind, name)
    second = time.perf_counter() - again
    if torch.distributed.get_rank() == 0:
        print(json.dumps({"first_step_seconds": round(first, 2), "second_model_seconds": round(second, 2)}))
    torch.distributed.destroy_process_group()


def run(kind: str, name: str, cache: str) -> dict[str, Any]:
    """One run of torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(PROCESSES)]
    command += ["-m", "benchmarks.startup", "--worker", kind, "--model", name, "--started", str(time.time())]
    environment = {**os.environ, "AUTOPAR_CACHE": cache, "OMP_NUM_THREADS": "1"}
    # As for an installed package: otherwise every process compiles the checkout again.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-4000:])
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {**found, "processor_seconds": round(spent, 1)}


def measure(name: str) -> dict[str, Any]:
    """All runs of one model."""
    with tempfile.TemporaryDirectory() as cache:
        run("ddp", name, cache)  # Whatever is read for the first time is in memory then.
        runs = {"cold": run("autopar", name, cache), "ddp": run("ddp", name, cache)}
        runs["warm"] = run("autopar", name, cache)
        runs["off"] = run("autopar", name, "off")
    ddp = runs["ddp"]["first_step_seconds"]
    own = {kind: found["first_step_seconds"] for kind, found in runs.items() if kind != "ddp"}
    return {
        "model": name,
        "processes": PROCESSES,
        "runs": runs,
        "first_step_relative_to_ddp": {kind: round(seconds / ddp, 2) for kind, seconds in own.items()},
        "first_step_seconds_beyond_ddp": {kind: round(seconds - ddp, 2) for kind, seconds in own.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--worker", choices=("autopar", "ddp"), help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--model", choices=MODELS)
    asked = parser.parse_args()
    if asked.worker:
        worker(asked.worker, asked.model, asked.started)
        return
    found = [measure(name) for name in ([asked.model] if asked.model else MODELS)]
    text = json.dumps({"torch": torch.__version__, "cores": os.cpu_count(), "rows": found}, indent=1)
    print(text)
    if asked.output:
        asked.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
