"""Context parallelism: attention with its queries sharded along the sequence is exact, holds no whole score matrix, and
is what the planner chooses where sequences are long."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import autopar
from autopar.ir.assignment import Assignment
from autopar.ir.graph import Graph
from autopar.ir.placements import local_shape, shard_dim
from autopar.options import Options
from autopar.passes.annotate.annotate import annotate
from autopar.placement.prices import Prices
from autopar.planner.request import PlanRequest
from autopar.planner.solve_mesh import solve_mesh
from autopar.planner.step_graphs import step_graph
from autopar.planner.timings import Timings
from autopar.trace.tracer import trace
from tests.helpers.interpret import interpret
from tests.helpers.marks import slow_but
from tests.helpers.planning import requested
from tests.zoo.check import Case, check_assignment, compute_bound, make_case

LENGTH = 17
MESHES = {(2,): "S(2)", (4,): "S(2)", (2, 2): "R,S(2)"}
KERNELS = (
    "autopar.attention",
    "autopar.attention_backward",
)


class Core(nn.Module):
    """Attention by torch's kernel: causal, with an additive mask, or with a boolean one over keys."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.register_buffer("bias", torch.linspace(-1, 1, LENGTH * LENGTH).view(1, 1, LENGTH, LENGTH))
        self.register_buffer("kept", (torch.arange(LENGTH) < 12).view(1, 1, 1, LENGTH))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        options: dict[str, Any] = {
            "causal": {"is_causal": True},
            "grouped": {"is_causal": True, "enable_gqa": True},
            "float": {"attn_mask": self.bias},
            "boolean": {"attn_mask": self.kept},
        }[self.form]
        return F.scaled_dot_product_attention(q, k, v, **options)


class Written(nn.Module):
    """Attention written out, so that the scores are a tensor of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = Scores()

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
        return self.scores(q, k).masked_fill(hidden, -torch.inf).softmax(-1) @ v


class Scores(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return q @ k.mT / q.shape[-1] ** 0.5


class Block(nn.Module):
    """Self-attention between two projections; ``groups`` heads of keys and values."""

    def __init__(self, core: nn.Module, width: int = 12, heads: int = 3, groups: int | None = None) -> None:
        super().__init__()
        self.heads, self.groups, self.each = heads, groups or heads, width // heads
        self.q, self.kv = nn.Linear(width, width), nn.Linear(width, 2 * self.groups * self.each)
        self.core, self.out = core, nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (self.heads, self.each)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, self.groups, self.each)).permute(2, 0, 3, 1, 4)
        return self.out(self.core(q, k, v).transpose(1, 2).flatten(2)).square().mean()


BLOCKS = {
    "causal": lambda: Block(Core("causal")),
    "grouped": lambda: Block(Core("grouped"), 24, 6, 2),
    "float": lambda: Block(Core("float")),
    "boolean": lambda: Block(Core("boolean")),
    "written": lambda: Block(Written(), heads=1),
}


def solved(case: Case, mesh: tuple[int, ...], pins: dict[str, str]) -> tuple[Graph, Assignment]:
    cluster = compute_bound(autopar.Cluster.get("dgx-a100-80gb"))
    found, _ = solve_mesh(PlanRequest(case.graph, None, 2, mesh, cluster, Options(pins=pins)), case.graph, Timings())
    prices = Prices.of(cluster, mesh, annotate(case.graph, mesh))
    check_assignment(case, found.instance.graph, found.assignment, prices, f"mesh {mesh}")
    return found.instance.graph, found.assignment


def largest_square(graph: Graph, assignment: Assignment) -> int:
    """Of all values with two dims of the sequence's length, the most elements of one such square a device holds."""
    found = [0]
    for node in graph.nodes:
        for index, kind in enumerate(node.types):
            dims = [] if kind is None else [dim for dim, size in enumerate(kind.shape) if size == LENGTH]
            if kind is not None and len(dims) == 2 and kind.dtype.is_floating_point and node.op != "buffer":
                place = assignment.strategies[node.name].outputs[index]
                held = local_shape(tuple(map(int, kind.shape)), place, assignment.mesh, (0,) * len(assignment.mesh))
                found.append(held[dims[0]] * held[dims[1]])
    return max(found)


@pytest.mark.parametrize("mesh", slow_but([(4,)], [(4,), (2, 2), (2,)]), ids=str)
@pytest.mark.parametrize("name", BLOCKS)
def test_a_sharded_sequence_is_exact(name: str, mesh: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    block = BLOCKS[name]()
    # Written out, one head of one sequence: no rank can hold whole scores of its own.
    case = make_case(block, (torch.randn(1 if name == "written" else 2, LENGTH, block.q.in_features),))
    pinned = "core.scores" if name == "written" else "core"
    graph, assignment = solved(case, mesh, {pinned: MESHES[mesh]})
    kernels = [node for node in graph.nodes if node.op.startswith(KERNELS)]
    if name == "written":
        assert largest_square(graph, assignment) < LENGTH * LENGTH
    else:
        assert next(shard_dim(assignment.strategies[node.name].outputs[0][-1]) for node in kernels) == 2


class Flexible(nn.Module):
    """Attention with a learnt slope per head, causal by a block mask."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor([0.1, -0.2, 0.3]))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen = create_block_mask(lambda b, h, i, j: i >= j, None, None, LENGTH, LENGTH, device=q.device)
        return flex_attention(q, k, v, lambda score, b, h, i, j: score + self.slope[h] * (i - j), block_mask=seen)


class Defined(Flexible):
    """The same by its definition."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        apart = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
        bias = (self.slope[:, None, None] * apart).masked_fill(apart < 0, -torch.inf)
        return (q @ k.mT / q.shape[-1] ** 0.5 + bias).softmax(-1) @ v


def test_flexible_attention_is_its_definition() -> None:
    torch.manual_seed(0)
    flexible, x = Block(Flexible()), torch.randn(2, LENGTH, 12)
    defined = Block(Defined())
    defined.load_state_dict(flexible.state_dict())
    defined(x).backward()
    traced = trace(flexible, (x,), device="cpu")
    found = interpret(traced.graph.at(), {**dict(flexible.named_parameters()), "0": x})
    for name, parameter in defined.named_parameters():
        torch.testing.assert_close(found["gradient", name], parameter.grad, rtol=1e-5, atol=1e-6)


class Long(nn.Module):
    """Layers whose heads are too few to divide, on one long sequence."""

    def __init__(self, layers: int = 2, width: int = 256, heads: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(self.up(x).relu())


def long_sequence() -> tuple[nn.Module, Any]:
    with torch.device("meta"):
        return Long(), (torch.zeros(1, 65536, 256),)


@pytest.mark.parametrize("limited", [False, True])
def test_long_sequences_are_sharded_by_price(limited: bool) -> None:
    # Replicated, what is saved for backward takes some 2.5 GB; the limit leaves room for less than half of it.
    request = requested(long_sequence, (4,), memory_limit=1 << 30) if limited else requested(long_sequence, (4,))
    graph = step_graph(request.graph, request.loss, request.batch)
    found, _ = solve_mesh(request, graph, Timings())
    kernels = [node for node in found.instance.graph.nodes if node.op.startswith(KERNELS)]
    assert len(kernels) == 4
    assert all(shard_dim(found.assignment.strategies[node.name].outputs[0][0]) == 2 for node in kernels)
    assert not limited or found.breakdown.memory.peak <= 1 << 30


@pytest.mark.slow
@pytest.mark.parametrize("name", ["causal", "grouped"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_processes_agree(name: str, mesh: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    block = BLOCKS[name]()
    batch = (torch.randn(2, LENGTH, block.q.in_features),)
    report = autopar.verify(block, mesh, batch, options=Options(pins={"core": MESHES[mesh]}))
    assert report.ok, str(report)
