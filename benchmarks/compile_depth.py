"""Seconds that compiling takes against the number of layers: equal layers are compiled once, so it should be flat.

    python -m benchmarks.compile_depth [--layers 2 4 8 16] [--json] [--output FILE]

A Llama in one process. Each depth runs in a process of its own with empty caches. Compiling happens in the first step;
its seconds are those of the first step less those of the third. Without compiling, the same difference is what a first
step costs anyway.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh

import autopar

from .one_process import step_of, tokens
from .report import describe_machine, emit, make_table


def seconds_of(layers: int, compiled: bool) -> dict[str, float]:
    """Seconds of the first and of the third step."""
    config = transformers.LlamaConfig(
        vocab_size=2048, hidden_size=256, intermediate_size=688, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    torch.manual_seed(0)
    batch, mesh = tokens(2048, 4, 128), init_device_mesh("cpu", (1,))
    options = autopar.Options(compile=compiled)
    model = autopar.parallelize(transformers.LlamaForCausalLM(config), mesh, example_inputs=batch, options=options)
    step, seconds = step_of(model, batch), []
    for _ in range(3):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return {"first_step": seconds[0], "later_step": seconds[-1], "compiling": seconds[0] - seconds[-1]}


def in_a_process(layers: int, compiled: bool) -> dict[str, float]:
    """:func:`seconds_of` in a process with caches of its own."""
    words = [sys.executable, "-m", "benchmarks.compile_depth", "--only", str(layers), "--compile", str(int(compiled))]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "AUTOPAR_CACHE": "off", "TORCHINDUCTOR_CACHE_DIR": folder}
        found = subprocess.run(words, env=environment, check=True, capture_output=True, text=True).stdout
    result: dict[str, float] = json.loads(found.splitlines()[-1])
    return result


def alone(layers: int, compiled: bool) -> None:
    """What a process of :func:`in_a_process` does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    print(json.dumps(seconds_of(layers, compiled)))
    dist.destroy_process_group()


def report(rows: Sequence[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Prints and writes the figures."""
    cells = [(str(r["layers"]), f"{r['compiled']['compiling']:.1f}", f"{r['as_it_is']['compiling']:.1f}") for r in rows]
    table = make_table("Seconds of compiling, Llama", ("layers", "compiled", "uncompiled"), cells)
    figures = {"benchmark": "compile_depth", "machine": describe_machine(), "depths": list(rows)}
    emit(figures, table, arguments.json, arguments.output)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compile_depth")
    parser.add_argument("--layers", nargs="+", type=int, default=[2, 4, 8, 16])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--output", metavar="FILE", help="write the JSON there as well")
    parser.add_argument("--only", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--compile", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if arguments.only is not None:
        alone(arguments.only, bool(arguments.compile))
        return 0
    rows = [
        {"layers": count, "compiled": in_a_process(count, True), "as_it_is": in_a_process(count, False)}
        for count in arguments.layers
    ]
    report(rows, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
