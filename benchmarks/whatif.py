"""What plans for other limits of memory cost beside one plan: CPU-seconds of ``plan.whatif``, and its peak memory.

    python -m benchmarks.whatif [--json] [--output FILE] [--cases llama gpt2] [--stop SECONDS]

Small models on four devices, and Llama 3 8B on 64. Each case runs in a process of its own: one plan, the same under
eight limits of memory between 1.2 and 0.25 of the bytes that it holds, and one under a limit within which nothing fits.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import autopar
from autopar.precision import Precision

from .fresh_process import measured_apart
from .planning import build_llama3_8b, cpu_seconds, peak_gib
from .report import describe_machine, emit, make_table

CLUSTER = "dgx-a100-80gb"
# Parts of the plan's peak. Chosen: from more than it needs to what takes recomputing, microbatches or stages.
PARTS = (1.2, 1.0, 0.85, 0.7, 0.55, 0.45, 0.35, 0.25)
# The part within which nothing fits.
NOTHING = 0.02
VOCABULARY = 257


@dataclass(frozen=True)
class Case:
    """A model with its batch, and the devices that it is planned for."""

    build: Callable[[], tuple[nn.Module, Mapping[str, torch.Tensor]]]
    description: str
    mesh: tuple[int, ...] = (2, 2)
    precision: Precision | None = None
    parts: tuple[float, ...] = PARTS


def tokens(batch: int = 8, length: int = 16) -> dict[str, torch.Tensor]:
    """Ids and labels, without storage."""
    ids = torch.empty((batch, length), dtype=torch.int64, device="meta")
    return {"input_ids": ids, "labels": ids.clone()}


def build_llama() -> tuple[nn.Module, Mapping[str, torch.Tensor]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=96, intermediate_size=256, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
        vocab_size=VOCABULARY,
    )  # fmt: skip
    with torch.device("meta"):
        return LlamaForCausalLM(config), tokens()


def build_gpt2() -> tuple[nn.Module, Mapping[str, torch.Tensor]]:
    """With tied weights, dropout off."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=2, n_embd=48, n_head=4, vocab_size=VOCABULARY, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0,
    )  # fmt: skip
    with torch.device("meta"):
        return GPT2LMHeadModel(config), tokens()


def build_mixture() -> tuple[nn.Module, Mapping[str, torch.Tensor]]:
    """Four experts in each of two layers, as grouped products."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCABULARY, num_local_experts=4, num_experts_per_tok=2, experts_implementation="grouped_mm",
    )  # fmt: skip
    with torch.device("meta"):
        return MixtralForCausalLM(config), tokens()


class Pictures(nn.Module):
    """Three convolutions under a linear head."""

    def __init__(self) -> None:
        super().__init__()
        first, second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1, stride=2)
        third, head = nn.Conv2d(32, 32, 3, padding=1), nn.Linear(32, 10)
        pool = (nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.net = nn.Sequential(first, nn.GELU(), second, nn.GELU(), third, nn.GELU(), *pool, head)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(x), labels)


def build_pictures() -> tuple[nn.Module, Mapping[str, torch.Tensor]]:
    with torch.device("meta"):
        return Pictures(), {"x": torch.empty(16, 3, 32, 32), "labels": torch.empty(16, dtype=torch.int64)}


CASES: Mapping[str, Case] = {
    "llama": Case(build_llama, "Llama, 2 layers of 96, on (2, 2)"),
    "gpt2": Case(build_gpt2, "GPT-2, 2 layers of 48, tied, on (2, 2)"),
    "mixture": Case(build_mixture, "Mixtral, 2 layers of 64, 4 experts, on (2, 2)"),
    "pictures": Case(build_pictures, "3 convolutions on (2, 2)"),
    "llama3-8b": Case(build_llama3_8b, "Llama 3 8B, batch 16 x 8192, bf16, on (8, 8)", (8, 8), "bf16"),
}


def measure(name: str) -> dict[str, Any]:
    """The figures of one case, of this process."""
    case = CASES[name]
    model, batch = case.build()
    before = cpu_seconds()
    plan = autopar.plan(model, case.mesh, batch, cluster=CLUSTER, options=autopar.Options(precision=case.precision))
    one, one_gib, before = cpu_seconds() - before, peak_gib(), cpu_seconds()
    held = plan.predicted.peak_bytes
    found = plan.whatif(memory_limit=[int(part * held) for part in case.parts])
    every, gib, before = cpu_seconds() - before, peak_gib(), cpu_seconds()
    nowhere = plan.whatif(memory_limit=int(NOTHING * held)).answers[0]
    return {
        "model": case.description,
        "mesh": list(case.mesh),
        "one_plan": {
            "cpu_seconds": one,
            "peak_gib": one_gib,
            "step_seconds": plan.predicted.step_seconds,
            "bytes": held,
        },
        "limits": {
            "cpu_seconds": every,
            "cpu_seconds_each": every / len(found.answers),
            "times_one_plan": every / one,
            "peak_gib": gib,
            "answers": found.data()["answers"],
        },
        "nowhere": {"cpu_seconds": cpu_seconds() - before, "error": nowhere.error},
    }


def measure_apart(name: str, stop: float) -> dict[str, Any]:
    """The figures of a fresh process, or of how it was stopped after ``stop`` seconds of the processor. Raises
    RuntimeError if it fails."""
    figures = measured_apart("benchmarks.whatif", "--measure", name, "--stop", str(stop))
    return {"model": CASES[name].description, "stopped_after_seconds": stop} if figures is None else figures


def row_of(figures: Mapping[str, Any]) -> tuple[str, ...]:
    """A case as a row of the table."""
    if "stopped_after_seconds" in figures:
        return (figures["model"], f"stopped at {figures['stopped_after_seconds']:.0f}", *[""] * 6)
    one, limits = figures["one_plan"], figures["limits"]
    plans = sum("error" not in each for each in limits["answers"])
    return (
        figures["model"],
        f"{one['cpu_seconds']:.1f}",
        f"{one['peak_gib']:.2f}",
        f"{limits['cpu_seconds']:.1f}",
        f"{limits['cpu_seconds_each']:.1f}",
        f"{limits['times_one_plan']:.1f}",
        f"{limits['peak_gib']:.2f}",
        f"{plans} of {len(limits['answers'])}",
        f"{figures['nowhere']['cpu_seconds']:.1f}",
    )


def main(words: Sequence[str]) -> int:
    """Measures the cases."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.whatif", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--output", metavar="FILE", help="write the JSON there as well")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--stop", type=float, default=900.0, metavar="SECONDS", help="of the processor, for each case")
    parser.add_argument("--measure", choices=list(CASES), help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if arguments.measure:
        resource.setrlimit(resource.RLIMIT_CPU, (int(arguments.stop), resource.getrlimit(resource.RLIMIT_CPU)[1]))
        print(json.dumps(measure(arguments.measure)))
        return 0
    cases = {name: measure_apart(name, arguments.stop) for name in arguments.cases}
    columns = (
        "from plan to what if",
        "one plan",
        "GiB",
        "8 limits",
        "each",
        "x one plan",
        "GiB",
        "plans",
        "nothing fits",
    )
    table = make_table("CPU-seconds of plans under other limits of memory", columns, list(map(row_of, cases.values())))
    figures = {"benchmark": "whatif", "machine": describe_machine(), "parts": PARTS, "cases": cases}
    emit(figures, table, arguments.json, arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
