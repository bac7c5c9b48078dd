"""Rules written as dimension strings: ``"mk,kn->mn"`` is the whole rule of ``mm``.

A formula names the dims of every tensor operand and of every result, one character per dim:

- a **letter** is an index: the operation treats all its values alike, so it may be sharded. Tensors that have
  it are ``Shard`` there, all others ``Replicate``. A letter that is in no result is summed over: the results
  are ``Partial(sum)``;
- ``_`` is a dim that stays whole;
- ``,`` multiplies operands and ``+`` adds them, which tells where a Partial passes through: one operand of
  each product, in every summand. ``"mn+mk,kn->mn"`` (addmm) takes ``P P R -> P`` and ``P R P -> P``, and
  sharding ``k`` needs the first operand Partial too;
- ``...`` represents any number of leading dims, the same in every tensor that has it.

Operands broadcast as in torch: one of lower rank than written lacks the first dims, and a dim of length 1
against n is replicated.

Invariants: no strategy leaves a device without elements (:func:`shardable`); booleans are never Partial.

An operation is *agnostic* if it commutes with any permutation of the indices along a sharded dim. For those
:func:`strided_variants` turns a strategy with ``Shard(d)`` into ones with ``StridedShard(d, before)``; the
rules themselves offer plain shards only.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product

import torch
from torch.distributed.tensor import Partial, Shard

from autopar.errors import AutoparError
from autopar.ir.node import TensorType
from autopar.ir.placements import (
    OWN_KINDS,
    PARTIAL_SUM,
    REPLICATE,
    AxisStrategy,
    Placement,
    StridedShard,
    chunk_bounds,
    shard_dim,
)

from .registry import OpCall, Rule, rule

WHOLE = "_"
Factors = Mapping[int, frozenset[int]]
Variants = Callable[[OpCall, AxisStrategy, Factors], Iterable[AxisStrategy]]
Linear = Iterable[Iterable[int | None]]

AGNOSTIC: set[str] = set()
"""Operations whose plain shards may all be strided ones; see the module docstring."""

VARIANTS: dict[str, Variants] = {}
"""Functions that list the strided variants of other operations."""


def shardable(size: int, devices: int) -> bool:
    """Whether ``torch.chunk`` of a dim of that size leaves every device some elements."""
    return chunk_bounds(size, devices, devices - 1)[1] > 0


def agnostic(*ops: str) -> Callable[[Rule], Rule]:
    """Marks operations as agnostic; goes with ``@rule`` on the same function."""

    def register(function: Rule) -> Rule:
        AGNOSTIC.update(ops)
        return function

    return register


def variants(*ops: str) -> Callable[[Variants], Variants]:
    """Registers a function that lists the strided variants of operations that are not agnostic."""

    def register(function: Variants) -> Variants:
        VARIANTS.update(dict.fromkeys(ops, function))
        return function

    return register


def letters(rank: int, whole: Iterable[int] = ()) -> str:
    """``abc...`` for ``rank`` dims, with ``_`` for the dims that stay whole (negative: from the end).

    >>> letters(4, [-3])
    'a_cd'
    """
    unsharded = {dim % rank for dim in whole} if rank else set()
    return "".join(WHOLE if dim in unsharded else string.ascii_letters[dim] for dim in range(rank))


def without(spelled: str, dims: Iterable[int]) -> str:
    """``spelled`` without the characters of ``dims``."""
    dropped = {dim % len(spelled) for dim in dims} if spelled else set()
    return "".join(letter for dim, letter in enumerate(spelled) if dim not in dropped)


def dimension_rule(ops: str | Sequence[str], formula: str) -> None:
    """Registers ``formula`` as the whole rule of the operation(s), and marks them as agnostic."""
    names = (ops,) if isinstance(ops, str) else tuple(ops)
    AGNOSTIC.update(names)
    rule(*names)(lambda call: strategies(call, formula))


def strategies(
    call: OpCall, formula: str, *, linear: Linear | None = None, contracted: Placement | None = PARTIAL_SUM
) -> Iterator[AxisStrategy]:
    """The strategies a formula represents; see the module docstring.

    ``linear``: sets of operands (by index) that may be Partial(sum) together, if that does not follow from the
    formula's ``,`` and ``+``; a set with None, an absent operand, is ignored. ``contracted``: the placement of results
    if a letter that no result has is sharded; None: such letters stay whole.

    Raises :class:`AutoparError` for a formula that does not fit the call.
    """
    spelled = _Spelled.of(call, formula)
    sharded = [s for letter in spelled.letters for s in _shard_letter(call, spelled, letter, contracted)]
    sets = spelled.products() if linear is None else linear
    partial = [s for operands in sets for s in _pass_partial(call, tuple(operands))]
    yield from dict.fromkeys([*sharded, *partial])


class _Spelled:
    """A formula split into one string per operand and result, each as long as the tensor's rank.

    ``terms`` are the summands: the indices of the operands each multiplies.
    """

    def __init__(self, operands: list[str], results: list[str], terms: list[tuple[int, ...]]) -> None:
        self.operands, self.results, self.terms = operands, results, terms
        everything = "".join(operands + results).replace(WHOLE, "")
        self.letters = tuple(dict.fromkeys(everything))

    @staticmethod
    def of(call: OpCall, formula: str) -> _Spelled:
        left, _, right = formula.replace(" ", "").partition("->")
        summands = [summand.split(",") for summand in left.split("+")]
        operands = [operand for summand in summands for operand in summand]
        results = right.split(",")
        if len(operands) != len(call.inputs) or len(results) not in (1, len(call.outputs)):
            raise AutoparError(
                f"the formula {formula!r} has {len(operands)} operands and {len(results)} results, "
                f"but {call.op} has {len(call.inputs)} and {len(call.outputs)}"
            )
        results *= len(call.outputs) // len(results)
        written, types = [*operands, *results], call.tensors
        pairs = list(zip(written, types, strict=True))
        extra = (t.rank - len(w) + len("...") for w, t in pairs if t is not None and "..." in w)
        dots = string.ascii_uppercase[: max(extra, default=0)]
        fitted = [_fit(w.replace("...", dots), t, formula) for w, t in pairs]
        count = iter(range(len(operands)))
        terms = [tuple(next(count) for _ in summand) for summand in summands]
        return _Spelled(fitted[: len(operands)], fitted[len(operands) :], terms)

    def products(self) -> Iterator[tuple[int, ...]]:
        """The sets of operands in which the formula is linear: one of each summand."""
        return product(*self.terms)

    def has(self, letter: str, operands: Iterable[int]) -> bool:
        return any(letter in self.operands[index] for index in operands)


def _fit(written: str, tensor: TensorType | None, formula: str) -> str:
    """``written`` without leading dims that the tensor lacks."""
    if tensor is None:
        return ""
    if tensor.rank > len(written):
        raise AutoparError(f"{written!r} of the formula {formula!r} has too few dims for a tensor {tensor}")
    return written[len(written) - tensor.rank :]


def _place(tensor: TensorType | None, spelled: str, letter: str) -> Placement:
    dim = spelled.find(letter)
    return REPLICATE if tensor is None or dim < 0 or tensor.shape[dim] == 1 else Shard(dim)


def _sharded_sizes(call: OpCall, placements: Sequence[Placement]) -> set[int]:
    """The lengths of the sharded dims of operands and results."""
    pairs = zip(call.tensors, placements, strict=True)
    dims = ((tensor, shard_dim(placement)) for tensor, placement in pairs)
    return {int(tensor.shape[dim]) for tensor, dim in dims if tensor is not None and dim is not None}


def _shard_letter(call: OpCall, spelled: _Spelled, letter: str, contracted: Placement | None) -> Iterator[AxisStrategy]:
    inputs = [_place(t, s, letter) for t, s in zip(call.inputs, spelled.operands, strict=True)]
    outputs = [_place(t, s, letter) for t, s in zip(call.outputs, spelled.results, strict=True)]
    sizes = _sharded_sizes(call, [*inputs, *outputs])
    if len(sizes) != 1 or not shardable(sizes.pop(), call.size):
        return
    if all(isinstance(p, Shard) for t, p in zip(call.outputs, outputs, strict=True) if t is not None):
        yield AxisStrategy(tuple(inputs), tuple(outputs))
    elif contracted is not None and not any(letter in s for s in spelled.results):
        yield from _contract(call, spelled, letter, inputs, contracted)


def _contract(
    call: OpCall, spelled: _Spelled, letter: str, inputs: list[Placement], contracted: Placement
) -> Iterator[AxisStrategy]:
    """Sums over ``letter``: summands that do not have it must be Partial already."""
    other_terms = [term for term in spelled.terms if not spelled.has(letter, term)]
    if other_terms and contracted != PARTIAL_SUM:
        return
    outputs = tuple(REPLICATE if t is None else contracted for t in call.outputs)
    for operands in product(*other_terms):
        placed = [PARTIAL_SUM if index in operands else p for index, p in enumerate(inputs)]
        strategy = AxisStrategy(tuple(placed), outputs)
        if _partials_make_sense(call, strategy):
            yield strategy


def _pass_partial(call: OpCall, operands: tuple[int | None, ...]) -> Iterator[AxisStrategy]:
    if None in operands or not operands:
        return
    inputs = tuple(PARTIAL_SUM if index in operands else REPLICATE for index in range(len(call.inputs)))
    outputs = tuple(REPLICATE if t is None else PARTIAL_SUM for t in call.outputs)
    strategy = AxisStrategy(inputs, outputs)
    if _partials_make_sense(call, strategy):
        yield strategy


def _partials_make_sense(call: OpCall, strategy: AxisStrategy) -> bool:
    pairs = zip(call.tensors, strategy.places, strict=True)
    return not any(isinstance(p, Partial) and t is not None and t.dtype == torch.bool for t, p in pairs)


def strided_variants(call: OpCall, strategy: AxisStrategy, factors: Factors) -> Iterator[AxisStrategy]:
    """``strategy`` with its plain shards replaced by strided ones, the same on all tensors.

    ``factors``: for each dim size the ``before`` values to offer for dims of that size. Only for operations in
    :data:`AGNOSTIC` or :data:`VARIANTS`, and strategies whose sharded dims all have one size; skips factors that do not
    divide evenly.
    """
    if call.op in VARIANTS:
        yield from VARIANTS[call.op](call, strategy, factors)
    elif call.op in AGNOSTIC:
        yield from agnostic_variants(call, strategy, factors)


def agnostic_variants(call: OpCall, strategy: AxisStrategy, factors: Factors) -> Iterator[AxisStrategy]:
    """:func:`strided_variants` of an operation that is known to be agnostic."""
    # Excludes local operations, which count positions, and shards that are strided already.
    if strategy.local or any(isinstance(p, OWN_KINDS) for p in strategy.places):
        return
    sizes = _sharded_sizes(call, strategy.places)
    if len(sizes) != 1:
        return
    size = sizes.pop()
    for before in sorted(factors.get(size, ())):
        if before > 1 and size % (before * call.size) == 0:
            yield AxisStrategy(_stride(strategy.inputs, before), _stride(strategy.outputs, before))


def _stride(placements: Sequence[Placement], before: int) -> tuple[Placement, ...]:
    return tuple(StridedShard(p.dim, before) if isinstance(p, Shard) else p for p in placements)
