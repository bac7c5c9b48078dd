"""The price of one operation on one device: the roofline model, and its inputs, FLOPs and bytes.

    seconds = launch + max(work, traffic) + memory_stalls min(work, traffic)

(Williams, Waterman, Patterson 2009). work: the seconds of its products if operands arrive at full speed, or of the
transcendental functions it evaluates. traffic: bytes / bandwidth. Matrix products and attention have efficiencies by
shape (:mod:`autopar.cost.compute.matmul_efficiency`). Other operations run at the peak, because they are bound by
bandwidth on every known device. Views cost ``view_seconds`` and placeholders nothing.
"""

from __future__ import annotations

import math
from collections import Counter

import sympy
import torch

from autopar.cluster.description import Cluster
from autopar.ir.graph import Graph
from autopar.ir.node import Dim, Node

from .expert_blocks import ExpertBlock
from .flops_and_bytes import Inputs, Operation, Outputs, argument
from .matmul_efficiency import attention_seconds, product_seconds
from .op_families import Family, family_of


def _outputs(node: Operation, outputs: Outputs | None) -> Outputs:
    if outputs is not None:
        return outputs
    return node.types if isinstance(node, Node) else ()


def flops(node: Operation, inputs: Inputs, outputs: Outputs | None = None) -> Dim:
    """Floating-point operations of ``node`` on operands of types ``inputs``, with results ``outputs`` (by default the
    node's own types).

    A multiply and an add count two. Dims may be symbolic. Matrix products, convolutions and attention are counted
    exactly (causal attention by half). Other operations count one per element of the result or, if they reduce, of the
    operand.
    """
    return family_of(node.op).flops(node, inputs, _outputs(node, outputs))


def bytes_moved(node: Operation, inputs: Inputs, outputs: Outputs | None = None) -> Dim:
    """Bytes that ``node`` reads and writes, each tensor once; 0 for views. Arguments are those of :func:`flops`."""
    return family_of(node.op).bytes(node, inputs, _outputs(node, outputs))


def compute_seconds(
    cluster: Cluster,
    flops: float,
    nbytes: float,
    dtype: torch.dtype,
    matrix: tuple[float, float, float] | None = None,
    attention: bool = False,
    functions: float = 0.0,
    launches: float = 1.0,
) -> float:
    """Roofline seconds of one operation. ``matrix``: (m, n, k) if it consists of matrix products of that shape;
    ``attention``: whether they are those of fused attention; ``functions``: the number of elements for which it
    evaluates a transcendental function; ``launches``: its share of the launch of a kernel."""
    device = cluster.device
    if matrix is None or not flops:
        work = flops / device.flops(dtype) + functions * device.function_seconds
    elif attention and device.attention_efficiency:
        work = attention_seconds(device, device.flops(dtype) * device.sustained, flops, matrix[2], matrix[1])
    else:
        batch = flops / (2.0 * math.prod(matrix))
        work = product_seconds(device, device.matmul_rate(dtype), batch, matrix, dtype.itemsize)
    traffic = nbytes / device.memory_bandwidth
    return launches * device.launch_seconds + max(work, traffic) + device.memory_stalls * min(work, traffic)


def node_seconds(
    cluster: Cluster,
    node: Operation,
    inputs: Inputs,
    outputs: Outputs | None = None,
    local: str = "",
    added: float = 0.0,
) -> float:
    """Seconds of one run of ``node`` on a device that holds operands of (concrete, local) types ``inputs`` and results
    ``outputs``. ``local``: the name of the local operation that replaces it, if any; ``added``: bytes that it moves in
    addition to these."""
    family = family_of(local or node.op)
    if family.is_view:
        return 0.0 if family.is_free else cluster.device.view_seconds
    results = _outputs(node, outputs)
    work, nbytes = family.flops(node, inputs, results), family.bytes(node, inputs, results) + added
    matrix = family.matrix(inputs, results) if family.matrix is not None else None
    functions = work if family.is_function else 0.0
    if family.is_attention and inputs[0].dtype.itemsize == 2 and is_masked(node):  # Wider ones have one kernel.
        work /= cluster.device.masked_attention
    dtype = dtype_of(inputs, results)
    if family.block is not None and matrix is not None:
        return _block_seconds(cluster, node, inputs, family.block, (work, nbytes), matrix, dtype)
    return compute_seconds(cluster, work, nbytes, dtype, matrix, family.is_attention, functions)


def _block_seconds(
    cluster: Cluster,
    node: Operation,
    inputs: Inputs,
    block: ExpertBlock,
    counts: tuple[float, float],
    matrix: tuple[float, float, float],
    dtype: torch.dtype,
) -> float:
    """Seconds of a block of experts on the device that gets most rows: its products in groups, and the kernels between
    them one after the other. ``counts``: its FLOPs and bytes if all devices get as many."""
    most = cluster.expert_imbalance if block.is_shared(node, inputs) else 1.0
    between = most * float(block.between(node, inputs)) / cluster.device.memory_bandwidth
    grouped = most * float(block.rows(node, inputs)), *matrix[1:]
    work, nbytes = most * counts[0] / cluster.device.grouped_products, most * counts[1]
    return between + compute_seconds(cluster, work, nbytes, dtype, grouped)


def is_masked(node: Operation) -> bool:
    """Whether attention adds a mask to its scores."""
    return any(argument(node, name) is not None for name in ("mask", "attn_mask", "attn_bias"))


def accumulating_seconds(
    cluster: Cluster, node: Operation, inputs: Inputs, outputs: Outputs, nbytes: float, local: str = ""
) -> float:
    """Seconds by which a product takes longer if it adds its result to a sum, and so moves ``nbytes`` more: none if
    computing hides them."""
    alone, adding = (node_seconds(cluster, node, inputs, outputs, local, added) for added in (0.0, nbytes))
    return adding - alone


def dtype_of(inputs: Inputs, outputs: Outputs) -> torch.dtype:
    """The dtype of the computation: that of the first operand, otherwise that of the first result."""
    if inputs:
        return inputs[0].dtype
    return outputs[0].dtype if outputs and outputs[0] is not None else torch.float32


def _total(graph: Graph, count: str) -> sympy.Expr:
    counts, terms = Counter[str](graph.classes.get(node.name, node.name) for node in graph), list[Dim]()
    for name, times in counts.items():  # Nodes of a class have one operation, and the same types.
        node = graph[name]
        family: Family = family_of(node.op)
        if not family.is_view:
            inputs = tuple(graph.type_of(value) for value in node.operands)
            terms.append(times * getattr(family, count)(node, inputs, node.types))
    return sympy.Add(*terms)


def total_flops(graph: Graph) -> sympy.Expr:
    """FLOPs of one run of ``graph``, an expression of its symbols."""
    return graph.once("FLOPs", lambda: _total(graph, "flops"))


def total_bytes(graph: Graph) -> sympy.Expr:
    """Bytes that all operations of ``graph`` read and write, an expression of its symbols."""
    return _total(graph, "bytes")
