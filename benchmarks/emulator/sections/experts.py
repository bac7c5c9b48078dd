"""Prices blocks of experts under a layout: the computation of a microbatch's rows on one device, and their exchange.

Tokens choose experts, and a row is one choice of a token. Each of the ``expert`` ranks of a layout has an equal number
of experts, and the tokens of its own microbatch. An all-to-all before the experts sends every row to a rank that has
its expert, and one after them sends it back; gradients do the same. Experts are assumed to be chosen equally often.
Experts are also divided among tensor ranks, each of which takes the rows of its own experts.

Products of an expert are those of a training library: forward retains the rows received and the activation's operand,
and backward recomputes no product. Each row takes 2 products forward and 4 backward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from autopar.cluster.description import Cluster
from autopar.cost import compute_seconds
from autopar.errors import OptionsError
from autopar.ir.assignment import Assignment
from autopar.ir.graph import Graph
from autopar.ir.node import Node
from autopar.layout import Layout, degrees
from autopar.placement.prices import local_type
from autopar.planner.roles.expert_blocks import FORWARD, MATRICES, source_of
from benchmarks.emulator.stored import gradient_itemsize

from .expert_all_to_all import Block

# Bandwidth of the kernels between products of experts, relative to that of a copy: they gather rows, read halves of
# them, and reduce. Blocks of six sizes on an H200 (`benchmarks/gpu/experts.py`, docs/cost-model.md), not fitted here.
BETWEEN = 0.73


@dataclass(frozen=True)
class BlockCost:
    """Costs of a block on one device: seconds of computation in each phase, ``exchanged`` bytes of rows sent in an
    exchange, bytes ``saved`` for backward, and ``working`` bytes of transient memory."""

    forward: float
    backward: float
    exchanged: float
    saved: int
    working: int


def find_blocks(graph: Graph, assignment: Assignment, mesh: tuple[int, ...]) -> Mapping[str, Block]:
    """The blocks of a placed graph by the names of their forward nodes."""
    return {node.name: _block(graph, node, assignment, mesh) for node in graph.nodes if node.op == FORWARD}


def _block(graph: Graph, node: Node, assignment: Assignment, mesh: tuple[int, ...]) -> Block:
    operands = zip(map(graph.type_of, node.operands), assignment.strategies[node.name].inputs, strict=True)
    tokens, choices, _, up, down = [local_type(kind, place, mesh) for kind, place in operands][:5]
    held, count = int(up.shape[0]), int(graph.type_of(node.operands[MATRICES]).shape[0])
    rows = math.prod(map(int, choices.shape)) * held / count
    width = int(tokens.shape[-1])
    sent, each = int(tokens.shape[0]), int(choices.shape[-1])
    matrices = int(up.shape[1]), int(down.shape[2]), tokens.dtype.itemsize
    return Block(rows, held, count, width, *matrices, sent, each, node.module)


def expert_counts(graph: Graph) -> list[int]:
    """How many experts each block has."""
    return [int(graph.type_of(node.operands[MATRICES]).shape[0]) for node in graph.nodes if node.op == FORWARD]


def expert_weights(graph: Graph) -> frozenset[str]:
    """Parameters that have an entry for each expert, by node name."""
    names = set()
    for node in graph.nodes:
        if node.op == FORWARD:
            names |= {source_of(graph, value) for value in node.operands[MATRICES:]}
    return frozenset(names)


def check_degree(blocks: Sequence[Block], layout: Layout) -> None:
    """Raises :class:`OptionsError` if experts do not divide evenly."""
    if layout.expert > 1 and not blocks:
        raise OptionsError(
            f"Layout(expert={layout.expert}): the model has no block of experts in one operation (mixtures of experts "
            "of transformers, or autopar.ops.experts.experts); take expert=1"
        )
    for block in blocks:
        if block.held % layout.expert:
            shared = f" / {layout.tensor} tensor ranks" if layout.tensor > 1 else ""
            ranks, common = layout.data * layout.context, math.gcd(*(other.held for other in blocks))
            works, here = (degrees("expert", n, layout.expert) for n in (common, math.gcd(common, ranks)))
            raise OptionsError(
                f"Layout(expert={layout.expert}): {block.module or 'a block'} has {block.count} experts{shared}, which "
                f"do not divide among {layout.expert} ranks; {works}"
                + (f", of {ranks} data x context ranks {here}" if works != here else "")
            )


class BlockPrices:
    """Prices blocks of experts under a layout. ``accumulates``: whether products add the gradients of weights to those
    of earlier microbatches, which they read and write; otherwise they write their own. ``reads``: the names of what
    layouts say that prices depend on."""

    reads: ClassVar[tuple[str, ...]] = ("expert",)

    def __init__(self, layout: Layout, cluster: Cluster, accumulates: bool) -> None:
        self.layout, self.cluster, self.accumulates = layout, cluster, accumulates

    def rows(self, block: Block) -> float:
        """Rows that a device's experts compute."""
        return block.rows

    def sent_rows(self, block: Block) -> float:
        """Rows that one device sends in an exchange."""
        return self.rows(block)

    def operand_dtype(self, block: Block) -> torch.dtype:
        """The dtype of the operands of products."""
        return torch.float16 if self.layout.precision == "fp16" else _DTYPES[block.itemsize]

    def orders(self, block: Block) -> int:
        """How often rows are put in order in each phase. They are gathered in the order of their experts; results are
        weighted and added up for each token. What an all-to-all of rows delivers is in the order of its senders: it is
        put in that of several experts, and back."""
        return 4 if 1 < self.layout.expert < block.held else 2

    def passing(self, block: Block, width: float) -> float:
        """Seconds of a kernel between products that reads or writes ``width`` elements of every row."""
        return self.copying(block, width / BETWEEN)

    def copying(self, block: Block, width: float) -> float:
        """Seconds of reading or writing ``width`` elements of every row in the order in which they are."""
        return compute_seconds(self.cluster, 0.0, self.rows(block) * width * block.itemsize, torch.float32)

    def each(self, block: Block) -> float:
        """Rows that each expert of a device gets."""
        return max(1.0, self.rows(block) / self.held(block))

    def held(self, block: Block) -> int:
        """Experts of a device."""
        return block.held // self.layout.expert

    def grouped_rate(self, block: Block) -> float:
        """The rate of the products of all experts of a device relative to that of plain ones."""
        return self.cluster.device.grouped_products

    def product(self, block: Block, sizes: tuple[float, float, float], result_bytes: int | None = None) -> float:
        """Seconds of a product of ``sizes`` (m, n, k) for every expert of a device; ``result_bytes``: what it writes of
        each element, by default one value."""
        held, (m, n, k), dtype = self.held(block), sizes, self.operand_dtype(block)
        written = block.itemsize if result_bytes is None else result_bytes
        moved = held * (written * m * n + dtype.itemsize * (n * k + m * k))
        return compute_seconds(self.cluster, 2.0 * held * m * n * k / self.grouped_rate(block), moved, dtype, sizes)

    def cost(self, block: Block) -> BlockCost:
        """The costs of a block on a device."""
        rows, each, operand_bytes = self.rows(block), self.each(block), self.operand_dtype(block).itemsize
        added = 2 * gradient_itemsize(self.layout, block.itemsize) if self.accumulates else block.itemsize

        def product(m: float, n: float, k: float, result_bytes: int | None = None) -> float:
            return self.product(block, (m, n, k), result_bytes)

        wide, up, down = block.width, block.up, block.down
        ordering = self.orders(block) * self.passing(block, 2 * wide)
        forward = product(each, up, wide) + product(each, wide, down) + self.passing(block, up + down) + ordering
        backward = (
            *(product(each, wide, up), product(up, wide, each, added)),
            *(product(each, down, wide), product(wide, down, each, added)),
            *(self.passing(block, 2 * up + down), ordering),
        )
        exchanged = self.sent_rows(block) * wide * block.itemsize if self.layout.expert > 1 else 0.0
        # Only products read the rows in backward.
        saved = int(rows * (wide * operand_bytes + up * block.itemsize))
        # In backward: the recomputed activation and its gradient, the gradient of its operand, rows and their
        # gradients.
        transient = rows * (2 * down + up + 2 * wide)
        return BlockCost(forward, sum(backward), exchanged, saved, int(transient * block.itemsize))


_DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
