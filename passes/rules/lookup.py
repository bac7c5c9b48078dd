"""Lookups: reading and writing at positions given by an integer tensor.

A dim that is indexed *by values* can be sharded too: each device handles the positions it has
(:mod:`autopar.ops.masked`), which gives a Partial(sum) for reads and a shard for writes. Vocabulary-parallel embedding
and cross-entropy are built from these.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from autopar.ir.node import Arg
from autopar.ir.placements import AxisStrategy
from autopar.passes.rule_language.claims import P, S, claim, claim_rule
from autopar.passes.rule_language.registry import LocalCall, LocalContext, OpCall, localiser


def _sums(call: OpCall) -> bool:
    """Whether the first result can be a sum over devices."""
    return call.outputs[0] is not None and call.outputs[0].dtype != torch.bool


@claim_rule("aten.embedding.default")
def embedding(call: OpCall) -> Iterator[AxisStrategy]:
    """``(weight [V, E], indices [...], ...)`` -> [..., E]"""
    rank = call.inputs[1].rank
    for dim in range(rank):
        yield claim(call, {1: S(dim)}, [S(dim)])
    yield claim(call, {0: S(1)}, [S(rank)])
    yield claim(call, {0: P}, [P])
    yield claim(call, {0: S(0)}, [P], "autopar.masked_embedding")


@localiser("autopar.masked_embedding")
def local_embedding(context: LocalContext) -> LocalCall:
    weight, indices = context.call.args[:2]
    rows = int(context.call.inputs[0].shape[0])
    return "autopar.masked_embedding", (weight, indices, context.input_offset(0, 0), rows), ()


@claim_rule("aten.embedding_dense_backward.default")
def embedding_backward(call: OpCall) -> Iterator[AxisStrategy]:
    """``(grad [..., E], indices [...], V, padding_idx, scale_grad_by_freq)`` -> [V, E]"""
    rank = call.inputs[1].rank
    yield claim(call, {0: S(rank)}, [S(1)])
    yield claim(call, {0: P}, [P])
    if call.arg(4, "scale_grad_by_freq", False):
        return  # A row's gradient then depends on how often it occurs in the whole batch.
    for dim in range(rank):
        yield claim(call, {0: S(dim), 1: S(dim)}, [P])
    yield claim(call, {}, [S(0)], "autopar.masked_embedding_backward")


@localiser("autopar.masked_embedding_backward")
def local_embedding_backward(context: LocalContext) -> LocalCall:
    grad, indices, _, padding_idx = context.call.args[:4]
    rows, offset = context.output_shape()[0], context.output_offset(0, 0)
    return "autopar.masked_embedding_backward", (grad, indices, rows, padding_idx, offset), ()


def _dim(call: OpCall) -> int:
    return int(call.arg(1, "dim")) % max(call.inputs[0].rank, 1)


def _matching_dims(call: OpCall, dim: int) -> Iterator[int]:
    """Dims other than ``dim`` in which all operands of a gather or scatter have the same length: position i
    meets position i."""
    for other in range(call.inputs[0].rank):
        lengths = {tensor.shape[other] if tensor.rank else 1 for tensor in call.inputs}
        if other != dim and len(lengths) == 1:
            yield other


@claim_rule("aten.gather.default")
def gather(call: OpCall) -> Iterator[AxisStrategy]:
    """``(x, dim, index)`` -> shape of ``index``"""
    dim = _dim(call)
    for other in _matching_dims(call, dim):
        yield claim(call, {0: S(other), 1: S(other)}, [S(other)])
    if call.inputs[0].rank == 0:
        return
    yield claim(call, {1: S(dim)}, [S(dim)])
    if _sums(call):
        yield claim(call, {0: P}, [P])
        yield claim(call, {0: S(dim)}, [P], "autopar.masked_gather")


@claim_rule("aten.index_select.default")
def index_select(call: OpCall) -> Iterator[AxisStrategy]:
    """``(x, dim, index [n])``"""
    dim, rank = _dim(call), call.inputs[0].rank
    for other in range(rank):
        if other != dim:
            yield claim(call, {0: S(other)}, [S(other)])
    if rank == 0 or call.inputs[1].rank == 0:
        return
    yield claim(call, {1: S(0)}, [S(dim)])
    if _sums(call):
        yield claim(call, {0: P}, [P])
        yield claim(call, {0: S(dim)}, [P], "autopar.masked_index_select")


@localiser("autopar.masked_gather", "autopar.masked_index_select")
def local_read(context: LocalContext) -> LocalCall:
    call, dim = context.call, _dim(context.call)
    name = "autopar.masked_gather" if call.op == "aten.gather.default" else "autopar.masked_index_select"
    size = int(call.inputs[0].shape[dim])
    return name, (call.args[0], dim, call.args[2], context.input_offset(0, dim), size), ()


@claim_rule("aten.scatter.value", "aten.scatter.src", "aten.scatter.value_reduce")
def scatter(call: OpCall) -> Iterator[AxisStrategy]:
    """``(x, dim, index, source or number, ...)`` -> shape of ``x``"""
    dim = _dim(call)
    for other in _matching_dims(call, dim):
        yield claim(call, {index: S(other) for index in range(len(call.inputs))}, [S(other)])
    local = {
        "aten.scatter.value": "autopar.masked_scatter_value",
        "aten.scatter.src": "autopar.masked_scatter",
    }
    if call.op in local and call.inputs[0].rank:
        yield claim(call, {0: S(dim)}, [S(dim)], local[call.op])


@claim_rule("aten.scatter_add.default", "aten.scatter_reduce.two")
def scatter_add(call: OpCall) -> Iterator[AxisStrategy]:
    """``(x, dim, index, source, ...)`` -> shape of ``x``"""
    dim = _dim(call)
    for other in _matching_dims(call, dim):
        yield claim(call, {0: S(other), 1: S(other), 2: S(other)}, [S(other)])
    plain = call.arg(4, "reduce", "sum") == "sum" and call.arg(5, "include_self", True)
    if not plain or not call.inputs[0].rank or not _sums(call):
        return
    if call.inputs[1].shape == call.inputs[2].shape:
        yield claim(call, {0: P, 1: S(dim), 2: S(dim)}, [P])
    yield claim(call, {0: P, 2: P}, [P])
    yield claim(call, {0: S(dim)}, [S(dim)], "autopar.masked_scatter_add")


@localiser("autopar.masked_scatter", "autopar.masked_scatter_value", "autopar.masked_scatter_add")
def local_write(context: LocalContext) -> LocalCall:
    call, dim = context.call, _dim(context.call)
    name = {"aten.scatter.value": "masked_scatter_value", "aten.scatter.src": "masked_scatter"}
    local = f"autopar.{name.get(call.op, 'masked_scatter_add')}"
    return local, (call.args[0], dim, call.args[2], call.args[3], context.output_offset(0, dim)), ()


@claim_rule("aten.index_add.default")
def index_add(call: OpCall) -> Iterator[AxisStrategy]:
    """``(x, dim, index [n], source, alpha)`` -> shape of ``x``"""
    dim, rank = _dim(call), call.inputs[0].rank
    for other in range(rank):
        if other != dim:
            yield claim(call, {0: S(other), 2: S(other)}, [S(other)])
    if rank == 0 or call.inputs[1].rank == 0 or not _sums(call):
        return
    yield claim(call, {0: P, 1: S(0), 2: S(dim)}, [P])
    yield claim(call, {0: P, 2: P}, [P])
    yield claim(call, {0: S(dim)}, [S(dim)], "autopar.masked_index_add")


@localiser("autopar.masked_index_add")
def local_index_add(context: LocalContext) -> LocalCall:
    call, dim = context.call, _dim(context.call)
    x, _, index, source = call.args[:4]
    kwargs: tuple[tuple[str, Arg], ...] = (("alpha", call.arg(4, "alpha", 1)),)
    return "autopar.masked_index_add", (x, dim, index, source, context.output_offset(0, dim)), kwargs
