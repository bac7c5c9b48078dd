"""Four processes: autopar, uncompiled and compiled, against torch's own parallelisms each with ``torch.compile``.

    python -m benchmarks.compiled_peers [--models GPT-2 Llama] [--rounds 12] [--json] [--output FILE]

DDP's model and the tensor parallel one are compiled whole, FSDP2's layer by layer, as their documentation has it.
autopar runs the plan that it finds for a mesh of four. Variants take turns in one run, as in
:mod:`benchmarks.step_time`, and must first follow the losses of a single process. A peer that torch cannot run, or that
computes something else, is left out, and the figures say why.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import autopar

from .local_ranks import run_as_ranks
from .report import describe_machine, emit, make_table
from .step_time import LOSS_TOLERANCE, WARMUP_STEPS, losses, measure, summarise
from .variants import Batch, Step, parallel_step, shard_heads, slice_of, training_step

PROCESSES, DEVICE = 4, "cpu"
# Chosen: products of some milliseconds, as a step's; four processes share the cores.
WIDTH, LAYERS, HEADS, VOCABULARY, ROWS, LENGTH = 256, 4, 8, 2048, 16, 128


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=704, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=4, max_position_embeddings=LENGTH, use_cache=False,
    )  # fmt: skip
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


MODELS: Mapping[str, Callable[[], nn.Module]] = {"GPT-2": gpt2, "Llama": llama}


def make_batch() -> dict[str, torch.Tensor]:
    """The global batch, the same on all processes."""
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def layers_of(model: Any) -> nn.ModuleList:
    layers: nn.ModuleList = model.transformer.h if hasattr(model, "transformer") else model.model.layers
    return layers


def ddp(model: nn.Module, batch: Batch) -> Step:
    own = slice_of(batch, dist.get_rank(), PROCESSES)
    compiled: Any = torch.compile(DistributedDataParallel(model))
    return training_step(compiled, own)


def fsdp(model: nn.Module, batch: Batch) -> Step:
    mesh = init_device_mesh(DEVICE, (PROCESSES,))
    for layer in layers_of(model):
        layer.compile()
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return training_step(model, slice_of(batch, dist.get_rank(), PROCESSES))


def tp(model: Any, batch: Batch) -> Step:
    """Megatron's plan, for a Llama. GPT-2's one product for queries, keys and values is a layer of transformers' own
    (Conv1D), which torch's styles do not take."""
    if not isinstance(model, transformers.LlamaForCausalLM):
        raise NotImplementedError("torch's styles take no Conv1D")
    shard_heads(model, init_device_mesh(DEVICE, (PROCESSES,))).compile()
    return training_step(model, batch)


def own(compiled: bool) -> Callable[[nn.Module, Batch], Step]:
    def make(model: nn.Module, batch: Batch) -> Step:
        mesh, options = init_device_mesh(DEVICE, (PROCESSES,)), autopar.Options(compile=compiled)
        return parallel_step(autopar.parallelize(model, mesh, example_inputs=dict(batch), options=options), batch)

    return make


PEERS: Mapping[str, Callable[[Any, Batch], Step]] = {"DDP": ddp, "FSDP2": fsdp, "TP": tp}
VARIANTS = {**PEERS, "autopar": own(False), "autopar compiled": own(True)}


def make_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def make_steps(model: str) -> tuple[dict[str, Step], dict[str, float], dict[str, str]]:
    """The steps of the variants, each shown to train as one process does; the seconds until each was ready, compiling
    included; and why others are left out."""
    batch = make_batch()
    expected = losses(training_step(make_model(model), batch), WARMUP_STEPS)
    steps, ready, missing = {}, {}, {}
    for name, make in VARIANTS.items():
        start = time.perf_counter()
        try:
            step = make(make_model(model), batch)
            error = float((losses(step, WARMUP_STEPS) / expected - 1).abs().max())
        except Exception as failure:
            if name not in PEERS:
                raise
            missing[name] = f"{type(failure).__name__}: {str(failure).splitlines()[0]}"
            continue
        if error < LOSS_TOLERANCE:
            steps[name], ready[name] = step, time.perf_counter() - start
        elif name in PEERS:
            missing[name] = f"its losses differ from one process's by {error:.1e} (relative)"
        else:
            raise RuntimeError(f"{name} does not train like one process: losses differ by {error:.1e} (relative)")
    return steps, ready, missing


def figures_of(model: str, rounds: int, count: int) -> dict[str, object]:
    steps, ready, missing = make_steps(model)
    found = summarise(measure(steps, rounds, count, DEVICE))
    return {"variants": found, "seconds_until_ready": ready, "left_out": missing}


def report(models: Mapping[str, dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Prints and writes the figures."""
    rows = []
    for model, figures in models.items():
        for name, found in sorted(figures["variants"].items(), key=lambda item: item[1]["median_seconds"]):
            title = name if name.startswith("autopar") else f"{name}, torch.compile"
            cells = f"{found['median_seconds'] * 1e3:.1f}", f"{found['ratio_to_best_torch']:.2f}"
            rows.append((model, title, *cells, f"{figures['seconds_until_ready'][name]:.0f}"))
        rows += [(model, name, "-", "-", why) for name, why in figures["left_out"].items()]
    caption = f"median of {arguments.rounds} interleaved rounds of {arguments.steps} steps, {PROCESSES} processes"
    columns = ("model", "variant", "ms per step", "x best peer", "seconds until ready")
    table = make_table("Four processes, peers with torch.compile", columns, rows, caption)
    figures = {"benchmark": "compiled_peers", "processes": PROCESSES, "rounds": arguments.rounds}
    emit({**figures, "machine": describe_machine(), "models": models}, table, arguments.json, arguments.output)


def run(arguments: argparse.Namespace) -> None:
    """What each process does."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    found = {name: figures_of(name, arguments.rounds, arguments.steps) for name in arguments.models}
    if dist.get_rank() == 0:
        report(found, arguments)
    dist.barrier()
    dist.destroy_process_group()


def main(words: Sequence[str]) -> int:
    """Starts four processes of itself, unless this is one of them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compiled_peers")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=3, help="steps in a row of one variant within a round")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--output", metavar="FILE", help="write the JSON there as well")
    arguments = parser.parse_args(words)
    return run_as_ranks("benchmarks.compiled_peers", words, PROCESSES, lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
