"""The price of a layout beside the plan that the layout restricts, line by line.

    python -m benchmarks.layout_plans [--json] [--output FILE]

Both describe one step of one model under one layout: ``autopar.price`` in closed form, ``autopar.plan`` by a plan that
runs. They should agree; where they do not, one of them counts something that the other does not. In fp32, so that
neither keeps master weights or casts, with every field given that both know.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.ir.plan_record import Predicted

from .report import describe_machine, emit, make_table

CLUSTER = "dgx-a100-80gb"
DEVICES, BATCH, SEQUENCE = 8, 16, 2048
_SHARED = "precision=fp32 context=1 expert=1"
LAYOUTS: Mapping[str, str] = {
    "data 8": "tensor=1 pipeline=1 data=8 microbatch=2 zero=0 recompute=none",
    "data 8, zero 1": "tensor=1 pipeline=1 data=8 microbatch=2 zero=1 recompute=none",
    "data 8, zero 3": "tensor=1 pipeline=1 data=8 microbatch=2 zero=3 recompute=none",
    "tensor 8": "tensor=8 pipeline=1 data=1 microbatch=16 zero=0 recompute=none sequence_parallel=false",
    "tensor 8, sequence": "tensor=8 pipeline=1 data=1 microbatch=16 zero=0 recompute=none sequence_parallel=true",
    "tensor 4 x data 2": "tensor=4 pipeline=1 data=2 microbatch=8 zero=0 recompute=none sequence_parallel=true",
    "tensor 8, full": "tensor=8 pipeline=1 data=1 microbatch=16 zero=0 recompute=full sequence_parallel=true",
    "stages 4 x data 2": "tensor=1 pipeline=4 data=2 microbatch=1 zero=0 recompute=none schedule=1f1b",
    "stages 2 x tensor 4": "tensor=4 pipeline=2 data=1 microbatch=2 zero=0 recompute=none schedule=1f1b",
}
# The lines that are compared: fields of Predicted, with what they are called and whether they are bytes.
LINES: Mapping[str, tuple[str, bool]] = {
    "step_seconds": ("step", False),
    "compute_seconds": ("computing", False),
    "comm_seconds": ("communication", False),
    "bubble_seconds": ("bubble", False),
    "weight_bytes": ("weights", True),
    "gradient_bytes": ("gradients", True),
    "optimizer_bytes": ("optimizer", True),
    "activation_bytes": ("activations", True),
    "temporary_bytes": ("temporary", True),
    "peak_bytes": ("peak", True),
}


def make_model() -> LlamaForCausalLM:
    """A Llama of 8 layers of width 2048, 0.5B parameters, that takes no memory."""
    config = LlamaConfig(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=16,
        vocab_size=32000, bos_token_id=0, eos_token_id=1, max_position_embeddings=SEQUENCE,
    )  # fmt: skip
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def compared(name: str) -> dict[str, Any]:
    """The figures of one layout: those of the price, and those of the plan."""
    layout = autopar.Layout.parse(f"{LAYOUTS[name]} {_SHARED}")
    ids = torch.empty(BATCH, SEQUENCE, dtype=torch.long, device="meta")
    batch = {"input_ids": ids, "labels": ids}
    priced = autopar.price(make_model(), batch, CLUSTER, layout=layout).predicted
    # Without a limit: what is compared is a step, not whether it fits.
    options = autopar.Options(layout=layout, memory_limit=1 << 50, offload=False)
    plan = autopar.plan(make_model(), (DEVICES,), batch, cluster=CLUSTER, options=options)
    return {"layout": plan.layout, "price": _figures(priced), "plan": _figures(plan.predicted)}


def _figures(predicted: Predicted) -> dict[str, float]:
    return {name: float(getattr(predicted, name)) for name in LINES}


def main() -> None:
    """Prints the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--output")
    arguments = parser.parse_args()
    found = {name: compared(name) for name in LAYOUTS}
    rows = [(name, *(_cell(row, line) for line in LINES)) for name, row in found.items()]
    table = make_table("price / plan: ms and GiB", ("layout", *(label for label, _ in LINES.values())), rows)
    emit({"machine": describe_machine(), "rows": found}, table, arguments.json, arguments.output)


def _cell(row: Mapping[str, Any], line: str) -> str:
    scale, digits = (2**-30, 2) if LINES[line][1] else (1e3, 1)
    return " / ".join(f"{row[side][line] * scale:.{digits}f}" for side in ("price", "plan"))


if __name__ == "__main__":
    main()
