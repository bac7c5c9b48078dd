"""Step time of the demo's Llama under torch's own parallelisms and under autopar, on the same four processes.

    python -m benchmarks.step_time [--json] [--output FILE] [--variants DDP TP ...]

All variants live in one run and take turns in an order drawn anew every round (the same on all processes), so that
a busy machine slows all of them alike and none always inherits the caches and the allocator of the same other. A figure
is the median over the rounds; a step takes as long as its slowest process. Before anything is timed, each variant must
follow the losses of a single process on the same batch.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM

from examples.demo import BATCH, CONFIG, SEQUENCE, batches, read_corpus

from .local_ranks import run_as_ranks
from .report import describe_machine, emit, make_table
from .variants import TORCH_VARIANTS, VARIANTS, Batch, Step, single_process

PROCESSES = 4
WARMUP_STEPS = 3
LOSS_TOLERANCE = 1e-4


def make_model(device: str) -> LlamaForCausalLM:
    """The demo's model with the same weights every time."""
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG).to(device)


def losses(step: Step, count: int) -> torch.Tensor:
    """Losses of ``count`` steps on the global batch, float64 [count]: the mean over equal slices."""
    values = [step() for _ in range(count)]
    local = [value.full_tensor() if isinstance(value, DTensor) else value for value in values]
    found = torch.stack([value.double() for value in local])
    dist.all_reduce(found)
    return found / dist.get_world_size()


def make_steps(names: Sequence[str], batch: Batch, device: str) -> dict[str, Step]:
    """The steps of the variants, warmed up, each shown to train as a single process does."""
    expected = losses(single_process(make_model(device), batch, device), WARMUP_STEPS)
    steps = {}
    for name in names:
        steps[name] = VARIANTS[name](make_model(device), batch, device)
        error = float((losses(steps[name], WARMUP_STEPS) / expected - 1).abs().max())
        if error > LOSS_TOLERANCE:
            raise RuntimeError(f"{name} does not train like one process: losses differ by {error:.1e} (relative)")
    return steps


def timed(step: Step, count: int, device: str) -> float:
    """Seconds per step of ``count`` steps in a row, on the slowest process."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(count):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = torch.tensor((time.perf_counter() - start) / count, dtype=torch.float64, device=device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def measure(steps: Mapping[str, Step], rounds: int, count: int, device: str) -> dict[str, list[float]]:
    """Seconds per step of every variant in every round."""
    order = list(steps)
    found: dict[str, list[float]] = {name: [] for name in order}
    for index in range(rounds):
        for name in random.Random(index).sample(order, len(order)):
            found[name].append(timed(steps[name], count, device))
    return found


def summarise(seconds: Mapping[str, Sequence[float]]) -> dict[str, dict[str, object]]:
    """Median, quartiles and the ratio to the best of torch's variants, by variant."""
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    rivals = [medians[name] for name in TORCH_VARIANTS if name in medians]
    best = min(rivals or medians.values())
    return {
        name: {
            "median_seconds": medians[name],
            "quartiles_seconds": statistics.quantiles(values, n=4) if len(values) > 1 else list(values),
            "ratio_to_best_torch": medians[name] / best,
            "seconds": list(values),
        }
        for name, values in seconds.items()
    }


def run(arguments: argparse.Namespace) -> None:
    """What each of the four processes does."""
    device = "cuda" if torch.cuda.device_count() >= PROCESSES else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    torch.set_num_threads(1)
    batch = next(batches(read_corpus(), device))
    steps = make_steps(arguments.variants, batch, device)
    seconds = measure(steps, arguments.rounds, arguments.steps, device)
    if dist.get_rank() == 0:
        report(summarise(seconds), arguments)
    dist.barrier()
    dist.destroy_process_group()


def report(variants: Mapping[str, Mapping[str, object]], arguments: argparse.Namespace) -> None:
    """Prints and writes the figures."""
    parameters = sum(parameter.numel() for parameter in make_model("cpu").parameters())
    figures = {
        "benchmark": "step_time",
        "model": f"Llama, {parameters / 1e6:.1f}M parameters, batch {BATCH} x {SEQUENCE}, fp32, AdamW",
        "processes": PROCESSES,
        "rounds": arguments.rounds,
        "steps_per_round": arguments.steps,
        "machine": describe_machine(),
        "variants": variants,
    }
    rows = []
    for name, figure in sorted(variants.items(), key=lambda item: float(str(item[1]["median_seconds"]))):
        milliseconds = float(str(figure["median_seconds"])) * 1e3
        rows.append((name, f"{milliseconds:.1f}", f"{float(str(figure['ratio_to_best_torch'])):.2f}"))
    caption = f"median of {arguments.rounds} interleaved rounds of {arguments.steps} steps"
    table = make_table(str(figures["model"]), ("variant", "ms per step", "x best torch"), rows, caption)
    emit(figures, table, arguments.json, arguments.output)


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_time", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--output", metavar="FILE", help="write the JSON there as well")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--steps", type=int, default=3, help="steps in a row of one variant within a round")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    return parser.parse_args(words)


def main(words: Sequence[str]) -> int:
    """Starts four processes of itself, unless this is one of them."""
    arguments = parse(words)
    return run_as_ranks("benchmarks.step_time", words, PROCESSES, lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
