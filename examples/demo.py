"""Trains an unmodified Hugging Face Llama on every core of this machine, from one call.

    autopar run --nproc 4 examples/demo.py

A byte-level language model learns the source files of Python's standard library on 4 local processes, a
2 x 2 mesh. It prints the plan that was solved for it, trains, compares predicted with measured step time, and
finally computes one step in a single process too, to check that the loss and every gradient are the same.
"""

from __future__ import annotations

import math
import statistics
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

import autopar

MESH = (2, 2)
BATCH, SEQUENCE, STEPS = 16, 128, 120
LEARNING_RATE = 1e-3
TOLERANCE = 1e-5

CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=SEQUENCE,
    use_cache=False,
)


def read_corpus() -> torch.Tensor:
    """The bytes of the standard library's own source files, one after the other: uint8 [n]."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def batches(corpus: torch.Tensor, device: str, seed: int = 0) -> Iterator[dict[str, torch.Tensor]]:
    """Random windows of the corpus, int64 [BATCH, SEQUENCE]. Every process draws the same global batch."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(corpus) - SEQUENCE, (BATCH, 1), generator=generator)
        windows = corpus[starts + torch.arange(SEQUENCE)].long().to(device)
        yield {"input_ids": windows, "labels": windows}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor that may be spread over the mesh."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compare_with_one_process(model: autopar.ParallelModule, batch: dict[str, torch.Tensor]) -> tuple[float, float, int]:
    """One step of ``model`` beside the same step of the original in a single process.

    Returns:
        The relative error of the loss, the largest of any gradient (``max|a - b| / max|b|``), their number.
    """
    original = LlamaForCausalLM(CONFIG).to(batch["input_ids"].device)
    original.load_state_dict({name: model.full_tensor(value) for name, value in model.state_dict().items()})
    expected = original(**batch).loss
    expected.backward()

    model.zero_grad()
    loss = whole(model.step(**batch)).detach()
    errors = []
    for (name, ours), (other, reference) in zip(model.named_parameters(), original.named_parameters(), strict=True):
        assert name == other and ours.grad is not None and reference.grad is not None
        errors.append(float((model.full_tensor(ours.grad) - reference.grad).abs().max() / reference.grad.abs().max()))
    return float(((loss - expected).abs() / expected.abs()).detach()), max(errors), len(errors)


def train(model: autopar.ParallelModule, data: Iterator[dict[str, torch.Tensor]], console: Console) -> list[float]:
    """Trains for STEPS steps and returns how many seconds each took."""
    optimizer = model.optimizer(torch.optim.AdamW, lr=LEARNING_RATE)
    seconds: list[float] = []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=STEPS, figures="")
        for _ in range(STEPS):
            batch = next(data)
            start = time.perf_counter()
            optimizer.zero_grad()
            loss = whole(model.step(**batch)).item()
            optimizer.step()
            seconds.append(time.perf_counter() - start)
            figures = f"loss {loss:.3f}   {BATCH * SEQUENCE / seconds[-1]:,.0f} tokens/s"
            progress.update(task, advance=1, figures=figures)
    console.print(f"loss {loss:.3f} after {STEPS} steps of {BATCH} x {SEQUENCE} bytes")
    return seconds


def main() -> int:
    device = "cuda" if torch.cuda.device_count() >= math.prod(MESH) else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, MESH)
    console = Console(quiet=dist.get_rank() != 0)

    torch.manual_seed(0)
    data = batches(read_corpus(), device)
    model = LlamaForCausalLM(CONFIG)
    model = autopar.parallelize(model, mesh, example_inputs=next(data))  # the one call
    console.print(str(model.plan), markup=False, highlight=False, soft_wrap=True)

    seconds = train(model, data, console)
    predicted, measured = model.plan.predicted.step_seconds, statistics.median(seconds[STEPS // 4 :])
    console.print(f"step time: predicted {predicted * 1e3:.0f} ms, measured {measured * 1e3:.0f} ms (median)")

    loss_error, gradient_error, count = compare_with_one_process(model, next(data))
    same = loss_error <= TOLERANCE and gradient_error <= TOLERANCE
    console.print(
        f"{'the same as' if same else 'DIFFERS FROM'} one process: loss within {loss_error:.1e}, "
        f"all {count} gradients within {gradient_error:.1e} (relative)",
        style="green" if same else "bold red",
    )
    dist.destroy_process_group()
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
