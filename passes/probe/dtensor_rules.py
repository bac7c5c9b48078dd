"""Reads the rules of torch's DTensor, and those registered with it, for operations without a written rule: claims, to
be proven by execution (:mod:`.found_rules`).

DTensor has three registries of rules (:mod:`autopar.torch_internals.sharding_rules`). All are queried on a mesh of one
axis that needs no process group and leaves an initialised one alone. The latter two drop strategies whose operands are
not sharded as queried, so they are queried once for each way to shard an operand.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from autopar.ir.node import Arg, TensorType
from autopar.ir.placements import REPLICATE, AxisStrategy, Placement
from autopar.passes.rule_language.claims import leaves_none_empty
from autopar.passes.rule_language.registry import OpCall, Operand
from autopar.torch_internals.operators import OpOverload
from autopar.torch_internals.sharding_rules import (
    DTensorSpec,
    OpSchema,
    OpSpec,
    OutputSharding,
    TensorMeta,
    fake_mesh,
    is_registered_by_user,
    op_schema,
    rule_of,
    rule_of_one_axis,
    strategies_of,
    strategy_function_of,
    with_shards,
)

from .trials import REDUCTIONS, find_operation

_PLAIN = (Replicate, Shard, Partial)


@lru_cache(maxsize=64)
def _mesh(size: int) -> DeviceMesh:
    return fake_mesh(size)


def _meta(tensor: TensorType) -> TensorMeta:
    shape = torch.Size(int(size) for size in tensor.shape)
    return TensorMeta(shape, torch.empty(shape, device="meta").stride(), tensor.dtype)


def _fill(arg: Arg, operands: Sequence[Any]) -> Any:
    """``arg`` with operands filled in; lists stay lists, as DTensor expects them."""
    if isinstance(arg, Operand):
        return operands[arg.index]
    return [_fill(item, operands) for item in arg] if isinstance(arg, (tuple, list)) else arg


def _schema(call: OpCall, operation: Any, placements: Sequence[Placement]) -> OpSchema:
    mesh = _mesh(call.size)
    specs = [
        DTensorSpec(mesh, (cast(TorchPlacement, p),), _meta(t)) for p, t in zip(placements, call.inputs, strict=True)
    ]
    args = tuple(_fill(arg, specs) for arg in call.args)
    return op_schema(operation, args, {key: _fill(arg, specs) for key, arg in call.kwargs})


def _queries(call: OpCall) -> Iterator[tuple[Placement, ...]]:
    """Operand placements to query: one operand sharded, all sharded on the same dim, or none sharded."""
    count = len(call.inputs)
    for index, tensor in enumerate(call.inputs):
        for dim in range(tensor.rank):
            yield tuple(Shard(dim) if i == index else REPLICATE for i in range(count))
    for dim in range(max((tensor.rank for tensor in call.inputs), default=0)):
        yield tuple(Shard(dim) if dim < tensor.rank else REPLICATE for tensor in call.inputs)
    yield (REPLICATE,) * count


def _strategy(call: OpCall, inputs: Sequence[Any], outputs: Sequence[Any]) -> AxisStrategy | None:
    """The proposal as an :class:`AxisStrategy`; None if counts or kinds of placements do not fit."""
    outputs = [*outputs, *[None] * (len(call.outputs) - len(outputs))]
    placed = [REPLICATE if p is None or t is None else p for p, t in zip(outputs, call.outputs, strict=False)]
    if len(inputs) != len(call.inputs) or len(outputs) != len(call.outputs):
        return None
    if not all(type(p) in _PLAIN for p in (*inputs, *placed)):
        return None
    if any(isinstance(p, Partial) and p.reduce_op not in REDUCTIONS for p in (*inputs, *placed)):
        return None
    return AxisStrategy(tuple(inputs), tuple(placed))


def _from_single_dim(call: OpCall, function: Callable[..., Any], operation: Any) -> Iterator[AxisStrategy | None]:
    metas = [_meta(tensor) for tensor in call.inputs]
    args = tuple(_fill(arg, metas) for arg in call.args)
    count = len(call.inputs)
    for row in function(operation, args, {key: _fill(arg, metas) for key, arg in call.kwargs}):
        filled = with_shards(row)
        yield _strategy(call, filled[len(filled) - count :], filled[: len(filled) - count])


def _placements(specs: DTensorSpec | Sequence[DTensorSpec | None] | None) -> list[Placement | None]:
    listed = specs if isinstance(specs, (tuple, list)) else [specs]
    return [None if spec is None else spec.placements[0] for spec in listed]  # type: ignore[union-attr]


def _from_spec(call: OpCall, spec: OpSpec) -> AxisStrategy | None:
    outputs = _placements(spec.output_specs)
    if isinstance(spec.output_specs, DTensorSpec):
        outputs *= len(call.outputs)
    inputs = outputs[:1] * len(call.inputs) if spec.input_specs is None else _placements(spec.input_specs)
    return _strategy(call, inputs, outputs)


def _from_strategies(call: OpCall, function: Callable[..., Any], operation: Any) -> Iterator[AxisStrategy | None]:
    for query in _queries(call):
        for spec in strategies_of(function, _schema(call, operation, query)):
            yield _from_spec(call, spec)


def _from_rule(call: OpCall, function: Callable[..., Any], operation: Any) -> Iterator[AxisStrategy | None]:
    for query in _queries(call):
        sharding: OutputSharding = function(_schema(call, operation, query))
        if sharding.output_spec is not None and sharding.redistribute_schema is None:
            yield _strategy(call, query, _placements(sharding.output_spec))


def _proposals(call: OpCall, operation: Any) -> Iterator[AxisStrategy | None]:
    if (function := rule_of_one_axis(operation)) is not None:
        yield from _from_single_dim(call, function, operation)
    elif (function := strategy_function_of(operation)) is not None:
        yield from _from_strategies(call, function, operation)
    elif (function := rule_of(operation)) is not None:
        yield from _from_rule(call, function, operation)


def _collected(proposals: Iterable[AxisStrategy | None]) -> list[AxisStrategy]:
    strategies: list[AxisStrategy] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            strategies.extend(strategy for strategy in proposals if strategy is not None)
    except Exception:  # A rule of DTensor may fail for a call like this one; its earlier proposals count.
        pass
    return strategies


def dtensor_strategies(call: OpCall) -> tuple[AxisStrategy, ...]:
    """The unproven proposals of DTensor's registries for one axis of ``call.size`` devices, without the replicated
    strategy."""
    operation = find_operation(call.op)
    if operation is None or not call.inputs:
        return ()
    proposals = dict.fromkeys(_collected(_proposals(call, operation)))
    replicated = (REPLICATE,) * len(call.inputs)
    return tuple(s for s in proposals if s.inputs != replicated and leaves_none_empty(call, s))


def is_registered(op: str) -> bool:
    """Whether a user registered a rule for it by ``torch.distributed.tensor.experimental.register_sharding``."""
    operation = find_operation(op)
    return operation is not None and is_registered_by_user(cast(OpOverload, operation))
