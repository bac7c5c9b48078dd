"""DTensor's specs, and its registries of sharding rules.

DTensor keeps its rules in three registries of its ``sharding_propagator`` (2.11):

- ``op_single_dim_strategy_funcs``: a function of the operand types that lists strategies of one axis;
- ``op_strategy_funcs``: a function of operand placements that lists strategies near these;
- ``op_to_rules``: a function of operand placements that gives the placement of the results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

# Mesh, placements and global shape of a DTensor (2.11).
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

# The arguments and results of DTensor's rules (2.11).
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, OutputSharding
from torch.distributed.tensor._ops.single_dim_strategy import _ShardingPlaceholder
from torch.distributed.tensor.experimental import register_sharding

from .operators import OpOverload

__all__ = [
    "DTensorSpec",
    "OpSchema",
    "OpSpec",
    "OpStrategy",
    "OutputSharding",
    "TensorMeta",
    "fake_mesh",
    "is_registered_by_user",
    "op_schema",
    "rule_of",
    "rule_of_one_axis",
    "strategies_of",
    "strategy_function_of",
    "with_shards",
]

Rule = Callable[..., Any]


def fake_mesh(size: int) -> DeviceMesh:
    """A mesh of one axis without processes: no process group is created or queried. Relies on the arguments
    ``_init_backend`` and ``_rank`` (2.11)."""
    return DeviceMesh("cpu", torch.arange(size, device="cpu"), _init_backend=False, _rank=0)


def op_schema(operation: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> OpSchema:
    """A call of ``operation`` on specs, as rules take it. Relies on the registry ``op_to_schema_info`` (2.11)."""
    info = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info.get(operation)
    return OpSchema(operation, args, dict(kwargs), info)


def rule_of_one_axis(operation: OpOverload) -> Rule | None:
    """The rule that proposes strategies of one axis. Relies on the registry ``op_single_dim_strategy_funcs`` (2.11)."""
    return DTensor._op_dispatcher.sharding_propagator.op_single_dim_strategy_funcs.get(operation)


def strategy_function_of(operation: OpOverload) -> Rule | None:
    """The rule that proposes strategies near given placements. Relies on the registry ``op_strategy_funcs`` (2.11)."""
    return DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs.get(operation)


def rule_of(operation: OpOverload) -> Rule | None:
    """The rule that gives the placements of results. Relies on the registry ``op_to_rules`` (2.11)."""
    return DTensor._op_dispatcher.sharding_propagator.op_to_rules.get(operation)


def strategies_of(function: Rule, schema: OpSchema) -> Sequence[OpSpec]:
    """The strategies that a :func:`strategy_function_of` returns. Relies on ``_wrap_with_op_strategy`` (2.11)."""
    answer = function(DTensor._op_dispatcher.sharding_propagator._wrap_with_op_strategy(schema))
    return answer.strategies if isinstance(answer, OpStrategy) else ()


def with_shards(row: Sequence[Any]) -> list[Any]:
    """``row`` of a :func:`rule_of_one_axis`, with shards where the rule leaves the kind of shard open. Relies on
    ``_ShardingPlaceholder`` (2.11)."""
    return [Shard(p.dim) if isinstance(p, _ShardingPlaceholder) else p for p in row]


def is_registered_by_user(operation: OpOverload) -> bool:
    """Whether a user registered a rule with ``torch.distributed.tensor.experimental.register_sharding``. Relies on the
    way that function stores it in ``op_strategy_funcs``: as a ``partial`` of a function of its own module (2.11)."""
    function = strategy_function_of(operation)
    return str(getattr(getattr(function, "func", None), "__module__", "")).startswith(register_sharding.__module__)
