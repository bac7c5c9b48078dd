"""The price of a layout beside the plan that the layout restricts, term by term.

    python -m benchmarks.layout_plans [--models gpt llama mixture] [--layouts TEXT ...] [--json] [--output FILE]

Both describe one step of one model under one layout: ``LayoutModel.price`` (:mod:`autopar.layouts`) in closed form, as
published rows are priced, ``autopar.plan`` by a plan that runs, compiled. They should agree; where they do not, one of
them counts something that the other does not. In fp32, so that neither keeps master weights or casts, with every field
given that both know, layers pinned to the stages on which the layout has them, and of the fields that only recipes know
those that say what a plan does (:data:`RUNTIME`).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch

import autopar
from autopar.cluster.description import Cluster
from autopar.ir.node import RECOMPUTED
from autopar.ir.plan_record import PlanLine
from autopar.layout import Layout
from autopar.placement.overlap_windows import REDUCTIONS
from autopar.planner.request import UNLIMITED
from autopar.plans.plan import Plan
from benchmarks.emulator.model import LayoutModel
from benchmarks.emulator.price import Priced

from .published_models import build
from .published_shape import Experts, Shape
from .recipes import Recipe
from .report import describe_machine, emit, make_table

CLUSTER = "dgx-a100-80gb"
BATCH = 8
GPT = Shape(4, 1024, 16, 16, 64, 4096, gated=False, vocab=8192, seq=512, flash=True)
LLAMA = replace(GPT, kv_heads=4, gated=True, ffn=2816)
SHAPES: Mapping[str, Shape] = {"gpt": GPT, "llama": LLAMA, "mixture": replace(LLAMA, experts=Experts(8, 2, 1408))}
# What the runtime does of what layouts may say: nothing is computed while it sends gradients of inputs, it gathers
# weights one by one, keeps operands as gathered, and under ZeRO-1 reduces whole gradients.
RUNTIME: Mapping[str, Any] = {
    "overlap": ("gradient", "weight", "message"),
    "gathers": "tensor",
    "operands": "whole",
    "context_load_balancing": False,
    "allocation": "static",
    "reduction": "all",
}
LAYOUTS: tuple[str, ...] = (
    "data=1 microbatch=8",
    "data=1 microbatch=2",
    "data=2 microbatch=4",
    "data=2 microbatch=1",
    "data=2 microbatch=4 zero=1",
    "data=2 microbatch=4 zero=3",
    "data=16 microbatch=1",
    "tensor=2 data=1 microbatch=8",
    "tensor=2 data=1 microbatch=8 sequence_parallel=true",
    "tensor=2 data=2 microbatch=2",
    "context=2 data=1 microbatch=4",
    "pipeline=2 data=1 microbatch=2",
    "pipeline=2 data=2 microbatch=1",
    "pipeline=2 interleave=2 data=1 microbatch=2",
    "pipeline=2 tensor=2 data=1 microbatch=2",
    "data=1 microbatch=8 recompute=selective",
    "data=1 microbatch=8 recompute=full",
)
_FIXED = "precision=fp32"
# The terms, with whether they are bytes.
SECONDS = ("forward", "backward", "recomputed", "tensor", "weights", "gradients", "update", "bubble", "step")
BYTES = ("weight", "gradient", "optimizer", "activation", "temporary", "peak")
Terms = Mapping[str, float]


def full_layout(text: str) -> Layout:
    """A layout with every field given that restricts plans, others 1."""
    degrees = {name: 1 for name in ("tensor", "pipeline", "context") if f"{name}=" not in text}
    zero = "" if "zero=" in text else " zero=0"
    again = "" if "recompute=" in text else " recompute=none"
    again += " interleave=1 schedule=1f1b" if "pipeline=" in text and "interleave=" not in text else ""
    rest = " ".join(f"{name}={value}" for name, value in degrees.items())
    return Layout.parse(f"{text} {rest}{zero}{again} {_FIXED}")


@cache
def _ids(seq: int, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.empty(batch, seq, dtype=torch.long, device="meta")
    return ids, ids


def batch_of(layout: Layout) -> int:
    return max(BATCH, layout.data * layout.microbatch)


def priced(shape: Shape, layout: Layout) -> Priced:
    """The price of a layout that does what a plan does."""
    fields = {**RUNTIME, **({"reduction": "scatter"} if layout.zero > 1 else {})}
    return _traced(shape, batch_of(layout)).price(Recipe.like(layout, **fields), Cluster.get(CLUSTER))


@cache
def _traced(shape: Shape, batch: int) -> LayoutModel:
    return LayoutModel.of(build(shape, torch.float32), _ids(shape.seq, batch))


def planned(shape: Shape, layout: Layout) -> Plan:
    """The plan that the layout restricts, compiled, without a limit: what is compared is not whether it fits."""
    each = shape.layers // layout.chunks
    pins = {f"layers.{i}": f"stage {i // each % layout.pipeline}" for i in range(shape.layers)}
    options = autopar.Options(
        layout=layout,
        memory_limit=UNLIMITED,
        offload=False,
        compile=True,
        gap=1e-4,
        pins=pins if layout.pipeline > 1 else {},
    )
    model, batch = build(shape, torch.float32), _ids(shape.seq, batch_of(layout))
    return autopar.plan(model, (layout.devices,), batch, cluster=CLUSTER, options=options)


def terms_of_price(found: Priced) -> dict[str, float]:
    """The terms of the busiest rank."""
    parts, predicted = found.parts, found.predicted
    terms = {
        "forward": parts["forward"],
        "backward": parts["backward"] + parts["adding up"],
        "recomputed": parts["again"],
        "tensor": parts["tensor"] + parts["exchange"],
        "weights": parts["weights"],
        "gradients": parts["reduce"],
        "update": parts["update"] + parts["offload"],
        "bubble": predicted.bubble_seconds,
        "step": predicted.step_seconds,
    }
    return terms | {name: float(getattr(predicted, f"{name}_bytes")) for name in BYTES}


def terms_of_plan(plan: Plan) -> dict[str, float]:
    """The terms of the busiest stage."""
    stages = range(plan.stages)
    busiest = max(stages, key=lambda stage: sum(line.seconds for line in plan.lines if line.stage == stage))
    terms = dict.fromkeys(SECONDS, 0.0)
    for line in plan.lines:
        if line.stage == busiest:
            terms[_term_of(line)] += line.seconds
    terms["bubble"], terms["step"] = plan.predicted.bubble_seconds, plan.predicted.step_seconds
    return terms | {name: float(getattr(plan.predicted, f"{name}_bytes")) for name in BYTES}


def _term_of(line: PlanLine) -> str:
    if line.kind == "compute":
        return "recomputed" if line.name.endswith(RECOMPUTED) else line.phase
    if line.kind == "hidden":
        return "gradients" if line.name == REDUCTIONS else "weights"
    kinds = {"reshard": "tensor", "exchange": "tensor", "weight": "weights", "gradient": "gradients"}
    return kinds.get(line.kind, "update")


def compared(model: str, text: str) -> dict[str, Terms]:
    """The terms of one layout of one model: those of the price, and those of the plan."""
    layout, shape = full_layout(text), SHAPES[model]
    return {"price": terms_of_price(priced(shape, layout)), "plan": terms_of_plan(planned(shape, layout))}


def difference(row: Mapping[str, Terms], term: str) -> float:
    """The difference of a term as a share of the plan's step, or of its peak."""
    whole = row["plan"]["peak" if term in BYTES else "step"]
    return (row["price"][term] - row["plan"][term]) / whole


def main() -> None:
    """Prints the comparison, and the greatest difference of each term."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--output")
    given = parser.parse_args()
    found: dict[str, dict[str, Terms]] = {}
    for model in given.models:
        for text in given.layouts:
            found[f"{model}: {text}"] = compared(model, text)
    rows = [(name, *(_cell(row, term) for term in (*SECONDS, *BYTES))) for name, row in found.items()]
    worst = {
        term: max(((difference(row, term), name) for name, row in found.items()), key=lambda pair: abs(pair[0]))
        for term in (*SECONDS, *BYTES)
    }
    caption = "greatest differences, of the step or the peak: " + "; ".join(
        f"{term} {share:+.1%} ({name})" for term, (share, name) in worst.items()
    )
    table = make_table("price / plan: ms and MiB", ("layout", *SECONDS, *BYTES), rows, caption)
    greatest = {term: {"share": share, "row": name} for term, (share, name) in worst.items()}
    emit({"machine": describe_machine(), "rows": found, "greatest": greatest}, table, given.json, given.output)


def _cell(row: Mapping[str, Terms], term: str) -> str:
    scale, digits = (2**-20, 0) if term in BYTES else (1e3, 3)
    return " / ".join(f"{row[side][term] * scale:.{digits}f}" for side in ("price", "plan"))


if __name__ == "__main__":
    main()
