"""Planning of the largest models: ``python -m benchmarks.scale [--json] [NAME...]``.

For each model: traced on the meta device, every way to lay its devices out priced, the best shown beside the layout
that was published and the rule "tensor = devices of a node, pipeline = fewest stages that fit, data = rest"; seconds
and memory that planning took; days to train and bytes of a checkpoint.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from autopar.layout import Layout
from autopar.layouts.report import plan_layouts

from .published_models import build
from .published_shape import Experts, Shape
from .recipes import Recipe


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
    return Shape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=4 * hidden,
        gated=False,
        vocab=vocab,
        seq=2048,
        flash=False,
    )


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
        Shape(
            layers=126,
            hidden=16384,
            heads=128,
            kv_heads=8,
            head_dim=128,
            ffn=53248,
            gated=True,
            vocab=128256,
            seq=8192,
            flash=True,
        ),
        "h100-clos-24k",
        16384,
        2048,
        15.6e12,
        # Chunks are not said; one layer less on the first and the last stage makes 126 of 128, eight for each.
        Recipe(8, 16, 128, interleave=8, sequence_parallel=True, zero=2, embedding_as_layers=1, head_as_layers=1),
        "Llama Team 2024, table 4",
    ),
    # Switch-C has 15 encoder and 15 decoder layers, 2048 experts in each, and was trained with expert parallelism
    # alone; here all 30 are one decoder, and no layout pads experts (the paper has 1.25 times as many slots).
    "Switch 1.6T": Case(
        replace(
            _gpt(30, 2080, 32, vocab=32128),
            heads=32,
            head_dim=64,
            kv_heads=32,
            ffn=6144,
            seq=512,
            flash=True,
            experts=Experts(2048, 1, 6144),
        ),
        "dgx-a100-80gb",
        2048,
        2048,
        576e9,
        Layout(1, 1, 2048, expert=2048, zero=1),
        "Fedus, Zoph and Shazeer 2022, table 9",
    ),
}


def plan_case(case: Case) -> dict[str, Any]:
    """Figures of one model, planned in this process."""
    start, busy = time.time(), time.process_time()
    ids = torch.empty(case.batch, case.shape.seq, dtype=torch.long, device="meta")
    model = build(case.shape)
    building = time.time() - start, time.process_time() - busy
    compare = {"published": case.published}
    report = plan_layouts(model, (ids, ids), case.cluster, devices=case.devices, tokens=case.tokens, compare=compare)
    found = report.data()
    return {
        **found,
        "planning_seconds": report.seconds + building[0],
        "planning_cpu_seconds": report.cpu_seconds + building[1],
        "planning_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "published_by": case.source,
        "text": str(report),
    }


def said(name: str, found: Mapping[str, Any]) -> str:
    return (
        f"{name}: {found['planning_seconds']:.0f} s on the wall, {found['planning_cpu_seconds']:.0f} s of computing, "
        f"{found['planning_peak_bytes'] / 2**30:.1f} GiB (published: {found['published_by']})\n{found['text']}\n"
    )


def growth() -> dict[str, Any]:
    """Seconds of computing that planning takes with twice the layers, and with twice the devices and batch."""
    base = CASES["GPT-3 175B"]
    deeper = replace(base, shape=replace(base.shape, layers=2 * base.shape.layers))
    wider = replace(base, devices=2 * base.devices, batch=2 * base.batch, published=replace(base.published, data=16))
    kept = ("planning_seconds", "planning_cpu_seconds", "planning_peak_bytes", "considered", "fitting")
    cases = {"as it is": base, "twice the layers": deeper, "twice the devices": wider}
    planned = {name: _apart(case) for name, case in cases.items()}
    return {name: {key: found[key] for key in kept} for name, found in planned.items()}


def _apart(case: Case) -> dict[str, Any]:
    """Planned in a process of its own, so that memory and what is remembered are its own."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(plan_case, (case,))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(CASES)}; default all")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, help="also write the JSON there")
    parser.add_argument("--growth", action="store_true", help="also plan GPT-3 with twice the layers, or devices")
    given = parser.parse_args(arguments)
    found: dict[str, Any] = {}
    for name in given.names or CASES:
        found[name] = _apart(CASES[name])
        print(said(name, found[name]), file=sys.stderr if given.json else sys.stdout, flush=True)
    if given.growth:
        found["growth"] = growth()
        print(json.dumps(found["growth"], indent=1), file=sys.stderr if given.json else sys.stdout)
    if given.json:
        print(json.dumps(found, indent=1))
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
