"""How near plans within limits of memory come to the best that is known: of one search with everything open, and of
many, each restricted.

    python -m benchmarks.limits [--json] [--output FILE] [--cases llama palm ...] [--parts 0.7 0.4]

Small models on four devices. Each is planned without a limit first; then within parts of the bytes that this plan
holds, by the default search and by searches that fix the number of stages, of microbatches, ZeRO or recomputation. A
restricted search looks at less, and so at all of it: what it finds and the default search does not is a regret.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import autopar

from .fresh_process import measured_apart
from .planning import cpu_seconds
from .report import describe_machine, emit, make_table
from .whatif import build_gpt2, build_llama, build_mixture, build_pictures, tokens

PARTS = (0.7, 0.4)
MICROBATCHES = (4, 8, 16)
VOCABULARY = 1500


@dataclass(frozen=True)
class Case:
    """A model with its batch, and the cluster whose four devices it is planned for; None: this machine."""

    build: Callable[[], tuple[nn.Module, Mapping[str, torch.Tensor]]]
    description: str
    cluster: str | None = "dgx-a100-80gb"
    mesh: tuple[int, ...] = (2, 2)


class ParallelBlock(nn.Module):
    """Attention beside a gated MLP, with normalised queries and keys, as in PaLM."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads, head = heads, width // heads
        self.norm, self.of_queries, self.of_keys = nn.LayerNorm(width), nn.LayerNorm(head), nn.LayerNorm(head)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up, self.down = nn.Linear(width, inner), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        split = (*x.shape[:2], self.heads, -1)
        q, k, v = (part.view(split).transpose(1, 2) for part in self.qkv(y).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(self.of_queries(q), self.of_keys(k), v, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(x.shape)
        mixed, gated = self.out(mixed), self.down(functional.gelu(self.gate(y)) * self.up(y))
        return torch.add(x + mixed, gated)


class Palm(nn.Module):
    """Four parallel blocks between an embedding and a head."""

    def __init__(self, width: int = 192, length: int = 64) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.Sequential(*(ParallelBlock(width, 6, 512) for _ in range(4)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = self.head(self.norm(self.blocks(self.tokens(ids) + self.positions)))
        return functional.cross_entropy(scores.float().flatten(0, 1), labels.flatten())


def build_palm() -> tuple[nn.Module, Mapping[str, torch.Tensor]]:
    with torch.device("meta"):
        ids = torch.empty((16, 64), dtype=torch.int64)
        return Palm().to(torch.bfloat16), {"ids": ids, "labels": ids.clone()}


def build_tied_llama() -> tuple[nn.Module, Mapping[str, torch.Tensor]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=160, intermediate_size=448, num_hidden_layers=3, num_attention_heads=10, num_key_value_heads=5,
        vocab_size=2003, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        return LlamaForCausalLM(config), tokens(12, 48)


class Perceptron(nn.Module):
    """Eight layers of 256."""

    def __init__(self) -> None:
        super().__init__()
        layers = [part for _ in range(8) for part in (nn.Linear(256, 256), nn.GELU())]
        self.net = nn.Sequential(*layers, nn.Linear(256, 10))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.net(x), labels)


def build_perceptron() -> tuple[nn.Module, Mapping[str, torch.Tensor]]:
    with torch.device("meta"):
        return Perceptron(), {"x": torch.empty(64, 256), "labels": torch.empty(64, dtype=torch.int64)}


CASES: Mapping[str, Case] = {
    "palm": Case(build_palm, "PaLM-like, 4 blocks of 192, bf16", None),
    "tied-llama": Case(build_tied_llama, "Llama, 3 layers of 160, tied", None),
    "llama": Case(build_llama, "Llama, 2 layers of 96"),
    "gpt2": Case(build_gpt2, "GPT-2, 2 layers of 48, tied"),
    "mixture": Case(build_mixture, "Mixtral, 2 layers of 64, 4 experts"),
    "perceptron": Case(build_perceptron, "8 linear layers of 256"),
    "pictures": Case(build_pictures, "3 convolutions"),
}


def restrictions() -> Iterator[dict[str, Any]]:
    """Options of the restricted searches."""
    yield from ({"stages": stages} for stages in (1, 2, 4))
    yield from ({"stages": stages, "microbatches": count} for stages in (2, 4) for count in MICROBATCHES)
    yield {"stages": 1, "microbatches": 1, "zero": 3}
    yield {"stages": 1, "microbatches": 1, "recompute": "full"}


def searched(case: Case, limit: int | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """The plan that one search finds, and what the search cost."""
    model, batch = case.build()
    before = cpu_seconds()
    figures: dict[str, Any] = {"options": dict(options)}
    try:
        asked = autopar.Options(memory_limit=limit, **options)
        plan = autopar.plan(model, case.mesh, batch, cluster=case.cluster, options=asked)
    except autopar.AutoparError as error:
        figures["error"] = type(error).__name__
    else:
        predicted = plan.predicted
        figures |= {"step_seconds": predicted.step_seconds, "peak_bytes": predicted.peak_bytes}
        figures |= {"stages": plan.stages, "microbatches": plan.microbatches, "status": plan.status, "gap": plan.gap}
    return figures | {"cpu_seconds": cpu_seconds() - before}


def measure(name: str, parts: Sequence[float]) -> dict[str, Any]:
    """The figures of one case, of this process."""
    case = CASES[name]
    free = searched(case, None, {})
    within = []
    for part in parts:
        limit = int(part * free["peak_bytes"])
        default = searched(case, limit, {})
        others = [searched(case, limit, options) for options in restrictions()]
        within.append(
            {"part": part, "limit_bytes": limit, "default": default, "restricted": others} | regret(default, others)
        )
    return {"model": case.description, "cluster": case.cluster, "free": free, "within": within}


def regret(default: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The quickest of ``others``, and how many times as long the ``default`` takes; none if nothing fits."""
    found = [each for each in others if "step_seconds" in each]
    best = min(found, key=lambda each: each["step_seconds"], default=None)
    if best is None or "step_seconds" not in default:
        return {"best": best, "regret": None}
    return {"best": best, "regret": default["step_seconds"] / best["step_seconds"]}


def measure_apart(name: str, parts: Sequence[float]) -> dict[str, Any]:
    """The figures of a fresh process. Raises RuntimeError if it fails or is stopped."""
    figures = measured_apart("benchmarks.limits", "--measure", name, "--parts", *map(str, parts))
    if figures is None:
        raise RuntimeError(f"{name} was stopped by a limit of processor seconds")
    return figures


def rows_of(figures: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """A case as rows of the table, one for each limit."""
    for each in figures["within"]:
        default, best = each["default"], each["best"]
        took = f"{default['step_seconds'] * 1e3:.3g}" if "step_seconds" in default else default["error"]
        least = f"{best['step_seconds'] * 1e3:.3g}" if best else "nothing"
        how = ", ".join(f"{key}={value}" for key, value in best["options"].items()) if best else ""
        ratio = f"{each['regret']:.2f}" if each["regret"] else ""
        yield figures["model"], f"{each['part']:g}", took, least, how, ratio, f"{default['cpu_seconds']:.1f}"


def main(words: Sequence[str]) -> int:
    """Measures the cases."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.limits", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--output", metavar="FILE", help="write the JSON there as well")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--parts", nargs="+", type=float, default=PARTS, help="of the bytes that a free plan holds")
    parser.add_argument("--measure", choices=list(CASES), help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if arguments.measure:
        print(json.dumps(measure(arguments.measure, arguments.parts)))
        return 0
    cases = {name: measure_apart(name, arguments.parts) for name in arguments.cases}
    columns = ("model", "of its bytes", "default ms", "best ms", "found by", "ratio", "CPU s")
    table = make_table(
        "Plans within limits of memory", columns, [row for each in cases.values() for row in rows_of(each)]
    )
    emit(
        {"benchmark": "limits", "machine": describe_machine(), "cases": cases}, table, arguments.json, arguments.output
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
