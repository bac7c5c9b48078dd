"""Which values forward saves for the kernels of backward, and which these recompute.

Instead of saving a value for elementwise use in backward, the kernel that uses it *recomputes* it there, if its sources
take no more memory on a device and its own kernel reads or writes them anyway. Saved instead are the input of a
normalisation, the sum if a residual is added before it, and the two products of a gated activation. (Compilers find the
same by a minimum cut; fused kernels of training libraries are written so.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set

from autopar.ir.graph import Graph
from autopar.ir.node import Node, Value

from .kernel import Kernel, Kernels, real_operands

Alone = Callable[[Node], bool]
Size = Callable[[Value], int]


def with_recomputed(
    graph: Graph,
    kernels: tuple[Kernel, ...],
    users: Mapping[Value, list[Node]],
    fusable: Alone,
    kept: Alone,
    size: Size,
) -> Kernels:
    """Decides kernel by kernel, the last first, which values are saved and which are recomputed: none of ``kept``
    operations."""
    wanted = dict.fromkeys(_saved_for_backward(graph, users))
    rematerialised: dict[Value, tuple[Value, ...]] = {}
    for kernel in reversed(kernels):
        if kernel.phase != "forward" or not all(map(fusable, kernel.nodes)):
            continue
        possible = (v for v in kernel.writes if v in wanted and not kept(graph[v.node]))
        candidates = [v for v in possible if all(map(fusable, _users_in_backward(v, users)))]
        # From the kernel's inputs, or from results that it writes for forward anyway: the sum, if a residual is added
        # before a normalisation.
        written = {v for v in kernel.writes if v not in candidates}
        ways = [{v: _sources(graph, v, kernel, stops) for v in candidates} for stops in (set[Value](), written)]
        needed = [_needed(graph, sources) for sources in ways]
        prices = [sum(size(s) for s in sources if s not in wanted) for sources in needed]
        best = prices.index(min(prices))
        if candidates and prices[best] <= sum(map(size, candidates)):
            rematerialised.update(ways[best])
            for value in candidates:
                del wanted[value]
            wanted.update(needed[best])
    order = {node.name: i for i, node in enumerate(graph.nodes)}
    saved = tuple(sorted(wanted, key=lambda v: (order[v.node], v.index)))
    return Kernels(
        graph, tuple(_rematerialising(kernel, rematerialised, users) for kernel in kernels), saved, rematerialised
    )


def _saved_for_backward(graph: Graph, users: Mapping[Value, list[Node]]) -> Iterable[Value]:
    for value, nodes in users.items():
        node = graph[value.node]
        if node.phase == "forward" and not node.is_placeholder and any(user.phase == "backward" for user in nodes):
            yield value


def _users_in_backward(value: Value, users: Mapping[Value, list[Node]]) -> list[Node]:
    return [user for user in users.get(value, ()) if user.phase == "backward"]


def _needed(graph: Graph, sources: Mapping[Value, tuple[Value, ...]]) -> dict[Value, None]:
    """The sources that must be saved; parameters and inputs exist anyway."""
    return dict.fromkeys(s for values in sources.values() for s in values if not graph[s.node].is_placeholder)


def _sources(graph: Graph, value: Value, kernel: Kernel, stops: Set[Value]) -> tuple[Value, ...]:
    """The values from outside the kernel, or among its results ``stops``, from which it computes ``value``."""
    inside = {node.name for node in kernel.nodes}
    needed, sources = {value.node}, dict[Value, None]()
    for node in reversed(kernel.nodes):
        if node.name in needed:
            for operand in real_operands(graph, node):
                if operand.node in inside and operand not in stops:
                    needed.add(operand.node)
                else:
                    sources[operand] = None
    return tuple(sources)


def _rematerialising(
    kernel: Kernel, rematerialised: Mapping[Value, tuple[Value, ...]], users: Mapping[Value, list[Node]]
) -> Kernel:
    """The kernel, reading the sources of recomputed values, and not writing values that only backward would read."""
    inside = {node.name for node in kernel.nodes}
    reads = dict.fromkeys(s for value in kernel.reads for s in _from(value, kernel, rematerialised))

    def is_read(value: Value) -> bool:
        later = (user for user in users.get(value, ()) if user.name not in inside)
        return value not in rematerialised or any(user.phase == "forward" for user in later)

    again = {v: _from(v, kernel, rematerialised) for v in kernel.reads if v in rematerialised}
    again = again if kernel.phase == "backward" else {}
    return Kernel(kernel.nodes, tuple(reads), tuple(filter(is_read, kernel.writes)), {**kernel.recomputes, **again})


def _from(value: Value, kernel: Kernel, rematerialised: Mapping[Value, tuple[Value, ...]]) -> tuple[Value, ...]:
    return rematerialised.get(value, (value,)) if kernel.phase == "backward" else (value,)
