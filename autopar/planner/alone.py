"""The seconds of a step on one device, as if it did all of the work."""

from __future__ import annotations

from functools import cache

from autopar.cluster.description import Cluster
from autopar.ir.graph import Graph
from autopar.ir.node import VIEWS
from autopar.ir.placements import REPLICATE, Strategy
from autopar.placement.prices import Prices


@cache
def _whole(operands: int, results: int) -> Strategy:
    """The only strategy of an operation on one device."""
    return Strategy(((REPLICATE,),) * operands, ((REPLICATE,),) * results)


def single_device_seconds(cluster: Cluster, graph: Graph) -> tuple[float, float]:
    """Seconds to compute a step on one device of ``cluster``, and the part of them that is paid again for each further
    microbatch: the kernel launches. However a step is divided, this is the least sum over its devices."""
    nodes = [node for node in graph.nodes if not node.is_placeholder]
    launches = cluster.device.launch_seconds * sum(node.op not in VIEWS for node in nodes)
    return sum(seconds_alone(cluster, graph).values()), launches


def seconds_alone(cluster: Cluster, graph: Graph) -> dict[str, float]:
    """Seconds to compute each operation of a step on one device of ``cluster``."""
    prices = Prices(cluster, (1,), {}, exchanged=0)
    return {
        node.name: prices.node(
            node, tuple(map(graph.type_of, node.operands)), _whole(len(node.operands), len(node.types))
        )
        for node in graph.nodes
        if not node.is_placeholder
    }
