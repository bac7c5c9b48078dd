"""What planning costs: CPU-seconds from model to plan, by phase, peak memory, and the plan's file.

    python -m benchmarks.planning [--json] [--output FILE] [--cases gpt2 llama3-8b] [--stop SECONDS]

Models and batches are on the meta device and no devices are needed. Each case runs in a process of its own,
so that peak memory is its own; imports and building the model are measured apart from planning. The same model at
several depths, and on several numbers of devices, shows what planning costs by either. A case that has not ended after
``--stop`` seconds of the processor, imports included, is stopped, and its row says so. ``--plans``: of the largest
models alone, with nothing given: seconds, gap, status, step and degrees of each; ``--layouts``: the same in the layouts
that were published with them, by ``autopar.price``.

Machines differ, and one machine from day to day. So of some models it is also measured, in a process of its own in the
same run, what torch takes to trace forward and backward once (:mod:`.torch_trace`), and planning is told as a multiple.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

import autopar
from autopar.layout import Layout
from autopar.precision import Precision

from .fresh_process import measured_apart
from .largest_models import CASES as PUBLISHED
from .published_models import build
from .report import describe_machine, emit, make_table
from .torch_trace import trace_seconds

CLUSTER = "dgx-a100-80gb"
MESH = (8, 8)
# The cases whose models torch traces too.
TRACED = ("gpt2", "llama3-8b")
# What planning would import.
LOADED_LATE = ("autopar.api", "autopar.search.best_plan", "torch.export._trace")


@dataclass(frozen=True)
class Case:
    """A model and what planning it may cost; ``peer`` has what is known of another planner of placements. ``layout``:
    the only one that is planned, by its price."""

    build: Callable[[], tuple[nn.Module, Mapping[str, torch.Tensor] | tuple[torch.Tensor, ...]]]
    description: str
    limit_seconds: float
    peer: Mapping[str, float]
    mesh: tuple[int, ...] = MESH
    cluster: str = CLUSTER
    precision: Precision | None = None
    layout: Layout | None = None


def token_batch(size: int, sequence: int) -> dict[str, torch.Tensor]:
    """Token ids and labels, int64 [size, sequence], without storage."""
    tokens = torch.empty((size, sequence), dtype=torch.int64, device="meta")
    return {"input_ids": tokens, "labels": tokens.clone()}


def build_gpt2() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """GPT-2 small as published, dropout off."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    with torch.device("meta"):
        return GPT2LMHeadModel(config), token_batch(64, 128)


def build_llama3_8b(layers: int = 32, batch: int = 16) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The shape of Llama 3 8B, of any depth."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        use_cache=False,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config), token_batch(batch, 8192)


def build_published(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A model of :mod:`benchmarks.largest_models`, and its published batch."""
    case = PUBLISHED[name]
    ids = torch.empty((case.batch, case.shape.seq), dtype=torch.int64, device="meta")
    return build(case.shape, torch.float32), (ids, ids)


def published(name: str, nodes: int) -> Case:
    """The case of a model of :mod:`benchmarks.largest_models` on so many nodes of eight devices."""
    return Case(
        partial(build_published, name),
        f"{name} on {8 * nodes} devices, batch {PUBLISHED[name].batch} x {PUBLISHED[name].shape.seq}, bf16",
        limit_seconds=40.0,
        peer={},
        mesh=(nodes, 8),
        cluster=PUBLISHED[name].cluster,
        precision="bf16",
    )


# The largest, with nothing given: the whole search.
LARGEST: Mapping[str, Case] = {
    "gpt3-175b": published("GPT-3 175B", 128),
    "mt-nlg-530b": published("MT-NLG 530B", 280),
    "gpt-1t": published("GPT 1T", 384),
    "llama3-405b": published("Llama 3 405B", 2048),
    "switch-1.6t": published("Switch 1.6T", 256),
}

# The same in the layouts that were published, given in full.
LAYOUTS: Mapping[str, Case] = {
    f"{name}-layout": replace(
        case, description=f"{case.description}, its published layout", layout=PUBLISHED[of].published
    )
    for (name, case), of in zip(LARGEST.items(), PUBLISHED, strict=True)
}

CASES: Mapping[str, Case] = {
    "gpt2": Case(
        build_gpt2,
        "GPT-2, 12 layers, vocabulary 50257, batch 64 x 128",
        limit_seconds=15.0,
        peer={"cpu_seconds": 171.0, "peak_gib": 1.87, "variables": 340_000},
    ),
    "llama3-8b": Case(
        build_llama3_8b,
        "Llama 3 8B, 32 layers, vocabulary 128256, batch 16 x 8192",
        limit_seconds=30.0,
        peer={"wall_seconds": 878.0},
    ),
    "llama3-8b-bf16": Case(build_llama3_8b, "the same in bf16", limit_seconds=60.0, peer={}, precision="bf16"),
    # The same at other depths: what planning costs should hardly depend on them.
    **{
        f"llama3-8b-{layers}-layers": Case(
            partial(build_llama3_8b, layers), f"the same, {layers} layers", limit_seconds=60.0, peer={}
        )
        for layers in (8, 16, 64)
    },
    # The same on other numbers of devices, with a sample for each; from 128 devices on, pipelines are proposed.
    **{
        f"llama3-8b-{8 * nodes}-devices": Case(
            partial(build_llama3_8b, 32, 8 * nodes),
            f"Llama 3 8B on {8 * nodes} devices, batch {8 * nodes} x 8192",
            limit_seconds=60.0,
            peer={},
            mesh=(nodes, 8),
        )
        for nodes in (2, 8, 32)
    },
    **LARGEST,
    **LAYOUTS,
}


def cpu_seconds() -> float:
    """User and system time of this process, all its threads, and its finished children."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def peak_gib() -> float:
    """Largest resident memory so far, GiB (Linux counts KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def measure(name: str) -> dict[str, Any]:
    """Plans one case in this process and returns its figures."""
    case = CASES[name]
    model, batch = case.build()
    for module in LOADED_LATE:
        importlib.import_module(module)
    before = {"cpu_seconds": cpu_seconds(), "peak_gib": peak_gib()}
    start = time.perf_counter()
    if case.layout is not None:
        priced = autopar.price(model, batch, case.cluster, layout=case.layout)
        plan, excess = priced.plan, priced.excess_bytes
    else:
        options = autopar.Options(precision=case.precision)
        plan = autopar.plan(model, case.mesh, batch, cluster=case.cluster, options=options)
        excess = plan.predicted.peak_bytes - plan.memory_limit
    wall, busy, peak = time.perf_counter() - start, cpu_seconds() - before["cpu_seconds"], peak_gib()
    return {
        "model": case.description,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "mesh": list(case.mesh),
        "cluster": case.cluster,
        "cpu_seconds": busy,
        "wall_seconds": wall,
        "peak_gib": peak,
        "file": file_figures(plan),
        "before_planning": before,
        "phases_cpu_seconds": {phase: float(seconds) for phase, seconds in plan.timings.items()},
        "limit_cpu_seconds": case.limit_seconds,
        "status": plan.status,
        "gap": plan.gap if math.isfinite(plan.gap) else None,
        "excess_bytes": excess,
        "predicted_step_seconds": plan.predicted.step_seconds,
        "search": search_figures(plan),
        "peer": dict(case.peer),
    }


def search_figures(plan: autopar.Plan) -> dict[str, Any]:
    """What the plan is, what the search over divisions of the devices covered (None: all were tried), with the share of
    the step by which another could be quicker, and the other kinds of plans: their seconds and bytes, or why none was
    priced."""
    found, seconds = plan.searched, plan.predicted.step_seconds
    others = {
        name: other and {"step_seconds": other.step_seconds, "peak_bytes": other.peak_bytes}
        for name, other in plan.baselines.items()
    }
    return {
        "plan": f"{plan.stages} stages of {plan.mesh}, {plan.microbatches} microbatches, {plan.schedule}",
        "peak_bytes": plan.predicted.peak_bytes,
        "memory_limit": plan.memory_limit,
        "divisions": None if found is None else {**asdict(found), "left": found.left, "gap": found.gap(seconds)},
        "also_priced": others,
        "excluded": dict(plan.excluded),
    }


def file_figures(plan: autopar.Plan) -> dict[str, float]:
    """The bytes of a plan's file, and the seconds in which it is read."""
    text, start = plan.to_json(), time.perf_counter()
    read = type(plan).from_json(text)
    seconds = time.perf_counter() - start
    if read != plan:
        raise RuntimeError(f"the plan of {plan.model} is not what its file says")
    return {"bytes": float(len(text.encode())), "load_seconds": seconds}


def measure_apart(name: str, stop: float) -> dict[str, Any]:
    """The figures of one case from a fresh process, or of how it was stopped after ``stop`` seconds of the processor.
    Raises RuntimeError if that process fails."""
    figures = measured_apart("benchmarks.planning", "--measure", name, "--stop", str(stop))
    if figures is None:
        case = CASES[name]
        return {"model": case.description, "stopped_after_seconds": stop, "limit_cpu_seconds": case.limit_seconds}
    return figures


def with_trace(name: str, figures: dict[str, Any], stop: float) -> dict[str, Any]:
    """``figures`` of a case with the CPU-seconds of torch's own trace of its model, from a fresh process as well, where
    the case is one of these and neither was stopped."""
    if name not in TRACED or "cpu_seconds" not in figures:
        return figures
    traced = measured_apart("benchmarks.planning", "--trace", name, "--stop", str(stop))
    return figures if traced is None else {**figures, **traced}


def measure_trace(name: str) -> dict[str, float]:
    """What torch takes in this process to trace the model of a case."""
    model, batch = CASES[name].build()
    if not isinstance(batch, Mapping):
        raise TypeError(f"{name} has inputs without names")
    return {"torch_trace_cpu_seconds": trace_seconds(model, batch)}


def rows_of(name: str, figures: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The table rows of a case: itself, its phases, and the peer."""
    if "stopped_after_seconds" in figures:
        limit = f"{figures['limit_cpu_seconds']:.0f}"
        return [(figures["model"], "stopped", f"{figures['stopped_after_seconds']:.0f}", "", limit, "")]
    rows: list[tuple[str, ...]] = [
        (
            figures["model"],
            f"{figures['cpu_seconds']:.1f}",
            f"{figures['wall_seconds']:.1f}",
            f"{figures['peak_gib']:.2f}",
            f"{figures['limit_cpu_seconds']:.0f}",
            f"{figures['file']['bytes'] / 1e6:.1f} MB, {figures['file']['load_seconds']:.2f} s",
        )
    ]
    rows += [(f"  {phase}", f"{value:.1f}", "", "", "", "") for phase, value in figures["phases_cpu_seconds"].items()]
    if "torch_trace_cpu_seconds" in figures:
        traced = figures["torch_trace_cpu_seconds"]
        row = f"  torch's own trace; planning takes {figures['cpu_seconds'] / traced:.2f} times as long"
        rows.append((row, f"{traced:.1f}", "", "", "", ""))
    step = f"{figures['predicted_step_seconds']:.4g} s a step, {figures['status']}, gap {figures['gap'] or 0:.2%}"
    step += f", {figures['excess_bytes'] / 2**30:.3g} GiB too many" if figures["excess_bytes"] > 0 else ""
    rows.append((f"  {figures['search']['plan']}: {step}", "", "", "", "", ""))
    rows += list(_searched_rows(figures["search"]))
    peer = figures["peer"]
    if not peer:
        return rows
    cells = (f"{peer[key]:g}" if key in peer else "" for key in ("cpu_seconds", "wall_seconds", "peak_gib"))
    return [*rows, ("  peer", *cells, "", "")]


def _searched_rows(search: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """What an outer search left open, and the kinds of plans that it excluded."""
    divisions = search["divisions"]
    if divisions is not None:
        counts = ", ".join(f"{divisions[name]} {name}" for name in ("solved", "excluded", "left"))
        yield f"  of {divisions['divisions']} divisions {counts}, gap {divisions['gap']:.0%}", "", "", "", "", ""
    yield from ((f"  {kind}: {why}", "", "", "", "", "") for kind, why in search["excluded"].items())


def main(words: Sequence[str]) -> int:
    """Measures the cases; 1 if one takes more CPU-seconds than it may."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--output", metavar="FILE", help="write the JSON there as well")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    which.add_argument(
        "--plans", dest="cases", action="store_const", const=list(LARGEST), help="the largest models alone"
    )
    which.add_argument(
        "--layouts", dest="cases", action="store_const", const=list(LAYOUTS), help="those in their published layouts"
    )
    parser.add_argument(
        "--stop", type=float, default=600.0, metavar="SECONDS", help="of the processor, after which a case is stopped"
    )
    parser.add_argument("--measure", choices=list(CASES), help=argparse.SUPPRESS)
    parser.add_argument("--trace", choices=TRACED, help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if arguments.measure or arguments.trace:
        _, most = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(arguments.stop), most))
        print(json.dumps(measure(arguments.measure) if arguments.measure else measure_trace(arguments.trace)))
        return 0
    stop = arguments.stop
    cases = {name: with_trace(name, measure_apart(name, stop), stop) for name in arguments.cases}
    rows = [row for name, figures in cases.items() for row in rows_of(name, figures)]
    columns = ("from model to plan", "CPU s", "wall s", "peak GiB", "limit CPU s", "plan's file")
    table = make_table(f"planning; where nothing else is said, on mesh {MESH} of {CLUSTER}", columns, rows)
    emit(
        {"benchmark": "planning", "machine": describe_machine(), "cases": cases},
        table,
        arguments.json,
        arguments.output,
    )
    return 0 if all(f.get("cpu_seconds", math.inf) <= f["limit_cpu_seconds"] for f in cases.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
