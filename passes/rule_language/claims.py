"""Claims: how rules state strategies that do not fit a dimension string.

@claim_rule("aten.mv.default")
def mv(call):
    yield claim(call, {0: S(0)}, [S(0)])            # S(0) R -> S(0)
    yield claim(call, {0: S(1), 1: S(0)}, [P])      # S(1) S(0) -> P(sum)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps

from torch.distributed.tensor import Shard

from autopar.ir.node import TensorType
from autopar.ir.placements import PARTIAL_SUM, REPLICATE, AxisStrategy, Placement, shard_dim

from .dimension_strings import AGNOSTIC, shardable
from .registry import OpCall, Operand, Rule, rule

R = REPLICATE
P = PARTIAL_SUM
S = Shard


def operand(call: OpCall, position: int, name: str) -> int | None:
    """The index of the tensor operand passed at ``position`` or as ``name``; None if that argument is not a tensor."""
    argument = call.arg(position, name)
    return argument.index if isinstance(argument, Operand) else None


def shape_of(call: OpCall, index: int) -> tuple[int, ...]:
    """The (integer) shape of an operand."""
    return tuple(int(size) for size in call.inputs[index].shape)


def claim(
    call: OpCall, inputs: Mapping[int | None, Placement], outputs: Sequence[Placement], local: str = ""
) -> AxisStrategy:
    """A strategy with ``inputs`` by operand index; operands that are not listed are replicated, and the key None (an
    absent operand) is ignored. Results that are not tensors are replicated."""
    placed = tuple(inputs.get(index, R) for index in range(len(call.inputs)))
    results = tuple(R if t is None else p for t, p in zip(call.outputs, outputs, strict=True))
    return AxisStrategy(placed, results, local)


def _is_whole(tensor: TensorType | None, placement: Placement, devices: int) -> bool:
    dim = shard_dim(placement)
    return tensor is None or dim is None or (dim < tensor.rank and shardable(int(tensor.shape[dim]), devices))


def leaves_none_empty(call: OpCall, strategy: AxisStrategy) -> bool:
    """Whether every device of the axis has elements of every operand and result."""
    pairs = zip(call.tensors, strategy.places, strict=True)
    return all(_is_whole(tensor, placement, call.size) for tensor, placement in pairs)


def claim_rule(*ops: str, agnostic: bool = True) -> Callable[[Rule], Rule]:
    """Registers a rule. Drops repeated strategies, and those that leave a device without elements.

    ``agnostic``: see :mod:`autopar.passes.rule_language.dimension_strings`; strategies with a local operation are never
    agnostic.
    """

    def register(function: Callable[[OpCall], Iterable[AxisStrategy]]) -> Rule:
        @wraps(function)
        def checked(call: OpCall) -> Iterator[AxisStrategy]:
            yield from dict.fromkeys(s for s in function(call) if leaves_none_empty(call, s))

        if agnostic:
            AGNOSTIC.update(ops)
        return rule(*ops)(checked)

    return register


def shards_align(groups: int, lengths: Sequence[int], devices: int) -> bool:
    """Whether dims of ``lengths``, each made of ``groups`` equal runs, are all cut between the same runs by
    ``torch.chunk``."""
    per_device = -(-groups // devices)
    return all(-(-length // devices) == per_device * (length // groups) for length in lengths)
