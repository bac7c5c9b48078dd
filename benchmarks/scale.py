"""Planning of the largest models: ``python -m benchmarks.scale [--json] [NAME...]``.

For each model: traced on the meta device, every way to lay its devices out priced, the best shown beside the layout
that was published and the rule "tensor = devices of a node, pipeline = fewest stages that fit, data = rest"; seconds
and memory that planning took; days to train and bytes of a checkpoint.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autopar.cluster import Cluster
from autopar.layout import Layout
from autopar.layout_model import LayoutModel
from autopar.layout_price import Priced
from autopar.layout_search import best_layout

from .published_models import Shape, build


@dataclass(frozen=True)
class Case:
    """A model, its devices, batch and training tokens, and the layout that was published."""

    shape: Shape
    cluster: str
    devices: int
    batch: int
    tokens: float
    published: Layout
    source: str


def _gpt(layers: int, hidden: int, heads: int, vocab: int = 51200) -> Shape:
    return Shape(layers, hidden, heads, heads, hidden // heads, 4 * hidden, False, vocab, 2048, flash=False)


CASES: Mapping[str, Case] = {
    "GPT-3 175B": Case(
        _gpt(96, 12288, 96),
        "dgx-a100-80gb",
        1024,
        1536,
        300e9,
        Layout(8, 16, 8, recompute="full"),
        "Narayanan et al. 2021",
    ),
    "MT-NLG 530B": Case(
        _gpt(105, 20480, 128),
        "dgx-a100-80gb",
        2240,
        1920,
        270e9,
        Layout(8, 35, 8, recompute="full", zero=1),
        "Smith et al. 2022",
    ),
    "GPT 1T": Case(
        _gpt(128, 25600, 160),
        "dgx-a100-80gb",
        3072,
        3072,
        450e9,
        Layout(8, 64, 6, recompute="full"),
        "Narayanan et al. 2021, table 1",
    ),
    "Llama 3 405B": Case(
        Shape(126, 16384, 128, 8, 128, 53248, True, 128256, 8192, flash=True),
        "h100-clos-24k",
        16384,
        2048,
        15.6e12,
        Layout(8, 16, 128, sequence_parallel=True, zero=2),
        "Llama Team 2024, table 4",
    ),
}


def _figures(priced: Priced | None) -> dict[str, Any] | None:
    if priced is None:
        return None
    found = priced.predicted
    return {
        "layout": str(priced.layout),
        "step_seconds": found.step_seconds,
        "tflops_per_device": priced.flops_per_second / 1e12,
        "mfu": found.mfu,
        "peak_bytes": found.peak_bytes,
        "fits": priced.fits,
    }


def plan_case(case: Case) -> dict[str, Any]:
    """Figures of one model, planned in this process."""
    start, busy = time.time(), time.process_time()
    ids = torch.empty(case.batch, case.shape.seq, dtype=torch.long, device="meta")
    model = build(case.shape)
    weights = sum(parameter.numel() for parameter in model.parameters())
    cluster = Cluster.get(case.cluster)
    traced = LayoutModel.of(model, (ids, ids))
    found = best_layout(traced, cluster, case.devices, batch=case.batch)
    seconds, cpu_seconds = time.time() - start, time.process_time() - busy
    steps = case.tokens / (case.batch * case.shape.seq)
    return {
        "devices": case.devices,
        "cluster": case.cluster,
        "parameters": weights,
        "planning_seconds": seconds,
        "planning_cpu_seconds": cpu_seconds,
        "planning_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "considered": found.considered,
        "fitting": found.fitting,
        "placement_gap": found.gap,
        "best": _figures(found.best),
        "published": {**(_figures(traced.price(case.published, cluster, case.batch)) or {}), "source": case.source},
        "rule": _figures(found.rule),
        "days": steps * found.best.predicted.step_seconds / 86400,
        "tokens": case.tokens,
        "checkpoint_bytes": 14 * weights,
    }


def run_apart(name: str) -> dict[str, Any]:
    """One model in a process of its own, so that its memory is its own."""
    command = [sys.executable, "-m", "benchmarks.scale", "--here", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1:]}
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def line(name: str, found: Mapping[str, Any]) -> str:
    if "error" in found:
        return f"{name}: {found['error']}"
    said = [
        f"{name} on {found['devices']} of {found['cluster']}: planned in {found['planning_seconds']:.0f} s "
        f"({found['planning_cpu_seconds']:.0f} s of computing) and "
        f"{found['planning_peak_bytes'] / 2**30:.1f} GiB, {found['considered']} layouts, "
        f"gap {found['placement_gap']:.2%}; {found['days']:.1f} days for {found['tokens']:.3g} tokens, checkpoint "
        f"{found['checkpoint_bytes'] / 1e12:.2f} TB"
    ]
    for kind in ("best", "published", "rule"):
        one = found[kind]
        said.append(
            f"  {kind:10} {one['step_seconds']:8.2f} s  {one['tflops_per_device']:5.0f} TFLOP/s  "
            f"{one['peak_bytes'] / 2**30:5.1f} GiB{'' if one['fits'] else ' (too big)'}  {one['layout']}"
            if one
            else f"  {kind:10} none fits"
        )
    return "\n".join(said)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(CASES)}; default all")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, help="also write the JSON there")
    parser.add_argument("--here", action="store_true", help="plan the one model named in this process, print JSON")
    given = parser.parse_args(arguments)
    if given.here:
        print(json.dumps(plan_case(CASES[given.names[0]])))
        return
    found = {}
    for name in given.names or CASES:
        found[name] = run_apart(name)
        print(line(name, found[name]), file=sys.stderr if given.json else sys.stdout, flush=True)
    if given.json:
        print(json.dumps(found, indent=1))
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
