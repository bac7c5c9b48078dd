"""Proof by execution: a claimed strategy is tried on small random tensors, whole and in shards, before anyone
trusts it.

The call is shrunk to small sizes, equal ones staying equal and 1 staying 1, once so that every sharded dim
divides evenly and once so that none does; a strategy that holds only for even shards is offered only where
shards are even. What cannot be judged this way has no proof: random or mutating operations, results whose
shape depends on data, and calls that carry sizes as plain arguments and therefore fail when shrunk.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from autopar.graph import Arg, Dim, TensorType, map_arg
from autopar.spec import REPLICATE, AxisStrategy, Placement, chunk_bounds, shard_dim

from .claims import leaves_none_empty
from .rules import OpCall, Operand

_SEEDS = (0, 1)
_DEVICES = (2, 3)
_MOST_ELEMENTS = 1 << 20
_REDUCTIONS = ("sum", "max", "min")
_UNJUDGEABLE = ("nondeterministic_seeded", "dynamic_output_shape", "data_dependent_output", "inplace_view")
_UNINITIALISED = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted")

Tensors = tuple[torch.Tensor | None, ...]


def find_operation(op: str) -> Callable[..., Any] | None:
    """The torch operation called ``op`` (``aten.mm.default``), or None if there is none such."""
    namespace, *path = op.split(".")
    if len(path) != 2 or not hasattr(torch.ops, namespace):
        return None
    packet = getattr(getattr(torch.ops, namespace), path[0], None)
    return getattr(packet, path[1], None)


def _is_judgeable(operation: Any) -> bool:
    """Whether its result is a function of its arguments, of a shape known beforehand."""
    tags = {tag.name for tag in operation.tags}
    name = operation.name().split("::")[1].split(".")[0]
    return not (operation._schema.is_mutable or tags & set(_UNJUDGEABLE) or name in _UNINITIALISED)


def _small_sizes(call: OpCall, devices: int, even: bool, kept: frozenset[int]) -> dict[int, int]:
    """A small size for each size in the call but those ``kept``: multiples of ``devices``, or one less."""
    tensors = [tensor for tensor in (*call.inputs, *call.outputs) if tensor is not None]
    sizes = sorted({int(size) for tensor in tensors for size in tensor.shape} - {0, 1} - kept)
    return {size: devices * (rank + 3) - (not even) for rank, size in enumerate(sizes)}


def _shrink(call: OpCall, devices: int, even: bool, kept: frozenset[int] = frozenset()) -> OpCall:
    small = _small_sizes(call, devices, even, kept)

    def shrink(tensor: TensorType) -> TensorType:
        return replace(tensor, shape=tuple(small.get(int(size), int(size)) for size in tensor.shape))

    outputs = tuple(t and shrink(t) for t in call.outputs)
    return replace(call, inputs=tuple(map(shrink, call.inputs)), outputs=outputs, size=devices)


def _random(tensor: TensorType, bound: int, generator: torch.Generator) -> torch.Tensor:
    shape = [int(size) for size in tensor.shape]
    if tensor.dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if not tensor.dtype.is_floating_point and not tensor.dtype.is_complex:
        return torch.randint(0, bound, shape, generator=generator).to(tensor.dtype)
    # Away from 0 and 1, where many functions have poles; halves are computed in single precision, to compare
    # sharply.
    values = torch.rand(shape, generator=generator, dtype=torch.float64) * 0.8 + 0.1
    return values.to(torch.float32 if tensor.dtype.itemsize < 4 else tensor.dtype)


def _execute(call: OpCall, operation: Callable[..., Any], operands: Sequence[torch.Tensor]) -> Tensors:
    """The results of the call on these operands, one per entry of ``call.outputs``."""

    def leaf(arg: Arg) -> Any:
        if isinstance(arg, Operand):
            return operands[arg.index]
        return torch.device("cpu") if isinstance(arg, torch.device) else arg

    args = [map_arg(arg, leaf) for arg in call.args]
    result = operation(*args, **{key: map_arg(arg, leaf) for key, arg in call.kwargs})
    results = result if isinstance(result, (tuple, list)) else (result,)
    return tuple(r if isinstance(r, torch.Tensor) else None for r in results)


def _split(x: torch.Tensor, placement: Placement, devices: int, generator: torch.Generator) -> list[torch.Tensor]:
    """What each device holds of ``x``; a Partial is split at random. Raises ValueError where that cannot
    be."""
    if isinstance(placement, Replicate):
        return [x] * devices
    dim = shard_dim(placement)
    if dim is not None:
        return [x.narrow(dim, *chunk_bounds(x.shape[dim], devices, i)).contiguous() for i in range(devices)]
    if not isinstance(placement, Partial) or not x.dtype.is_floating_point:
        raise ValueError(f"{x.dtype} does not split as {placement}")
    noise = torch.rand((devices, *x.shape), generator=generator, dtype=torch.float64).to(x.dtype)
    if placement.reduce_op in ("max", "min"):
        owner = torch.randint(0, devices, x.shape, generator=generator)
        behind = x - noise if placement.reduce_op == "max" else x + noise
        return [torch.where(owner == i, x, behind[i]) for i in range(devices)]
    return list((noise - noise.mean(0) + x / devices).unbind())


def _join(pieces: Sequence[torch.Tensor], placement: Placement) -> torch.Tensor | None:
    """The whole tensor; None where the pieces contradict the placement."""
    dim = shard_dim(placement)
    if dim is not None:
        return torch.cat(list(pieces), dim) if pieces[0].dim() > dim else None
    if len({piece.shape for piece in pieces}) > 1:
        return None
    stacked = torch.stack(list(pieces))
    if isinstance(placement, Replicate):
        return pieces[0] if all(_agree(piece, pieces[0]) for piece in pieces[1:]) else None
    assert isinstance(placement, Partial)
    reductions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "sum": lambda parts: parts.sum(0, dtype=parts.dtype),
        "max": lambda parts: parts.amax(0),
        "min": lambda parts: parts.amin(0),
    }
    return reductions[placement.reduce_op](stacked)


def _agree(found: torch.Tensor | None, expected: torch.Tensor) -> bool:
    if found is None or found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if not (expected.dtype.is_floating_point or expected.dtype.is_complex):
        return torch.equal(found, expected)
    return torch.allclose(found, expected, rtol=1e-4, atol=1e-5, equal_nan=True)


def _pieces_fit(pieces: Sequence[torch.Tensor], whole: torch.Tensor, placement: Placement) -> bool:
    """Whether each device's result has the length its shard must have."""
    dim = shard_dim(placement)
    if dim is None:
        return True
    if any(piece.dim() <= dim for piece in pieces):
        return False
    lengths = [chunk_bounds(whole.shape[dim], len(pieces), i)[1] for i in range(len(pieces))]
    return [piece.shape[dim] for piece in pieces] == lengths


def _holds(
    call: OpCall,
    operation: Callable[..., Any],
    strategy: AxisStrategy,
    operands: Sequence[torch.Tensor],
    seed: int,
) -> bool:
    """Whether running ``operation`` on shards gives, put together, what it gives on the whole operands."""
    generator = torch.Generator().manual_seed(seed)
    expected = _execute(call, operation, operands)
    if len(expected) != len(call.outputs):
        return False
    split = [_split(x, p, call.size, generator) for x, p in zip(operands, strategy.inputs, strict=True)]
    local = [_execute(call, operation, [pieces[i] for pieces in split]) for i in range(call.size)]
    for index, (whole, placement) in enumerate(zip(expected, strategy.outputs, strict=True)):
        if whole is None:
            continue
        pieces = [results[index] for results in local if results[index] is not None]
        if len(pieces) != call.size or not _pieces_fit(pieces, whole, placement):  # type: ignore[arg-type]
            return False
        if not _agree(_join(pieces, placement), whole):  # type: ignore[arg-type]
            return False
    return True


def _is_plain(strategy: AxisStrategy) -> bool:
    """Whether it speaks only of placements a plan can have."""
    return not strategy.local and all(
        type(p) in (Replicate, Shard) or (type(p) is Partial and p.reduce_op in _REDUCTIONS)
        for p in (*strategy.inputs, *strategy.outputs)
    )


@dataclass(frozen=True, slots=True)
class _Trial:
    """One way to shrink a call: devices, even or uneven shards, and the seed of its operands."""

    devices: int
    even: bool
    seed: int
    kept: frozenset[int]


@lru_cache(maxsize=4096)
def _small_operands(call: OpCall, seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    bound = min((int(size) for tensor in call.inputs for size in tensor.shape if size > 1), default=2)
    return tuple(_random(tensor, bound, generator) for tensor in call.inputs)


@contextmanager
def _plain_surroundings() -> Iterator[None]:
    """Whatever device, autocast or warnings filter the caller has set is not to change what is proven."""
    with (
        warnings.catch_warnings(),
        torch.device("cpu"),
        torch.autocast("cpu", enabled=False),
        torch.no_grad(),
    ):
        warnings.simplefilter("ignore")
        yield


def _stands(call: OpCall, operation: Callable[..., Any], strategy: AxisStrategy, trial: _Trial) -> bool:
    small = _shrink(call, trial.devices, trial.even, trial.kept)
    if sum(int(t.numel) for t in (*small.inputs, *small.outputs) if t is not None) > _MOST_ELEMENTS:
        return False
    if not leaves_none_empty(small, strategy):
        return False
    try:
        with _plain_surroundings():
            return _holds(small, operation, strategy, _small_operands(small, trial.seed), trial.seed)
    except Exception:  # An operation may reject made-up operands in any way it likes; then nothing is proven.
        return False


@lru_cache(maxsize=4096)
def _proves(pattern: OpCall, strategy: AxisStrategy, even: bool, kept: frozenset[int]) -> bool:
    operation = find_operation(pattern.op)
    if operation is None or not _is_judgeable(operation) or not _is_plain(strategy):
        return False
    trials = itertools.product(_DEVICES, _SEEDS)
    return all(_stands(pattern, operation, strategy, _Trial(n, even, seed, kept)) for n, seed in trials)


def _sharded_dims(call: OpCall, strategy: AxisStrategy) -> list[tuple[TensorType, int]]:
    tensors, placements = (*call.inputs, *call.outputs), (*strategy.inputs, *strategy.outputs)
    found = [(t, shard_dim(p)) for t, p in zip(tensors, placements, strict=True) if t is not None]
    return [(t, dim) for t, dim in found if dim is not None]


def _is_even(call: OpCall, strategy: AxisStrategy) -> bool:
    return all(int(t.shape[dim]) % call.size == 0 for t, dim in _sharded_dims(call, strategy))


def _survives_shrinking(call: OpCall) -> bool:
    """Whether no number in the arguments could mean one thing at full size and another at the small one: the
    first 128 of 256 positions are some, but of 6 they are all. (Numbers beyond every size mean "to the end"
    at any size.)"""
    found = True

    def look(arg: Arg) -> Arg:
        nonlocal found
        if isinstance(arg, int) and _DEVICES[0] * 2 < abs(arg) < 1 << 31:
            found = False
        return arg

    for arg in (*call.args, *(value for _, value in call.kwargs)):
        map_arg(arg, look)
    return found


def guesses(call: OpCall) -> Iterator[AxisStrategy]:
    """What an unknown operation of torch's own may well allow: that it treats each position along some dim of
    its first result alike.

    Operands and results with that dim, counted from the front or from the back, are sharded there; the others
    are replicated. Operations of other libraries are not guessed at: to run them on made-up operands might do
    anything.
    """
    first = call.outputs[0] if call.outputs else None
    if first is None or call.op.split(".")[0] not in ("aten", "prims"):
        return
    for dim, length in enumerate(first.shape):
        for behind in (0, first.rank):
            places = [_shard_where(t, dim - behind, length) for t in (*call.inputs, *call.outputs)]
            yield AxisStrategy(tuple(places[: len(call.inputs)]), tuple(places[len(call.inputs) :]))


def _shard_where(tensor: TensorType | None, dim: int, length: Dim) -> Placement:
    """Sharded on ``dim`` (negative: counted from the back) if the tensor has ``length`` there."""
    own = dim + tensor.rank if tensor is not None and dim < 0 else dim
    found = tensor is not None and 0 <= own < tensor.rank and tensor.shape[own] == length
    return Shard(own) if found else REPLICATE


def prove(call: OpCall, candidates: Iterable[AxisStrategy]) -> tuple[AxisStrategy, ...]:
    """The candidates that execution bears out, for the sizes of ``call``; results are remembered per
    operation, ranks, attributes and pattern of equal sizes."""
    if not _survives_shrinking(call):
        return ()
    found = (s for s in dict.fromkeys(candidates) if leaves_none_empty(call, s))
    return tuple(s for s in found if _is_proven(call, s))


def _is_proven(call: OpCall, strategy: AxisStrategy) -> bool:
    """At small sizes throughout; or else, as sizes may depend on each other (padding), with only the sharded
    ones small."""
    even = _is_even(call, strategy)
    if _proves(_shrink(call, devices=1, even=True), strategy, even, frozenset()):
        return True
    sharded = {int(t.shape[dim]) for t, dim in _sharded_dims(call, strategy)}
    sizes = {int(size) for t in (*call.inputs, *call.outputs) if t is not None for size in t.shape}
    return bool(sharded) and _proves(replace(call, size=1), strategy, even, frozenset(sizes - sharded))
