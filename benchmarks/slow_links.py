"""Seconds to a loss over slow links: the exchanges of ``Options(sync=...)`` beside gradients of every step.

    sudo python -m benchmarks.slow_links [--megabits 100] [--target 3.0] [--only NAME ...] [--json] [--output FILE]

Emulated hosts (:mod:`.emulated_hosts`) of one process each train the model of ``examples/demo.py`` on the same batches,
one exchange after the other, from the same weights, until the loss of a batch that is not trained on falls below the
target. Every few steps each host computes that loss with its own weights; the figure is the first host's. This is not
counted in the seconds, nor are planning and compiling. An exchange beside steps goes on beside it too, which is
why its seconds are reported.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaForCausalLM

import autopar
from autopar import DiLoCo, Gossip, LocalSGD, Options, PowerSGD, TopK
from autopar.cluster.description import Cluster, Link

from .emulated_hosts import emulated_hosts, run_on_hosts
from .report import describe_machine, emit, make_table
from .two_hosts import EFFICIENCY, LATENCY

HOSTS = 2
# Steps between two looks at the loss that is not trained on. Chosen: looks take less than a tenth of the time.
LOOK = 5
RATE = 1e-3
OUTER = partial(torch.optim.SGD, lr=0.7, momentum=0.6, nesterov=True)
EVERY_STEP = "every-step"
EXCHANGES: Mapping[str, Any] = {
    EVERY_STEP: EVERY_STEP,
    "LocalSGD, 10 steps": LocalSGD(every=10),
    "LocalSGD, 10 steps, patience": LocalSGD(every=10, patience=60.0),
    "LocalSGD, 10 steps, int8": LocalSGD(every=10, compression="int8"),
    "DiLoCo, 10 steps": DiLoCo(every=10, outer=OUTER),
    "DiLoCo, 10 steps, bf16": DiLoCo(every=10, outer=OUTER, compression="bf16"),
    "DiLoCo, 10 steps, top 5 %": DiLoCo(every=10, outer=OUTER, compression=TopK(0.05)),
    "DiLoCo, 10 steps, PowerSGD 8": DiLoCo(every=10, outer=OUTER, compression=PowerSGD(8)),
    "DiLoCo, 10 steps, 4 fragments beside 2": DiLoCo(every=10, outer=OUTER, fragments=4, delay=2),
    "LocalSGD, 10 steps, at most 5 late": LocalSGD(every=10, staleness=5, mix=0.5),
    "Gossip, 4 steps": Gossip(every=4),
    "Gossip, each step, int8": Gossip(every=1, compression="int8"),
}


def demo() -> ModuleType:
    """``examples/demo.py``, which is no package."""
    path = Path(__file__).parent.parent / "examples" / "demo.py"
    found = importlib.util.spec_from_file_location("autopar_demo", path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def slow_cluster(megabits: int) -> Cluster:
    """This machine's calibration, and a link of ``megabits`` per second between hosts of one process."""
    local = Cluster.get("local")
    inside = replace(local.links[0], name="host", size=1)
    between = Link("network", None, EFFICIENCY * megabits * 1e6 / 8, LATENCY, adapters=1)
    source = f"{local.source}; {megabits} Mbit/s between hosts"
    return replace(local, name="slow-links", source=source, links=(inside, between), algorithms=("direct",))


def train(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Trains under one exchange; what this rank saw. The clock stands while the loss is looked at."""
    made, target = demo(), arguments.target
    data = made.batches(made.read_corpus(), "cpu")
    held = next(made.batches(made.read_corpus(), "cpu", seed=1))
    torch.manual_seed(0)
    options = Options(sync=EXCHANGES[name], seed=0)
    mesh = init_device_mesh("cpu", (HOSTS, 1))
    first = next(data)
    model = autopar.parallelize(
        LlamaForCausalLM(made.CONFIG), mesh, first, options=options, cluster=slow_cluster(arguments.megabits)
    )
    optimizer = model.optimizer(torch.optim.AdamW, lr=RATE, foreach=False)
    look(model, held)  # Compiles it.
    seconds, looking, curve = 0.0, 0.0, [(0, 0.0, look(model, held))]
    for step in range(1, arguments.steps + 1):
        begin = time.perf_counter()
        optimizer.zero_grad()
        model.step(**next(data))
        optimizer.step()
        seconds += time.perf_counter() - begin
        if step % LOOK == 0:
            begin = time.perf_counter()
            curve.append((step, seconds, look(model, held)))
            done = same(curve[-1][2] < target or seconds > arguments.seconds)
            looking += time.perf_counter() - begin
            if done:
                break
    return {"curve": curve, "looking_seconds": looking, "plan": model.plan}


def look(model: autopar.ParallelModule, held: Mapping[str, torch.Tensor]) -> float:
    """The loss of a batch that is not trained on."""
    model.eval()
    with torch.no_grad():
        loss = float(model(**held).loss)
    model.train()
    return loss


def same(decision: bool) -> bool:
    """The first rank's."""
    box = torch.tensor(int(decision))
    dist.broadcast(box, 0)
    return bool(box)


def run(arguments: argparse.Namespace) -> None:
    """What each process does."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    found, begin = {}, time.perf_counter()
    for name in arguments.only or EXCHANGES:
        if same(time.perf_counter() - begin < arguments.budget):
            found[name] = train(name, arguments)
    if dist.get_rank() == 0:
        report(found, arguments)
    dist.barrier()
    dist.destroy_process_group()


def row(outcome: Mapping[str, Any], target: float) -> dict[str, Any]:
    """The figures of one exchange; seconds to the target between two looks by a straight line."""
    curve, sync = outcome["curve"], outcome["plan"].sync
    steps, seconds, loss = curve[-1]
    reached = None
    if loss < target:
        _, before, above = curve[-2]
        reached = before + (seconds - before) * (above - target) / (above - loss)
    return {
        "seconds_to_target": reached,
        "steps": steps,
        "seconds_per_step": seconds / steps,
        "last_loss": loss,
        "predicted_bytes_per_step": None if sync is None else sync.bytes_per_step,
        "predicted_exchange_seconds_per_step": None if sync is None else sync.seconds_per_step,
        "looking_seconds": outcome["looking_seconds"],
        "curve": [{"step": step, "seconds": at, "loss": value} for step, at, value in curve],
    }


def report(found: Mapping[str, Mapping[str, Any]], arguments: argparse.Namespace) -> None:
    """Prints and writes the figures."""
    made, rows = demo(), {name: row(outcome, arguments.target) for name, outcome in found.items()}
    base = rows.get(EVERY_STEP, {}).get("seconds_to_target")
    for each in rows.values():
        reached = each["seconds_to_target"]
        each["times_faster"] = base / reached if base and reached else None
    figures = {
        "benchmark": "slow_links",
        "model": f"Llama of examples/demo.py, batch {made.BATCH} x {made.SEQUENCE}, fp32, AdamW {RATE}",
        "hosts": f"{HOSTS} of 1 process, {arguments.megabits} Mbit/s",
        "target": arguments.target,
        "machine": describe_machine(),
        "exchanges": rows,
    }
    shown = [
        (
            name,
            f"{each['seconds_to_target']:.1f}" if each["seconds_to_target"] else "not reached",
            f"{each['times_faster']:.1f}" if each["times_faster"] else "",
            str(each["steps"]),
            f"{each['seconds_per_step'] * 1e3:.0f}",
            f"{each['last_loss']:.2f}",
        )
        for name, each in rows.items()
    ]
    title = f"{figures['model']}; {figures['hosts']}; to a loss of {arguments.target}"
    table = make_table(title, ("exchange", "seconds", "times faster", "steps", "ms a step", "last loss"), shown)
    emit(figures, table, arguments.json, arguments.output)


def main(words: Sequence[str]) -> int:
    """Sets the hosts up and starts their processes, unless this is one of them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slow_links", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--output", metavar="FILE", help="write the JSON there as well")
    parser.add_argument("--megabits", type=int, default=100, help="rate of each host's outgoing link")
    parser.add_argument("--target", type=float, default=3.0, help="the loss to reach")
    parser.add_argument("--steps", type=int, default=200, help="at most so many steps each")
    parser.add_argument("--seconds", type=float, default=90.0, help="at most so many seconds each")
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds after which no other exchange begins")
    parser.add_argument("--only", nargs="*", choices=list(EXCHANGES), help="these exchanges; all by default")
    arguments = parser.parse_args(words)
    if "RANK" in os.environ:
        run(arguments)
        return 0
    if os.geteuid() != 0:
        parser.error("making network namespaces needs root")
    with emulated_hosts(HOSTS, arguments.megabits):
        return run_on_hosts(HOSTS, 1, "benchmarks.slow_links", words, timeout=1800.0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
