"""Reductions over dims that are not the last ones, such as the gradients of a norm's weight: where their kernels end.

The loops of a kernel run over rows, and inside over what a row has. A reduction over the last dims fits into them, with
the operations before and after it. One over other dims (*across* rows) has its result when all rows are done, so what
follows is another kernel. On GPUs it shares the kernel of the operations before it (Inductor's mix-order reductions).
On CPUs it does not: it reads for itself what they read, or what they write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from autopar.cost.compute.flops_and_bytes import argument
from autopar.ir.graph import Graph
from autopar.ir.node import Node, Value

from .kernel import Kernel, real_operands
from .sums_apart import is_sum_apart

# Which dims a reduction sums over: the last ones, all of them, or others.
Over = Literal["rows", "whole", "across"]
_REDUCTIONS = frozenset(("sum", "mean", "amax", "amin", "prod", "var", "std", "any", "all", "argmax", "argmin"))


def reduced_over(graph: Graph, node: Node) -> Over | None:
    """What an operation reduces; None if it is no reduction."""
    if is_sum_apart(node):
        return "across"
    namespace, _, name = node.op.partition(".")
    if namespace != "aten" or name.partition(".")[0] not in _REDUCTIONS or not node.operands:
        return None
    shape = graph.type_of(node.operands[0]).shape
    given = argument(node, "dim")
    listed = range(len(shape)) if given in (None, ()) else [given] if isinstance(given, int) else given
    dims = {dim % len(shape) for dim in listed if shape} & {i for i, size in enumerate(shape) if size != 1}
    kept = [i for i, size in enumerate(shape) if size != 1 and i not in dims]
    if not kept:
        return "whole"
    return "rows" if not dims or min(dims) > max(kept) else "across"


@dataclass
class Late:
    """Which operations of a graph run when all rows are done: reductions across rows, and what is computed from their
    results alone. Operations of another shape that read those are another kernel. ``fuses``: whether an operation
    shares kernels."""

    graph: Graph
    fuses: Callable[[Node], bool]
    _late: dict[str, bool] = field(default_factory=dict)

    def may_follow(self, producer: Node, consumer: Node) -> bool:
        """Whether both may be in one kernel."""
        return not self.is_late(producer) or _numel(consumer) <= _numel(producer)

    def is_late(self, node: Node) -> bool:
        if node.name not in self._late:
            self._late[node.name] = reduced_over(self.graph, node) in ("whole", "across") or self._follows(node)
        return self._late[node.name]

    def _follows(self, node: Node) -> bool:
        """Whether an operand is late, and the operation no larger. Producers were asked before their consumers."""
        if node.is_placeholder or not self.fuses(node):
            return False
        sources = (self.graph[value.node] for value in real_operands(self.graph, node))
        return any(self._late.get(source.name, False) and _numel(node) <= _numel(source) for source in sources)


def _numel(node: Node) -> int:
    return int(node.type.numel) if node.types and node.types[0] is not None else 0


def without_reductions_across(
    graph: Graph, kernel: Kernel, users: Mapping[Value, list[Node]]
) -> tuple[Sequence[Node], tuple[Kernel, ...]]:
    """The operations of a kernel without its reductions across rows, and the kernels of those, one for each shape that
    they reduce. Each has the operations that only it needs, and computes again what others of them compute by row, but
    for sums over rows, which these write."""
    apart = _by_shape(graph, kernel)
    sinks = {node.name for nodes in apart for node in nodes}
    if not sinks or len(sinks) == len(kernel.nodes) == 1:
        return kernel.nodes, ()
    results = [v for v in kernel.writes if v.node not in sinks and _is_read_elsewhere(v, users, kernel, sinks)]
    kept = _needed(graph, kernel.nodes, {value.node for value in results}, frozenset())
    sums = {Value(node.name) for node in kernel.nodes if node.name in kept and reduced_over(graph, node) is not None}
    written, done, kernels = {*results, *sums}, set(kept), list[Kernel]()
    for nodes in apart:
        names = {node.name for node in nodes}
        own = _needed(graph, kernel.nodes, names, done)
        done |= own
        members = tuple(node for node in kernel.nodes if node.name in own)
        kernels.append(_reading(graph, members, kernel, written))
    return [node for node in kernel.nodes if node.name in kept], tuple(kernels)


def _by_shape(graph: Graph, kernel: Kernel) -> list[list[Node]]:
    """The reductions across rows of a kernel, and what follows them in it, by what they reduce. What follows several
    is with all of them."""
    groups: dict[object, list[Node]] = {}
    of: dict[str, object] = {}
    for node in kernel.nodes:
        followed = {of[value.node] for value in real_operands(graph, node) if value.node in of}
        if reduced_over(graph, node) == "across" and not followed:
            followed = {(graph.type_of(node.operands[0]).shape, str(argument(node, "dim")))}
        if followed:
            first, *others = sorted(followed, key=str)
            members = groups.setdefault(first, [])
            for other in others:
                members += groups.pop(other)
            members.append(node)
            of.update({member.name: first for member in members})
    return list(groups.values())


def _is_read_elsewhere(value: Value, users: Mapping[Value, list[Node]], kernel: Kernel, sinks: set[str]) -> bool:
    readers = {user.name for user in users.get(value, ())}
    return not readers or bool(readers - sinks - {node.name for node in kernel.nodes})


def _needed(graph: Graph, nodes: Sequence[Node], names: set[str], without: set[str] | frozenset[str]) -> set[str]:
    """``names`` and the operations among ``nodes`` that they are computed from, but for those in ``without``."""
    needed = set(names)
    for node in reversed(nodes):
        if node.name in needed:
            needed |= {value.node for value in real_operands(graph, node)} - without
    return needed & {node.name for node in nodes}


def _reading(graph: Graph, members: tuple[Node, ...], kernel: Kernel, written: set[Value]) -> Kernel:
    """The kernel of ``members``, which computes again what others of ``kernel`` compute and do not write."""
    inside, own = {node.name for node in members}, {node.name: node for node in kernel.nodes}
    recomputes: dict[Value, tuple[Value, ...]] = {}
    reads: dict[Value, None] = {}
    for node in members:
        for value in real_operands(graph, node):
            if value.node in own and value.node not in inside and value not in written:
                recomputes[value] = tuple(_sources(graph, value, own, written))
                reads.update(dict.fromkeys(recomputes[value]))
            elif value.node not in inside:
                reads[value] = None
    writes = tuple(value for value in kernel.writes if value.node in inside)
    return Kernel(members, tuple(reads), writes, recomputes)


def _sources(graph: Graph, value: Value, own: Mapping[str, Node], written: set[Value]) -> Iterator[Value]:
    """The values from outside of ``own``, or among ``written``, that a value is computed from."""
    seen, waiting = {value}, [value]
    while waiting:
        for operand in real_operands(graph, own[waiting.pop().node]):
            if operand not in seen:
                seen.add(operand)
                if operand.node in own and operand not in written:
                    waiting.append(operand)
                else:
                    yield operand
