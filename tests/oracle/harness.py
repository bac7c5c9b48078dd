"""The rule oracle: runs every strategy a rule offers for a sample on shards, and compares with the whole.

A :class:`Sample` is one call of one operation on real tensors. For each number of devices the operands are
cut up as the strategy says, the local call is run as each device would, its results are checked against the
types the strategy claims for them, put together again and compared.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate

from autopar.ir.node import Arg, TensorType, map_arg
from autopar.ir.placements import (
    AxisStrategy,
    Placement,
    StridedShard,
    is_valid,
    local_shape,
    shard_before,
    shard_dim,
    take_local,
)
from autopar.ops.exchanged_experts import EXCHANGES, run_lockstep
from autopar.passes.rule_language.compose import replicated
from autopar.passes.rule_language.dimension_strings import strided_variants
from autopar.passes.rule_language.registry import LocalContext, OpCall, Operand, local_call
from autopar.passes.rules import RULES

DEVICES = (2, 3, 4)
Tensors = tuple[torch.Tensor | None, ...]


@dataclass(frozen=True, eq=False)
class Sample:
    """A call ``op(*args, **kwargs)`` with real tensors; ``compare`` is off where values are undefined."""

    op: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    compare: bool = True

    def __str__(self) -> str:
        def leaf(arg: Any) -> Any:
            return f"{str(arg.dtype)[6:]}{list(arg.shape)}" if isinstance(arg, torch.Tensor) else arg

        shown = [str(map_arg(arg, leaf)) for arg in self.args]
        shown += [f"{key}={map_arg(arg, leaf)}" for key, arg in self.kwargs.items()]
        return f"{self.op}({', '.join(shown)})"


@dataclass(frozen=True)
class Failure:
    """A strategy that is not true, and why."""

    sample: str
    devices: int
    strategy: str
    reason: str

    def __str__(self) -> str:
        return f"{self.sample} on {self.devices}: {self.strategy}: {self.reason}"


def find_op(name: str) -> Callable[..., Any]:
    """The function that runs the operation called ``name``: torch's, or one of autopar's local operations."""
    from autopar.ops.masked import LOCAL_OPS

    if name in LOCAL_OPS:
        return LOCAL_OPS[name]
    namespace, *path = name.split(".")
    found: Any = getattr(torch.ops, namespace)
    for part in path:
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


def execute(name: str, args: Sequence[Arg], kwargs: Mapping[str, Arg], operands: Sequence[torch.Tensor]) -> Tensors:
    """Runs an operation; tuples become lists, each :class:`Operand` its tensor. Always a tuple of results."""

    def leaf(arg: Arg) -> Any:
        if isinstance(arg, (tuple, list)):
            return [leaf(item) for item in arg]
        return operands[arg.index] if isinstance(arg, Operand) else arg

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        result = find_op(name)(*map(leaf, args), **{key: leaf(arg) for key, arg in kwargs.items()})
    results = result if isinstance(result, (tuple, list)) else (result,)
    return tuple(r if isinstance(r, torch.Tensor) else None for r in results)


def _type(tensor: torch.Tensor) -> TensorType:
    return TensorType(tuple(tensor.shape), tensor.dtype)


@dataclass(frozen=True, eq=False)
class Case:
    """A sample as rules see it, with its operands and the results of the whole operation."""

    sample: Sample
    call: OpCall
    operands: tuple[torch.Tensor, ...]
    results: Tensors

    @staticmethod
    def of(sample: Sample, devices: int) -> Case:
        operands: list[torch.Tensor] = []

        def leaf(arg: Any) -> Arg:
            if not isinstance(arg, torch.Tensor):
                return arg
            operands.append(arg)
            return Operand(len(operands) - 1)

        args = tuple(map_arg(arg, leaf) for arg in sample.args)
        kwargs = tuple((key, map_arg(arg, leaf)) for key, arg in sample.kwargs.items())
        results = execute(sample.op, args, dict(kwargs), operands)
        outputs = tuple(None if r is None else _type(r) for r in results)
        call = OpCall(sample.op, tuple(map(_type, operands)), outputs, args, kwargs, devices)
        return Case(sample, call, tuple(operands), results)

    def strategies(self) -> tuple[AxisStrategy, ...]:
        """What the rule offers, strided variants included, each once."""
        found = tuple(RULES[self.call.op](self.call))
        factors = {size: divisors(size, self.call.size) for size in self._sizes()}
        variants = [v for s in found for v in strided_variants(self.call, s, factors)]
        return tuple(dict.fromkeys([*found, *variants]))

    def _sizes(self) -> set[int]:
        types = (t for t in (*self.call.inputs, *self.call.outputs) if t is not None)
        return {int(size) for t in types for size in t.shape}


def divisors(size: int, devices: int) -> frozenset[int]:
    """Some ``before`` values with which a dim of ``size`` can be sharded strided over ``devices``."""
    return frozenset([b for b in range(2, size + 1) if size % (b * devices) == 0][:3])


def split(tensor: torch.Tensor, placement: Placement, devices: int) -> list[torch.Tensor]:
    """What each device holds of ``tensor``; a Partial is split at random."""
    if isinstance(placement, Partial):
        return _split_partial(tensor, placement.reduce_op, devices)
    # Cloned: a shard that is a view of the whole would hide a local call that needs contiguous operands.
    return [take_local(tensor, (placement,), (devices,), (i,)).clone() for i in range(devices)]


def _split_partial(tensor: torch.Tensor, reduce_op: str, devices: int) -> list[torch.Tensor]:
    floating = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    if reduce_op == "sum":
        noise = [torch.randn_like(tensor) if floating else torch.randint_like(tensor, 5) for _ in range(devices - 1)]
        return [*noise, tensor - sum(noise)]
    step = torch.rand_like(tensor) if floating else torch.ones_like(tensor)
    behind = tensor - step if reduce_op == "max" else tensor + step
    owner = torch.randint(0, devices, tensor.shape)
    return [torch.where(owner == i, tensor, behind) for i in range(devices)]


def join(pieces: Sequence[torch.Tensor], placement: Placement) -> torch.Tensor:
    """The whole tensor; the inverse of :func:`split`. Raises AssertionError where replicas differ."""
    dim = shard_dim(placement)
    if isinstance(placement, StridedShard):
        apart = [piece.unflatten(placement.dim, (placement.before, -1)) for piece in pieces]
        return torch.cat(apart, placement.dim + 1).flatten(placement.dim, placement.dim + 1)
    if dim is not None:
        return torch.cat(list(pieces), dim)
    if isinstance(placement, Replicate):
        assert all(close(piece, pieces[0]) for piece in pieces[1:]), "replicas differ between devices"
        return pieces[0]
    assert isinstance(placement, Partial), f"{placement} is no placement"
    stacked = torch.stack(list(pieces))
    if placement.reduce_op == "sum":
        return stacked.sum(0, dtype=stacked.dtype)
    return stacked.amax(0) if placement.reduce_op == "max" else stacked.amin(0)


def close(found: torch.Tensor, expected: torch.Tensor, coarsest: int = 16) -> bool:
    """Equal up to rounding, relative to the largest element (sums of large addends cancel).

    ``coarsest`` is the fewest bytes that any number of the computation had.
    """
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if not (expected.dtype.is_floating_point or expected.dtype.is_complex):
        return torch.equal(found, expected)
    if found.numel() == 0:
        return True
    finite = expected[torch.isfinite(expected)].abs()
    scale = max(1.0, float(finite.max())) if finite.numel() else 1.0
    tolerance = {8: 1e-9, 16: 1e-9, 4: 1e-4, 2: 5e-2}[min(coarsest, expected.dtype.itemsize)] * scale
    return torch.allclose(found, expected, rtol=0, atol=tolerance, equal_nan=True)


def _same_type(found: torch.Tensor, whole: torch.Tensor, placement: Placement, devices: int, index: int) -> str:
    """Why a local result is not what ``placement`` claims of it; empty if it is."""
    shape = local_shape(tuple(whole.shape), (placement,), (devices,), (index,))
    if tuple(found.shape) != shape:
        return f"device {index} has {list(found.shape)}, claimed {list(shape)}"
    return "" if found.dtype == whole.dtype else f"{found.dtype} instead of {whole.dtype}"


def run_local(case: Case, strategy: AxisStrategy, shards: Sequence[Sequence[torch.Tensor]], index: int) -> Tensors:
    """What device ``index`` computes from its ``shards``."""
    placed = tuple((p,) for p in strategy.inputs), tuple((p,) for p in strategy.outputs)
    context = LocalContext(case.call, *placed, (case.call.size,), (index,))
    op, args, kwargs = local_call(context, strategy.local)
    return execute(op, args, dict(kwargs), [pieces[index] for pieces in shards])


def _run_exchange(case: Case, strategy: AxisStrategy, shards: Sequence[Sequence[torch.Tensor]]) -> list[Tensors]:
    """What all devices compute of a block whose rows travel between them."""
    placed = tuple((p,) for p in strategy.inputs), tuple((p,) for p in strategy.outputs)
    blocks = []
    for index in range(case.call.size):
        context = LocalContext(case.call, *placed, (case.call.size,), (index,))
        op, args, kwargs = local_call(context, strategy.local)
        given = [shards[arg.index][index] if isinstance(arg, Operand) else arg for arg in args]
        starts: Any = dict(kwargs)["starts"]
        blocks.append(EXCHANGES[op.removeprefix("collective.")](*given, starts))
    return [result if isinstance(result, tuple) else (result,) for result in run_lockstep(blocks)]


def _check_placements(case: Case, strategy: AxisStrategy) -> str:
    if len(strategy.inputs) != len(case.call.inputs) or len(strategy.outputs) != len(case.call.outputs):
        return "it does not have one placement per operand and result"
    types = (*case.call.inputs, *case.call.outputs)
    for tensor, placement in zip(types, (*strategy.inputs, *strategy.outputs), strict=True):
        if tensor is None:
            continue
        shape, devices = tuple(int(s) for s in tensor.shape), case.call.size
        if not is_valid((placement,), shape, (devices,)):
            return f"{placement} is no placement of {tensor} on {devices} devices"
        if any(not all(local_shape(shape, (placement,), (devices,), (i,))) for i in range(devices)) and all(shape):
            return f"{placement} of {tensor} leaves a device empty"
        if shard_before(placement) > 1 and shape[shard_dim(placement) or 0] % shard_before(placement):
            return f"{placement} does not divide {tensor}"
    return ""


def check(case: Case, strategy: AxisStrategy) -> str:
    """Why the strategy is not true of the case; empty if it is."""
    broken = _check_placements(case, strategy)
    if broken:
        return broken
    devices = case.call.size
    shards = [split(x, p, devices) for x, p in zip(case.operands, strategy.inputs, strict=True)]
    try:
        if strategy.local.removeprefix("autopar.") in EXCHANGES:
            return _compare(case, strategy, _run_exchange(case, strategy, shards))
        local = [run_local(case, strategy, shards, index) for index in range(devices)]
        return _compare(case, strategy, local)
    except Exception as error:  # Whatever a local call dies of is what there is to report.
        return f"{type(error).__name__}: {error}"


def _compare(case: Case, strategy: AxisStrategy, local: Sequence[Tensors]) -> str:
    devices = case.call.size
    for position, (whole, placement) in enumerate(zip(case.results, strategy.outputs, strict=True)):
        if whole is None:
            continue
        pieces = [results[position] for results in local]
        for index, piece in enumerate(pieces):
            reason = "no tensor" if piece is None else _same_type(piece, whole, placement, devices, index)
            if reason:
                return f"result {position}: {reason}"
        if not case.sample.compare:
            continue
        joined = join([piece for piece in pieces if piece is not None], placement)
        if not close(joined, whole, _coarsest(case)):
            return f"result {position} differs by up to {_difference(joined, whole)}"
    return ""


def _coarsest(case: Case) -> int:
    """Bytes of the narrowest floating-point operand."""
    return min((x.dtype.itemsize for x in case.operands if x.dtype.is_floating_point), default=16)


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    difference = (found.to(torch.complex128) - expected.to(torch.complex128)).abs()
    return float(difference.max()) if difference.numel() else math.nan


def run_sample(sample: Sample) -> Iterator[tuple[Case, AxisStrategy, str]]:
    """Every strategy of the sample's rule on every number of devices, with what is wrong with it."""
    for devices in DEVICES:
        case = Case.of(sample, devices)
        for strategy in case.strategies():
            yield case, strategy, check(case, strategy)


def _run_replicated(sample: Sample) -> Iterator[tuple[Case, AxisStrategy, str]]:
    """The strategy that every operation has, in its local form like the others."""
    case = Case.of(sample, DEVICES[0])
    strategy = replicated(case.call)
    yield case, strategy, check(case, strategy)


def failures(sample: Sample) -> tuple[int, list[Failure]]:
    """How many strategies of the sample's rule were executed, and those that are not true, the replicated one too."""
    outcome = list(run_sample(sample))
    count = len(outcome)
    outcome += _run_replicated(sample)
    wrong = [Failure(str(sample), case.call.size, str(s), reason) for case, s, reason in outcome if reason]
    return count, wrong
