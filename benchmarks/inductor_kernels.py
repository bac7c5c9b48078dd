"""What Inductor makes of compiled pieces, beside what prices assume: how many kernels, and the bytes that they access.

Inductor's figures are those of its scheduler after fusion: the kernels that it would write, and for each the buffers
that it reads from outside and writes for others, each once and whole. Prices count values in the same way
(:mod:`autopar.cost.kernels.grouping`). Products and other operations that Inductor hands to torch are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from autopar.cluster.device import Device
from autopar.cost.compute.op_families import family_of
from autopar.cost.kernels.kernel import Kernel, is_alias
from autopar.cost.kernels.share import share_bytes, shares_of
from autopar.ir.graph import Graph
from autopar.placement.fused_kernels import FusedKernels


@dataclass(frozen=True)
class Access:
    """A kernel: the operations in it, and the bytes that it reads and writes."""

    operations: tuple[str, ...]
    bytes: int


class CountedError(Exception):
    """Ends the compilation of a piece, whose kernels are known: no code is needed to count them."""


@contextmanager
def counting() -> Iterator[list[Access]]:
    """The kernels of the pieces that Inductor compiles meanwhile. None is finished: they run as they are, which a
    warning of the plan says."""
    from torch._inductor import config
    from torch._inductor.scheduler import Scheduler

    found: list[Access] = []

    def codegen(scheduler: Any) -> None:
        found.extend(_accesses(scheduler))
        raise CountedError

    with patch.object(Scheduler, "codegen", codegen), config.patch(force_disable_caches=True):
        yield found


def _accesses(scheduler: Any) -> Iterator[Access]:
    from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode

    for node in scheduler.nodes:
        if not isinstance(node, (ExternKernelSchedulerNode, NopKernelSchedulerNode)):
            origins = {str(each.target) for part in node.get_nodes() for each in part.node.get_origins()}
            yield Access(tuple(sorted(origins)), _bytes(node))


def _bytes(node: Any) -> int:
    """Bytes of a kernel by Inductor's formula, but of a table, whose rows it looks up, only those: it has them as a
    limit for single operations alone."""
    both = {"include_reads": True, "include_writes": True}
    outside = node.get_read_write_buffer_accesses(**both)
    parts: Counter[str] = Counter()
    for part in node.get_nodes():
        parts.update({name: int(size) for name, size in part.get_read_write_buffer_accesses(**both).items()})
    return sum(min(int(size), parts[name]) for name, size in outside.items())


def predicted(graph: Graph, device: Device) -> list[Access]:
    """The kernels that prices assume for a concrete graph with saved activations, all on one device."""
    fused = FusedKernels.of(graph, device)
    kernels = (kernel for kernel in fused.kernels.kernels if kernel.nodes[0].name in fused.shares)
    return [_access(fused.kernels.graph, kernel) for kernel in kernels if not _moves_nothing(kernel)]


def _moves_nothing(kernel: Kernel) -> bool:
    return all(is_alias(node) or family_of(node.op).is_view for node in kernel.nodes)


def _access(graph: Graph, kernel: Kernel) -> Access:
    moved, shares = 0.0, shares_of(graph, kernel)
    for node in kernel.nodes:
        inputs = tuple(map(graph.type_of, node.operands))
        moved += share_bytes(node, inputs, node.types, shares[node.name])
    return Access(tuple(sorted({node.op for node in kernel.nodes})), int(moved))
