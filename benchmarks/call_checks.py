"""What it costs that ranks compare each call before they make it, and that calls are watched.

    python -m benchmarks.call_checks [--rounds N] [--json] [--output FILE]

Local processes train stacks of transformer layers, a small one whose steps are short, where the cost shows most, and a
larger one. Rounds of steps alternate between models with all checks (the default, and values of inputs compared at each
call) and without any; what is given are medians, and the seconds of the exchange with which each call begins, alone.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table

import autopar
from autopar import Options
from autopar.runtime.comm.exchange import Exchange
from autopar.runtime.launch import run_local

from .memory import Block
from .report import describe_machine, emit, make_table

STEPS, EXCHANGES = 5, 100
# Widths of the two models.
WIDTHS = (64, 256)
VARIANTS: dict[str, dict[str, Any]] = {
    "without": {"check_inputs": "never", "timeout": 0},
    "watch": {"check_inputs": "never"},
    "watch and checks": {},
    "values at each call": {"check_inputs": "always"},
}
# Of :class:`autopar.runtime.calls.input_checks.InputChecks`.
EXCHANGED = bytes(33)


def work(rank: int, world: int, width: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of a step by variant, and of the exchange."""
    x, models = torch.randn(8, 32, width, generator=torch.Generator().manual_seed(0)), {}
    for name, options in VARIANTS.items():
        torch.manual_seed(0)
        plain = torch.nn.Sequential(*[Block(width, 4) for _ in range(2)])
        models[name] = autopar.parallelize(
            plain, (world,), (x,), options=Options(zero=1, stages=1, **options), loss_fn=lambda y: y.pow(2).mean()
        )
        for _ in range(STEPS):
            models[name].step(x)
    seconds: dict[str, list[float]] = {name: [] for name in (*VARIANTS, "exchange")}
    exchange = Exchange(models["without"].autopar_parts.weights.groups)
    for _ in range(rounds):
        for name, model in models.items():
            seconds[name].append(mean_seconds(lambda model=model: model.step(x), STEPS))
        seconds["exchange"].append(mean_seconds(lambda: exchange.all_bytes(EXCHANGED), EXCHANGES))
    return seconds


def mean_seconds(function: Any, count: int) -> float:
    """Of so many calls that all ranks begin together."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(count):
        function()
    return (time.perf_counter() - begin) / count


def figures(rounds: int) -> dict[str, Any]:
    """All figures of a run."""
    rows = []
    for processes in (2, 4):
        for width in WIDTHS:
            found = run_local(work, processes, timeout=600, args=(width, rounds))[0]
            medians = {name: statistics.median(values) for name, values in found.items()}
            rows.append({
                "processes": processes, "width": width, "exchange_seconds": medians.pop("exchange"),
                "step_seconds": medians,
                "against_without": {name: value / medians["without"] for name, value in medians.items()},
            })  # fmt: skip
    return {"benchmark": "call_checks", "machine": describe_machine(), "rounds": rounds, "steps": STEPS, "rows": rows}


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """For people."""
    cells = [
        [f"{row['processes']} processes, width {row['width']}", f"{1e3 * row['exchange_seconds']:.2f} ms"]
        + [f"{1e3 * row['step_seconds'][name]:.1f} ms ({row['against_without'][name]:.3f})" for name in VARIANTS]
        for row in rows
    ]
    return make_table("a step, and the exchange at its beginning", ["", "exchange", *VARIANTS], cells)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--output", help="also write the JSON to this file")
    given = parser.parse_args(arguments)
    found = figures(given.rounds)
    emit(found, table(found["rows"]), given.json, given.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
