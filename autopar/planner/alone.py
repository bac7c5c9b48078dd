"""The seconds of a step on one device, as if it did all of the work."""

from __future__ import annotations

from functools import cache

from autopar.cluster.description import Cluster
from autopar.ir.graph import Graph
from autopar.ir.node import SAVED_ACTIVATION, VIEWS
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
    prices = Prices(cluster, (1,), {}, exchanged=0, fused=fused)
    nodes = [node for node in graph.nodes if not node.is_placeholder and node.op != SAVED_ACTIVATION]
    seconds = sum(
        prices.node(node, tuple(map(graph.type_of, node.operands)), _whole(len(node.operands), len(node.types)))
        for node in nodes
    )
    shares = {node.name: share for node in nodes if fused is not None and (share := fused.share_of(node)) is not None}
    launches = sum(shares[n.name].launches if n.name in shares else float(n.op not in VIEWS) for n in nodes)
    return seconds, cluster.device.launch_seconds * launches
