"""Plans restricted by layouts, proven by execution: every field, on local processes against one.

    python -m benchmarks.layout_grid [--only llama] [--json] [--output FILE [--resume]]

A small Llama and a small Mixtral, float32. Each row plans ``Options(layout=...)``, checks that every product of the
plan is divided as the layout says (:func:`divisions`), runs a step on the processes of its mesh, and compares the loss
and every gradient with one process.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import autopar
from autopar.ir.placements import Placement, is_shard, shard_before, shard_dim
from autopar.plans.plan import Plan

from .report import describe_machine, emit, make_table

BATCH, SEQUENCE, VOCABULARY, LAYERS = 8, 16, 256, 4
CLUSTER = "dgx-a100-80gb"
# The degrees that are 2 in some row, each with every other.
DEGREES = ("tensor", "pipeline", "data", "context", "expert")
PRODUCTS = ("aten.mm.default", "aten.addmm.default", "aten.embedding.default", "autopar.experts.default")
# What the axes of a plan are called, by the field of the layout.
AXES = {"tensor": "tp", "data": "dp", "context": "cp", "expert": "ep"}


class Loss(nn.Module):
    """A language model that returns its loss alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=input_ids, labels=labels).loss
        return loss


@cache
def model_of(name: str, layers: int = LAYERS) -> nn.Module:
    """``"llama"`` or ``"mixture"``, with the same weights every time."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": layers, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    if name == "llama":
        return Loss(LlamaForCausalLM(LlamaConfig(**shape)))
    return Loss(MixtralForCausalLM(MixtralConfig(**shape, num_local_experts=4, num_experts_per_tok=2)))


def batch() -> dict[str, torch.Tensor]:
    """Token ids, and labels of which about a third are ignored, unequally many per row."""
    ids = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(0))
    ignored = torch.rand(BATCH, SEQUENCE, generator=torch.Generator().manual_seed(1)) < 0.3
    return {"input_ids": ids, "labels": torch.where(ignored, -100, ids)}


def rows() -> Iterator[tuple[str, dict[str, Any]]]:
    """The models and layouts of the grid: pairs of degrees with all others 1, then the other fields."""
    for name in ("llama", "mixture"):
        yield from ((name, degrees) for degrees in pairs(name))
    for zero in range(4):
        yield "llama", {"tensor": 2, "data": 2, "zero": zero}
        yield "mixture", {"data": 2, "expert": 2, "zero": zero}
    for chunks in (1, 2):
        yield "llama", {"pipeline": 2, "data": 2, "microbatch": 1, "interleave": chunks}
        yield (
            "mixture",
            {"pipeline": 2, "tensor": 2, "interleave": chunks, "schedule": ("1f1b", "interleaved")[chunks - 1]},
        )
    for recompute in ("none", "selective", "full"):
        yield "llama", {"tensor": 2, "data": 1, "recompute": recompute}
        yield "mixture", {"pipeline": 2, "expert": 1, "data": 1, "recompute": recompute}
    for parallel in (False, True):
        yield "llama", {"tensor": 2, "data": 2, "sequence_parallel": parallel}
        yield "mixture", {"tensor": 2, "pipeline": 2, "sequence_parallel": parallel}
        yield "llama", {"tensor": 4, "sequence_parallel": parallel}
    everything = {
        "tensor": 2,
        "pipeline": 2,
        "data": 2,
        "microbatch": 1,
        "recompute": "full",
        "sequence_parallel": True,
    }
    yield "llama", {**everything, "context": 1, "interleave": 2, "zero": 1}
    yield "mixture", {**everything, "expert": 2, "schedule": "1f1b", "zero": 2}
    yield "llama", {"tensor": 2, "context": 2, "data": 2, "zero": 3}


def pairs(name: str) -> Iterator[dict[str, int]]:
    """Every pair of degrees that is 2, all others 1. Experts are divided among data or context ranks: where neither of
    these is one of the pair, data is 2 as well."""
    offered = DEGREES if name == "mixture" else DEGREES[:-1]
    for pair in combinations(offered, 2):
        degrees = {field: 1 + (field in pair) for field in offered}
        if degrees.get("expert", 1) > degrees["data"] * degrees["context"]:
            degrees["data"] = 2
        yield degrees


def divisions(plan: Plan) -> dict[str, set[str]]:
    """For each axis of a plan of these models, how its products are divided: by ``data`` (samples), ``context``
    (positions), ``tensor`` (shards of weights), or ``none``. Blocks of experts under the name of the axis and
    ``experts``. Read from the plan alone, by the shapes of these models."""
    weights: set[str] = set()
    for name, node in plan.nodes.items():
        if node.op == "param" or (node.operands and weights.issuperset(node.operands)):
            weights.add(name)
    found: dict[str, set[str]] = {}
    for name, node in plan.nodes.items():
        if node.op in PRODUCTS and not weights.isdisjoint(node.operands) and not node.module.endswith("gate"):
            places = list(zip(node.operands, plan.strategies[name].inputs, strict=True))
            kind = " experts" if "experts" in node.op else ""
            for axis, label in enumerate(plan.axis_names):
                shards = [place[axis] for operand, place in places if operand in weights]
                others = [place[axis] for operand, place in places if operand not in weights]
                divided = "tensor" if any(map(is_shard, shards)) else _rows(node.op, others, plan)
                found.setdefault(label + kind, set()).add(divided)
    return found


def _rows(op: str, places: list[Placement], plan: Plan) -> str:
    """What shards of the rows of a product are of: rows are samples x positions, those of an embedding two dims."""
    place = next(filter(is_shard, places), None)
    if place is None:
        return "none"
    if op == "aten.embedding.default":
        return ("data", "context")[shard_dim(place) or 0]
    return "data" if shard_before(place) == 1 and plan.batch // plan.microbatches > 1 else "context"


def wrong(plan: Plan, layout: autopar.Layout) -> list[str]:
    """What of ``plan`` is not as ``layout`` says."""
    sizes = dict(zip(plan.axis_names, plan.mesh, strict=True))
    degrees = {field: sizes.get(name, 1) for field, name in AXES.items()}
    under = "context" if degrees["context"] == 1 and layout.context > 1 else "data"
    degrees[under] *= degrees["expert"]
    degrees |= {"pipeline": plan.stages, "interleave": plan.pipeline.chunks_per_stage if plan.pipeline else 1}
    degrees["microbatch"] = plan.batch // plan.microbatches // degrees["data"]
    problems = [f"{f}={n}" for f, n in degrees.items() if f in layout.given and n != getattr(layout, f)]
    expected = {AXES[field]: {field} for field in ("tensor", "data", "context")} | {AXES["expert"]: {under}}
    expected["tp experts"] = expected["ep experts"] = {"tensor"}
    for label, ways in divisions(plan).items():
        axis = label.partition(" ")[0]
        wanted = expected.get(label, expected.get(axis))  # None: the axis has no role, as one that idles.
        if wanted is not None and sizes[axis] > 1 and ways != wanted:
            problems.append(f"{label}: products are divided by {', '.join(sorted(ways))}")
    return problems + list(_wrong_beside_degrees(plan, layout))


def _wrong_beside_degrees(plan: Plan, layout: autopar.Layout) -> Iterator[str]:
    """What of the states, of recomputation, of the schedule and of what is between products is not as asked for."""
    if "zero" in layout.given:
        yield from (f"zero={layout.zero}: {path} rests as {kind}" for path, kind in _states(plan, layout.zero))
    if layout.recompute == "full" and not plan.recomputed:
        yield "recompute=full: nothing is recomputed"
    if "recompute" in layout.given and layout.recompute == "none" and plan.recomputed:
        yield f"recompute=none: {len(plan.recomputed)} operations are recomputed"
    if layout.schedule not in (None, plan.schedule):
        yield f"schedule={layout.schedule}: {plan.schedule}"
    if layout.sequence_parallel and "tp" in plan.axis_names and "all_reduce" in collectives(plan, "tp"):
        yield "sequence_parallel=True: a sum is reduced on every rank"


def _states(plan: Plan, zero: int) -> Iterator[tuple[str, str]]:
    """Matrices of which something rests in more, or fewer, shards than a stage of ZeRO says."""
    live = [axis for axis, size in enumerate(plan.mesh) if size > 1]
    for path, place in plan.parameters.items():
        if "," not in plan.nodes[plan.parameter_nodes[path]].type:
            continue
        rests = {"optimizer state": place.optimizer, "gradient": place.gradient, "weight": place.weight}
        for stage, (kind, placements) in enumerate(rests.items(), 1):
            sharded = all(is_shard(placements[axis]) for axis in live)
            if zero >= stage and not sharded:
                yield path, f"{kind} in few shards"
            if zero == 0 and placements != place.weight and kind == "optimizer state":
                yield path, f"{kind} in more shards than the weight"


def collectives(plan: Plan, axis: str) -> set[str]:
    """The kinds of those of activations of at least two dims over ``axis``."""
    number = plan.axis_names.index(axis)
    lines = (line for line in plan.lines if line.kind == "reshard")
    return {
        step.kind
        for line in lines
        for step in line.steps
        if step.communicates and number in step.axes and "," in plan.nodes[line.name].type
    }


def checked(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    """One row: the plan, what is wrong with it, and how far a step on local processes is from one process."""
    layout = autopar.Layout(**fields)
    devices = math.prod(fields.get(field, 1) for field in DEGREES[:-1])
    options = autopar.Options(layout=layout)
    report = autopar.verify(model_of(name), (devices,), batch(), options=options, cluster=CLUSTER, timeout=250)
    plan = report.plan
    return {
        "model": name,
        "layout": plan.layout,
        "mesh": dict(zip(plan.axis_names, plan.mesh, strict=True)),
        "stages": plan.stages,
        "schedule": plan.schedule,
        "microbatches": plan.microbatches,
        "recomputed": len(plan.recomputed),
        "loss_error": report.loss_error,
        "gradient_error": max(report.gradient_errors.values()),
        "ok": report.ok,
        "unpriced": list(report.unpriced),
        "wrong": wrong(plan, layout),
    }


def main() -> None:
    """Runs the rows and prints them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("llama", "mixture"))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--output")
    parser.add_argument("--resume", action="store_true", help="keep the rows that the output has")
    arguments = parser.parse_args()
    path = None if arguments.output is None else Path(arguments.output)
    results = json.loads(path.read_text())["rows"] if arguments.resume and path is not None and path.exists() else []
    done = {(row["model"], row["layout"]) for row in results}
    for name, fields in rows():
        if arguments.only in (None, name) and (name, autopar.Layout(**fields).restriction) not in done:
            results.append(checked(name, fields))
            print(f"{name} {results[-1]['layout']}: {_verdict(results[-1])}", file=sys.stderr, flush=True)
            if path is not None:
                path.write_text(json.dumps({"machine": describe_machine(), "rows": results}, indent=2) + "\n")
    lines = [
        (f"{r['model']} {r['layout']}", str(r["stages"]), *(f"{r[e]:.1e}" for e in _ERRORS), _verdict(r))
        for r in results
    ]
    right = sum(_verdict(r) == "equal" for r in results)
    title = f"{right} of {len(results)} layouts run as they say, equal to one process"
    table = make_table(title, ("layout", "stages", "loss", "gradients", ""), lines)
    emit({"machine": describe_machine(), "rows": results}, table, arguments.json, arguments.output)


_ERRORS = ("loss_error", "gradient_error")


def _verdict(row: dict[str, Any]) -> str:
    """``"equal"``, or what is wrong with a row."""
    different = [] if row["ok"] else [f"NOT EQUAL: loss {row['loss_error']:.1e}, gradients {row['gradient_error']:.1e}"]
    unpriced = [f"not priced: {text}" for text in row["unpriced"]]
    return "; ".join([*row["wrong"], *different, *unpriced]) or "equal"


if __name__ == "__main__":
    main()
