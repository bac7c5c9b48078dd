"""Whether the plan that the search picks for two hosts with a slow link between them is the fastest there.

    sudo python -m benchmarks.two_hosts [--megabits 200] [--json] [--output FILE]

Two emulated hosts (:mod:`.emulated_hosts`) of two processes each. The plan that the search picks, everything free, is
measured beside others that fix stages, schedule, microbatches or ZeRO stage. Prices: the calibration of this
machine inside a host (both hosts share its processors), and between hosts one adapter for all processes of a host, over
which every collective sends each piece directly to each process that needs it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar import Options
from autopar.cluster.description import Cluster, Link

from .emulated_hosts import emulated_hosts, run_on_hosts
from .pipeline_plans import BATCH, PLANS, SEQUENCE, accuracy, accuracy_table, make_batch, make_model, make_step
from .report import describe_machine, emit
from .step_time import measure

HOSTS, PER_HOST = 2, 2
LATENCY = 1e-3
# Of the bits on the wire, what is left for data: Ethernet, IP and TCP headers of packets of 1500 bytes.
EFFICIENCY = 0.95


def two_hosts(megabits: int) -> Cluster:
    """This machine's calibration inside a host, and a link of ``megabits`` per second that its processes share."""
    local = Cluster.get("local")
    inside = replace(local.links[0], name="host", size=PER_HOST)
    between = Link("network", None, EFFICIENCY * megabits * 1e6 / 8, LATENCY, adapters=1)
    source = f"{local.source}; {megabits} Mbit/s between hosts, one adapter for {PER_HOST} processes"
    return replace(local, name="two-hosts", source=source, links=(inside, between), algorithms=("direct",))


def run(arguments: argparse.Namespace) -> None:
    """What each process does."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    mesh, batch = init_device_mesh("cpu", (HOSTS, PER_HOST)), make_batch()
    cluster = two_hosts(arguments.megabits)
    steps, plans = {}, {}
    for name, fixed in PLANS.items():
        model = autopar.parallelize(make_model(), mesh, options=Options(**fixed), cluster=cluster)
        steps[name] = make_step(model, model.optimizer(torch.optim.AdamW, lr=1e-4, foreach=False), batch)
        steps[name]()
        plans[name] = model.plan
    seconds = measure(steps, arguments.rounds, 1, "cpu")
    if dist.get_rank() == 0:
        report(plans, {name: statistics.median(found) for name, found in seconds.items()}, arguments)
    dist.barrier()
    dist.destroy_process_group()


def report(plans: Mapping[str, autopar.Plan], measured: Mapping[str, float], arguments: argparse.Namespace) -> None:
    """Prints and writes the figures."""
    figures = {
        "benchmark": "two_hosts",
        "model": f"GPT-2, 8 layers, width 256, batch {BATCH} x {SEQUENCE}, fp32, AdamW",
        "hosts": f"{HOSTS} of {PER_HOST} processes, {arguments.megabits} Mbit/s",
        "cluster": next(iter(plans.values())).cluster_source,
        "machine": describe_machine(),
        **accuracy(plans, measured),
    }
    table = accuracy_table(f"{figures['model']}, {figures['hosts']}", figures)
    emit(figures, table, arguments.json, arguments.output)


def main(words: Sequence[str]) -> int:
    """Sets the hosts up and starts their processes, unless this is one of them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.two_hosts", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--output", metavar="FILE", help="write the JSON there as well")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabits", type=int, default=200, help="rate of each host's outgoing link")
    arguments = parser.parse_args(words)
    if "RANK" in os.environ:
        run(arguments)
        return 0
    if os.geteuid() != 0:
        parser.error("making network namespaces needs root")
    with emulated_hosts(HOSTS, arguments.megabits):
        return run_on_hosts(HOSTS, PER_HOST, "benchmarks.two_hosts", words, timeout=1800.0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
