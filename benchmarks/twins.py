"""Whether plans for large meshes run: their twins on eight processes, and ranks of the plans themselves, unfolded.

    python -m benchmarks.twins [NAME ...] [--json] [--output FILE] [--resume]

For each model of ``benchmarks.planning`` at its full size (the largest ones under a layout, which takes minutes less
than the whole search):

- *unfolded*: it is planned, the programs of ten ranks spread over the mesh are lowered, and of the ranks that these
  exchange anything with, and what each starts in a step is compared message by message
  (:func:`autopar.verification.unfolding.unfold`);
- *twin*: a small model of its family is planned under the same layout with every degree cut to two, and more data ranks
  where that leaves fewer than eight devices, and executed on eight local processes. Loss and every gradient must be
  those of one process.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import autopar
from autopar.plans.plan import Plan
from autopar.verification.unfolding import unfold

from .largest_models import CASES as LARGEST
from .planning import CASES as PLANNED
from .published_models import build
from .published_shape import Experts, Shape
from .report import describe_machine, emit, make_table

Batch = dict[str, torch.Tensor] | tuple[torch.Tensor, ...]
# Of twins. The vocabulary is odd, so that it divides among no ranks.
DEVICES, BATCH, SEQUENCE, VOCABULARY, LAYERS = 8, 8, 16, 301, 4


@dataclass(frozen=True)
class Case:
    """``layout`` of the model ``name`` of ``benchmarks.planning`` at its full size ("": searched), and that of its
    ``twin``, a small model of the same family."""

    name: str
    layout: str
    twin: Callable[[], nn.Module]
    twin_layout: str
    keywords: bool = False

    def twin_batch(self) -> Batch:
        """Token ids, and labels of which about a third are ignored where the model can do that."""
        ids = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(0))
        if not self.keywords:
            return ids, ids.roll(1, 1)
        ignored = torch.rand(BATCH, SEQUENCE, generator=torch.Generator().manual_seed(1)) < 0.3
        return {"input_ids": ids, "labels": torch.where(ignored, -100, ids)}


def small_gpt2() -> nn.Module:
    """GPT-2's family, as ``benchmarks.planning`` builds it."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 64, "n_layer": LAYERS, "n_head": 4, "n_positions": SEQUENCE, "vocab_size": VOCABULARY}
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(**sizes, **tokens, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    torch.manual_seed(0)
    model: nn.Module = GPT2LMHeadModel(config)
    return model


def small_llama() -> nn.Module:
    """That of Llama 3 8B, likewise."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCABULARY, max_position_embeddings=SEQUENCE, use_cache=False,
    )  # fmt: skip
    model: nn.Module = LlamaForCausalLM(config)
    return model


def small(name: str) -> nn.Module:
    """A small model of the shape of one of ``benchmarks.largest_models``, on the meta device."""
    shape = LARGEST[name].shape
    shared = shape.heads // shape.kv_heads
    few: Shape = replace(
        shape, layers=LAYERS, hidden=64, heads=4, kv_heads=4 if shared == 1 else 2, head_dim=16, ffn=128,
        vocab=VOCABULARY, seq=SEQUENCE, experts=shape.experts and Experts(DEVICES, shape.experts.chosen, 32),
    )  # fmt: skip
    return build(few, torch.float32)


def _of_scale(name: str, known_as: str, layout: str, twin_layout: str) -> Case:
    return Case(known_as, layout, partial(small, name), twin_layout)


_GRID = "pipeline=2 data=2 tensor=2 microbatch=1"
_V = "interleave=2 schedule=zb-v"
CASES: Mapping[str, Case] = {
    "gpt2": Case("gpt2", "", small_gpt2, "data=8 zero=0", keywords=True),
    "llama3-8b": Case("llama3-8b", "", small_llama, "data=4 context=2 zero=3", keywords=True),
    "gpt3-175b": _of_scale(
        "GPT-3 175B", "gpt3-175b", "pipeline=1 data=128 tensor=8 zero=1", "pipeline=1 data=4 tensor=2 zero=1"
    ),
    "gpt3-175b-in-stages": _of_scale(
        "GPT-3 175B", "gpt3-175b", "pipeline=16 data=8 tensor=8 microbatch=1 schedule=1f1b", f"{_GRID} schedule=1f1b"
    ),
    "mt-nlg-530b": _of_scale(
        "MT-NLG 530B",
        "mt-nlg-530b",
        "pipeline=35 data=8 tensor=8 microbatch=1 schedule=1f1b recompute=full zero=1",
        f"{_GRID} schedule=1f1b recompute=full zero=1",
    ),
    "gpt-1t": _of_scale(
        "GPT 1T",
        "gpt-1t",
        "pipeline=16 data=24 tensor=8 microbatch=1 " + _V,
        f"{_GRID} {_V} recompute=selective",
    ),
    "llama3-405b": _of_scale(
        "Llama 3 405B",
        "llama3-405b",
        "pipeline=16 data=128 tensor=8 microbatch=1 interleave=4 schedule=interleaved sequence_parallel=true",
        f"{_GRID} interleave=2 schedule=interleaved sequence_parallel=true recompute=selective",
    ),
    "switch-1.6t": _of_scale("Switch 1.6T", "switch-1.6t", "data=2048 expert=2048", "data=8 expert=8"),
}


def layout_of(text: str) -> autopar.Layout | None:
    """None for no words."""
    return autopar.Layout.parse(text) if text else None


def planned(case: Case) -> tuple[nn.Module, Any, Plan]:
    """The model and the batch of the full size, and their plan."""
    full = PLANNED[case.name]
    model, batch = full.build()
    options = autopar.Options(precision=full.precision, layout=layout_of(case.layout))
    return model, batch, autopar.plan(model, full.mesh, batch, cluster=full.cluster, options=options)


def unfolded(name: str) -> dict[str, Any]:
    """The plan of the full size, and what of ten of its ranks does not match."""
    case = CASES[name]
    start = time.perf_counter()
    model, batch, plan = planned(case)
    seconds, peak = time.perf_counter() - start, _peak()
    start = time.perf_counter()
    found = unfold(model, plan, batch, cluster=PLANNED[case.name].cluster)
    return {
        "layout": case.layout,
        "mesh": list(plan.mesh),
        **kind_of(plan),
        "planning_seconds": seconds,
        "planning_peak_gib": peak,
        "unfolding_seconds": time.perf_counter() - start,
        "peak_gib": _peak(),
        "ranks": list(found.sampled),
        "compared_with": sorted(found.transcripts.keys() - set(found.sampled)),
        "events": found.events,
        "unmatched": list(found.unmatched),
    }


def kind_of(plan: Plan) -> dict[str, Any]:
    """What kind of plan it is, whatever its degrees: ``axes`` are the roles of axes of several devices."""
    live = [name for name, size in zip(plan.axis_names, plan.mesh, strict=True) if size > 1]
    return {
        "axes": [*(["pp"] if plan.stages > 1 else []), *live],
        "stages": plan.stages,
        "chunks": plan.pipeline.chunks_per_stage if plan.pipeline else 1,
        "microbatches": plan.microbatches,
        "schedule": plan.schedule,
        "recomputed": len(plan.recomputed),
        "step_seconds": plan.predicted.step_seconds,
    }


def verified(name: str) -> dict[str, Any]:
    """The twin on eight processes."""
    case = CASES[name]
    options = autopar.Options(layout=layout_of(case.twin_layout))
    cluster = PLANNED[case.name].cluster
    report = autopar.verify(case.twin(), (DEVICES,), case.twin_batch(), options=options, cluster=cluster, timeout=250)
    return {
        "layout": case.twin_layout,
        "mesh": list(report.plan.mesh),
        **kind_of(report.plan),
        "loss_error": report.loss_error,
        "gradient_error": max(report.gradient_errors.values()),
        "ok": report.ok,
        "unpriced": list(report.unpriced),
        "seconds": report.seconds,
    }


def _peak() -> float:
    """Largest resident memory so far, GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def measure(name: str) -> dict[str, Any]:
    """Both figures of a case, each from a process of its own."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        full = pool.apply(unfolded, (name,))
    return {"full": full, "twin": verified(name)}


def _row(name: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    full, twin = row["full"], row["twin"]
    ranks = len(full["ranks"]) + len(full["compared_with"])
    matches = "; ".join(full["unmatched"]) or f"{full['events']} events of {ranks} ranks match"
    error = max(twin["loss_error"], twin["gradient_error"])
    equal = f"{'equal' if twin['ok'] and not twin['unpriced'] else 'NOT EQUAL'}, {error:.1e}"
    where = f"{full['stages']} x {tuple(full['mesh'])}"
    seconds = f"{full['planning_seconds']:.0f} + {full['unfolding_seconds']:.0f}"
    return name, where, seconds, f"{full['peak_gib']:.2f}", matches, equal


def main() -> int:
    """Measures the cases; 1 if one does not match or is not equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(CASES)}; default all")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--output")
    parser.add_argument("--resume", action="store_true", help="keep the other rows that the output has")
    given = parser.parse_args()
    path = None if given.output is None else Path(given.output)
    rows = json.loads(path.read_text())["cases"] if given.resume and path is not None and path.exists() else {}
    for name in given.names or CASES:
        rows[name] = measure(name)
        print(*_row(name, rows[name]), sep="  ", file=sys.stderr, flush=True)
        if path is not None:
            path.write_text(json.dumps({"machine": describe_machine(), "cases": rows}, indent=1) + "\n")
    columns = ("model", "stages x mesh", "planning + unfolding, s", "peak GiB", "ranks", "twin")
    table = make_table("plans that run", columns, [_row(name, row) for name, row in rows.items()])
    emit({"machine": describe_machine(), "cases": rows}, table, given.json, given.output)
    bad = [name for name, row in rows.items() if row["full"]["unmatched"] or not row["twin"]["ok"]]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
