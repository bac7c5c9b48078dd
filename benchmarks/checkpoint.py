"""Checkpoints: seconds to save and load against plain torch.distributed.checkpoint, and steps beside a save.

    python -m benchmarks.checkpoint [--rounds N] [--width W] [--json] [--output FILE]

Two local processes have a stack of transformer layers under ZeRO-3 and AdamW. Each round saves and loads with both, and
runs as many steps with an asynchronous save at their start as without; what is given are medians, and their ratios.
autopar's files are flushed to the disk and hashed, and hashes are compared on loading; torch's are flushed alone.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as torch_load
from torch.distributed.checkpoint.state_dict_saver import save as torch_save

import autopar
from autopar import Options, checkpoint
from autopar.runtime.launch import run_local

from .memory import Block
from .report import describe_machine, emit, make_table

PROCESSES = 2
# Steps that a save runs beside. Chosen: as many as outlast the writing, and more.
STEPS = 20


def timed(function: Callable[[], object]) -> float:
    """Seconds until all ranks are done."""
    dist.barrier()
    begin = time.perf_counter()
    function()
    dist.barrier()
    return time.perf_counter() - begin


def work(rank: int, world: int, folder: str, width: int, rounds: int) -> dict[str, Any]:
    """The figures of one rank."""
    torch.manual_seed(0)
    plain = torch.nn.Sequential(*[Block(width, 8) for _ in range(4)])
    x = torch.randn(4, 64, width)
    options = Options(zero=3, stages=1, check_inputs="never")
    model = autopar.parallelize(plain, (world,), (x,), options=options, loss_fn=lambda y: y.pow(2).mean())
    optimizer = model.optimizer(torch.optim.AdamW, lr=1e-4)

    def steps() -> None:
        for _ in range(STEPS):
            model.step(x)
            optimizer.step()
            optimizer.zero_grad()

    def with_torch(path: Path, load: bool) -> None:
        parameters, state = get_state_dict(model, optimizer)
        both = {"model": parameters, "optimizer": state}
        (torch_load if load else torch_save)(both, checkpoint_id=path)
        if load:
            set_state_dict(model, optimizer, model_state_dict=parameters, optim_state_dict=state)

    steps()
    seconds: dict[str, list[float]] = {}
    for number in range(rounds):
        ours, theirs = Path(folder, f"ours{number}"), Path(folder, f"torch{number}")

        def note(name: str, function: Callable[[], object]) -> None:
            seconds.setdefault(name, []).append(timed(function))

        note("torch save", lambda path=theirs: with_torch(path, load=False))  # type: ignore[misc]
        note("save", lambda path=ours: checkpoint.save(path, model, optimizer, step=1))  # type: ignore[misc]
        note("torch load", lambda path=theirs: with_torch(path, load=True))  # type: ignore[misc]
        note("load", lambda path=ours: checkpoint.load(path, model, optimizer))  # type: ignore[misc]
        load_fast = lambda path=ours: checkpoint.load(path, model, optimizer, verify=False)  # noqa: E731
        note("load, not verified", load_fast)
        note("steps", steps)
        with checkpoint.Checkpointer(Path(folder, f"beside{number}"), model, optimizer, every=1) as kept:

            def beside(kept: checkpoint.Checkpointer = kept) -> None:
                kept.step(1)
                steps()

            note("steps and a save beside them", beside)
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder)
            Path(folder).mkdir()
        dist.barrier()
    size = sum(3 * p.numel() * p.element_size() for p in model.parameters())
    return {"bytes": size, "seconds": seconds}


def figures(width: int, rounds: int) -> dict[str, Any]:
    """All figures of a run."""
    with tempfile.TemporaryDirectory() as folder:
        found = run_local(work, PROCESSES, timeout=3000, args=(folder, width, rounds))[0]
    medians = {name: statistics.median(values) for name, values in found["seconds"].items()}
    return {
        "machine": describe_machine(),
        "processes": PROCESSES,
        "rounds": rounds,
        "steps": STEPS,
        "bytes": found["bytes"],
        "seconds": medians,
        "gigabytes_per_second": {
            name: found["bytes"] / medians[name] / 1e9 for name in medians if not name.startswith("steps")
        },
        "save_against_torch": medians["save"] / medians["torch save"],
        "load_against_torch": medians["load"] / medians["torch load"],
        "load_not_verified_against_torch": medians["load, not verified"] / medians["torch load"],
        "steps_beside_a_save": medians["steps and a save beside them"] / medians["steps"],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=768, help="of the layers, of which there are four")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--output", help="also write the JSON to this file")
    given = parser.parse_args(arguments)
    result = figures(given.width, given.rounds)
    rates = result["gigabytes_per_second"]
    rows = [
        [name, f"{value:.3f}", f"{rates[name]:.2f}" if name in rates else ""]
        for name, value in result["seconds"].items()
    ]
    caption = (
        f"{result['bytes'] / 1e6:.0f} MB; save {result['save_against_torch']:.2f} and load "
        f"{result['load_against_torch']:.2f} of torch's time; steps beside a save {result['steps_beside_a_save']:.3f}"
    )
    emit(result, make_table("checkpoints", ["what", "seconds", "GB/s"], rows, caption), given.json, given.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
