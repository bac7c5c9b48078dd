"""The seconds of a step on one device, as if it did all of the work."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache

from autopar.cluster.description import Cluster
from autopar.ir.graph import Graph
from autopar.ir.node import SAVED_ACTIVATION, VIEWS, Node
from autopar.ir.placements import REPLICATE, Strategy
from autopar.placement.fused_kernels import FusedKernels
from autopar.placement.prices import Prices


@cache
def _whole(operands: int, results: int) -> Strategy:
    """The only strategy of an operation on one device."""
    return Strategy(((REPLICATE,),) * operands, ((REPLICATE,),) * results)


def single_device_seconds(cluster: Cluster, graph: Graph, fused: FusedKernels | None) -> tuple[float, float]:
    """Seconds to compute a step on one device of ``cluster``, and the part of them that is paid again for each further
    microbatch: the kernel launches. However a step is divided, this is the least sum over its devices. ``fused``: the
    kernels of the graph, if pieces of it are compiled."""
    each = seconds_alone(cluster, graph, fused)
    return sum(seconds for seconds, _ in each.values()), sum(launches for _, launches in each.values())


def seconds_alone(cluster: Cluster, graph: Graph, fused: FusedKernels | None) -> dict[str, tuple[float, float]]:
    """For each operation of a step, the seconds on one device of ``cluster``, and the part of them that launches."""
    prices, found = Prices(cluster, (1,), {}, exchanged=0, fused=fused), dict[str, tuple[float, float]]()
    classes = graph.classes or (fused.classes if fused is not None else {})
    known: dict[Hashable, tuple[float, float]] = {}  # Deep models have few classes, and few calls that differ.
    for node in graph.nodes:
        if not node.is_placeholder and node.op != SAVED_ACTIVATION:
            own = classes.get(node.name) or (node.name if fused is not None else _call(graph, node))
            if own not in known:
                known[own] = _alone(prices, graph, node)
            found[node.name] = known[own]
    return found


def _call(graph: Graph, node: Node) -> Hashable:
    """Equal for two nodes of ``graph`` if they run the same operation on tensors of the same types."""
    return node.form, *map(id, map(graph.type_of, node.operands)), *map(id, node.types)


def _alone(prices: Prices, graph: Graph, node: Node) -> tuple[float, float]:
    """The seconds of one operation of ``graph``, and the part of them that launches."""
    kinds, share = tuple(map(graph.type_of, node.operands)), prices.fused.share_of(node) if prices.fused else None
    launches = float(node.op not in VIEWS) if share is None else share.launches
    seconds = prices.node(node, kinds, _whole(len(node.operands), len(node.types)))
    return seconds, prices.cluster.device.launch_seconds * launches
