"""Predicted against measured seconds of each section of a step, operation by operation and compiled.

    python -m benchmarks.fused_sections [--models GPT-2 Llama ...] [--rounds 10] [--json] [--output FILE]

One process, so that a step is computing alone, and a section is the forward or the backward of one block of the model
or of what is outside of blocks. First the machine is measured (``autopar calibrate``, two processes of one thread).
Prices of the compiled program are those of fused kernels. In each round the two variants of a model take turns; a
section's seconds are the medians over the rounds of what ``torch.profiler`` records for its instructions and compiled
pieces, and those of the step are measured without the profiler, so that its part can be seen.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile, record_function

import autopar
from autopar.calibration.machine import calibrate
from autopar.cluster.description import Cluster
from autopar.ir.module_paths import fold_path, layers_among, outermost_layer

from .one_process import MODELS, Batch
from .report import describe_machine, emit, make_table

CALIBRATION_SECONDS = 40.0
PHASES = ("forward", "backward")
# By (phase, block): seconds in a step; "" is what is outside of blocks.
Sections = Mapping[tuple[str, str], float]
# Sections with a smaller share of a step are not scored: they are mostly the host's work.
# Chosen: half of what the smallest of twenty equal sections would have.
SCORED = 0.025


@dataclass(frozen=True)
class Variant:
    """A model that runs as its plan predicts."""

    model: Any
    batch: Batch
    layers: frozenset[str]
    predicted: Sections

    @staticmethod
    def of(model: nn.Module, batch: Batch, cluster: Cluster, compiled: bool) -> Variant:
        mesh, options = init_device_mesh("cpu", (1,)), autopar.Options(compile=compiled)
        own = autopar.parallelize(model, mesh, example_inputs=dict(batch), options=options, cluster=cluster)
        layers = layers_among({line.module for line in own.plan.lines})
        seconds = defaultdict[tuple[str, str], float](float)
        for line in own.plan.lines:
            if line.kind == "compute":
                seconds[line.phase, block_of(line.module, layers)] += line.seconds
        return Variant(own, batch, layers, seconds)

    def step(self) -> None:
        self.model.zero_grad(set_to_none=True)
        with record_function("forward"):
            loss = self.model(**self.batch).loss
        with record_function("backward"):
            loss.backward()

    def seconds(self, count: int) -> float:
        """Seconds of a step, without the profiler."""
        self.step()
        start = time.perf_counter()
        for _ in range(count):
            self.step()
        return (time.perf_counter() - start) / count

    def sections(self) -> Sections:
        """Seconds of the sections of one step, as recorded by the profiler."""
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            self.step()
        found = defaultdict[tuple[str, str], float](float)
        for event in recorded.events():
            if event.name.startswith("%"):
                phase, module = _place(event)
                found[phase, block_of(module, self.layers)] += event.cpu_time_total / 1e6
        return found


def block_of(module: str, layers: frozenset[str]) -> str:
    """The kind of block that a module is in: ``h.*``; "" for none."""
    layer = outermost_layer(module, layers)
    return fold_path(layer, layers)[0] if layer else ""


def _place(event: Any) -> tuple[str, str]:
    """The phase and the module of an instruction, from the ranges around it."""
    module, around = "", event.cpu_parent
    while around is not None:
        words = around.name.split(" ")
        if len(words) == 2 and words[0] in PHASES:
            module = module or words[1]
        elif around.name in PHASES:
            return around.name, module
        around = around.cpu_parent
    return "refresh", module


def measure(variants: Mapping[str, Variant], rounds: int, count: int) -> tuple[dict[str, float], dict[str, Sections]]:
    """Medians of the seconds of a step, and of those of its sections."""
    steps, sections = defaultdict[str, list[float]](list), defaultdict[str, list[Sections]](list)
    for index in range(rounds):
        for name in random.Random(index).sample(list(variants), len(variants)):
            steps[name].append(variants[name].seconds(count))
            sections[name].append(variants[name].sections())
    medians: dict[str, Sections] = {
        name: {key: statistics.median(each.get(key, 0.0) for each in found) for key in found[0]}
        for name, found in sections.items()
    }
    return {name: statistics.median(each) for name, each in steps.items()}, medians


def figures_of(model: str, cluster: Cluster, rounds: int, count: int) -> dict[str, Any]:
    variants = {}
    for name, compiled in (("unfused", False), ("fused", True)):
        torch.manual_seed(0)
        variants[name] = Variant.of(*MODELS[model](), cluster, compiled)
    steps, sections = measure(variants, rounds, count)
    return {name: _compared(variants[name].predicted, sections[name], steps[name]) for name in variants}


def _compared(predicted: Sections, measured: Sections, step: float) -> dict[str, Any]:
    """The figures of one variant. The error of a section is that of predicted over measured."""
    rows: list[dict[str, Any]] = [
        {"phase": phase, "block": block, "predicted": predicted[phase, block], "measured": seconds}
        for (phase, block), seconds in sorted(measured.items(), key=lambda item: PHASES[::-1].index(item[0][0]))
        if (phase, block) in predicted
    ]
    scored = [row for row in rows if row["measured"] > SCORED * step]
    errors = [abs(row["predicted"] / row["measured"] - 1) for row in scored]
    return {
        "step_seconds": step,
        "predicted_seconds": sum(predicted.values()),
        "mean_error": statistics.mean(errors),
        "sections": rows,
    }


def _rows(model: str, figures: Mapping[str, Any]) -> Iterator[list[str]]:
    pairs = [{(row["phase"], row["block"]): row for row in figures[name]["sections"]} for name in ("unfused", "fused")]
    for key in dict.fromkeys(key for rows in pairs for key in rows):
        cells = [cell for rows in pairs for cell in _cells(rows.get(key))]
        yield [f"{model} {key[0]} {key[1] or 'outside of blocks'}", *cells]
    whole = [{"predicted": each["predicted_seconds"], "measured": each["step_seconds"]} for each in figures.values()]
    yield [f"{model} step", *(cell for each in whole for cell in _cells(each))]


def _cells(row: Mapping[str, Any] | None) -> list[str]:
    if row is None:
        return ["-"] * 3
    ratio = row["predicted"] / row["measured"] if row["measured"] else float("nan")
    return [f"{row['predicted'] * 1e3:.2f}", f"{row['measured'] * 1e3:.2f}", f"{ratio:.2f}"]


def report(models: Mapping[str, dict[str, Any]], cluster: Cluster, arguments: argparse.Namespace) -> None:
    """Prints and writes the figures."""
    rows = [row for model, figures in models.items() for row in _rows(model, figures)]
    columns = ["section", "predicted ms", "measured ms", "ratio", "predicted ms, compiled", "measured ms", "ratio"]
    errors = {
        name: statistics.mean(each[name]["mean_error"] for each in models.values()) for name in ("unfused", "fused")
    }
    caption = ", ".join(f"mean error of sections {name} {error:.0%}" for name, error in errors.items())
    table = make_table("Predicted and measured seconds of sections", columns, rows, caption)
    figures = {"benchmark": "fused_sections", "machine": describe_machine(), "cluster": cluster.source}
    emit({**figures, "mean_error": errors, "models": models}, table, arguments.json, arguments.output)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[name for name in MODELS if name != "ResNet-50"])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=3, help="steps in a row of one variant within a round")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--output", metavar="FILE", help="write the JSON there as well")
    arguments = parser.parse_args(words)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        cluster = calibrate(2, CALIBRATION_SECONDS, Path(folder) / "local.toml")
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    models = {name: figures_of(name, cluster, arguments.rounds, arguments.steps) for name in arguments.models}
    report(models, cluster, arguments)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
