"""Which messages of a step may travel while it computes, and how much of them.

A step without stages has two windows, its forward and its backward pass. Beside the computing of either travel the
gathers of weights it needs, which a program starts one weight ahead of their use, and beside backward the reductions of
gradients, which start as soon as a bucket is full (:mod:`autopar.passes.overlap`). All other messages are waited for
where they stand: what computes next needs them.

The first gather has nothing to hide behind, nor has the reduction of the last bucket, and while that bucket is
computed there is nothing to reduce yet. So of the messages and of the computing of a window the share of one piece (the
largest parameter, or a bucket) is not counted: what is left is a queue that is never empty and is served while the
window lasts.

Where messages take the processors that compute (:attr:`autopar.cluster.Cluster.overlaps` is false) there are none.
"""

from __future__ import annotations

from collections.abc import Mapping

from .cluster import Cluster
from .graph import Graph
from .prices import BUCKET_BYTES, exchanged_bytes
from .repeats import ONCE, Repeats


def hidden_shares(graph: Graph, cluster: Cluster, repeats: Repeats) -> Mapping[str, float]:
    """For each window, by phase, the share of its messages and of its computing that can be at once; none for steps in
    microbatches or stages, whose messages the simulator of pipelines places."""
    sizes = [int(node.type.bytes) for node in graph.placeholders("param")]
    if not cluster.overlaps or repeats != ONCE or not sizes:
        return {}
    gathered = 1.0 - max(sizes) / sum(sizes)
    exchanged = exchanged_bytes(graph)
    reduced = 1.0 - min(1.0, max(max(sizes), BUCKET_BYTES) / exchanged) if exchanged else 0.0
    return {phase: share for phase, share in (("forward", gathered), ("backward", reduced)) if share > 0}
