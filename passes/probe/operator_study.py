"""Learns about an unknown operation by running it: small sizes that it accepts, which dims must change together, which
integers it accepts, and whether it is a function of its operands at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, islice
from math import prod
from typing import Any

import torch

from autopar.ir.node import Arg, map_arg
from autopar.passes.rule_language.registry import OpCall

from .trials import Range, Shape, Tensors, Values, execute, is_float, make_operands

Slot = tuple[int, int]
Family = frozenset[Slot]
# Elements of all operands of a trial. Chosen: 8 MiB of float32, which most operations run on in milliseconds.
MOST_ELEMENTS = 1 << 21
# Sets of dims of one size that are tried. Chosen: each costs a run of the operation.
MOST_SETS = 200
# Odd multiples of four: none of them is half or double of another.
_BASE = tuple(range(4, 400, 8))
# Chosen: small sizes, odd and even, none twice.
_SMALL = (3, 5, 2, 7, 4, 11, 6, 13, 9, 17, 10, 19)


class Unfit(Exception):
    """The operation cannot be studied, for the given reason. ``harmful``: it must not run on several devices either."""

    def __init__(self, reason: str, harmful: bool = False) -> None:
        super().__init__(reason)
        self.harmful = harmful


@dataclass(frozen=True)
class OperatorProbe:
    """An operation under test. ``base``: shapes it runs on; ``groups``: the smallest sets of dims that can change their
    size together; ``families``: these sets merged where they overlap. No other dim may change."""

    call: OpCall
    operation: Callable[..., Any]
    base: tuple[Shape, ...] = ()
    groups: tuple[Family, ...] = ()
    families: tuple[Family, ...] = ()
    ranges: Mapping[int, Range] = field(default_factory=dict)
    wide: bool = False
    shrinks: bool = False

    def operands(self, shapes: Sequence[Shape], values: Values) -> list[torch.Tensor]:
        return make_operands(self.call.inputs, shapes, self.ranges, values)

    def run(self, operands: Sequence[torch.Tensor]) -> Tensors:
        return execute(self.call, self.operation, operands)

    def runs(self, shapes: Sequence[Shape], values: Values | None = None) -> bool:
        """Whether it accepts operands of these shapes: by its shape function, if it has one, then by its kernel."""
        if sum(map(prod, shapes)) > MOST_ELEMENTS or not self._has_shape(shapes):
            return False
        try:
            self.run(self.operands(shapes, values or Values(0)))
        except Exception:
            return False
        return True

    def runs_within(self, shapes: Sequence[Shape]) -> bool:
        """Whether it accepts operands of these shapes and reads nothing beyond their ends, as an operation may that
        does not compare the sizes of its operands: its results are the same whatever follows them in memory."""
        if sum(map(prod, shapes)) > MOST_ELEMENTS or not self._has_shape(shapes):
            return False
        operands = self.operands(shapes, Values(0))
        try:
            first, second = (self.run(_followed(operands, self.operands(shapes, Values(seed)))) for seed in (1, 2))
        except Exception:
            return False
        return _same(first, second)

    def _has_shape(self, shapes: Sequence[Shape]) -> bool:
        try:
            results = self.run(meta_operands(self.call, shapes))
        except NotImplementedError:
            return True
        except Exception:
            # A shape function that fails on the operation's own shapes says nothing.
            return bool(shapes == self.base)
        return sum(r.numel() for r in results if r is not None) <= MOST_ELEMENTS

    def resized(self, sizes: Mapping[Slot, int]) -> tuple[Shape, ...]:
        """The base shapes with other sizes of some dims."""
        return tuple(
            tuple(sizes.get((i, d), size) for d, size in enumerate(shape)) for i, shape in enumerate(self.base)
        )

    def sized(self, sharded: Iterable[Slot], size: int, turn: int) -> tuple[Shape, ...]:
        """Shapes in which families with one of the ``sharded`` dims have ``size``, and all others small, different
        sizes, which vary with ``turn``."""
        slots = set(sharded)
        pool = [n for n in (*_SMALL[turn % 4 :], *_SMALL[: turn % 4]) if n != size]
        sizes: dict[Slot, int] = {}
        for family in self.families:
            if family & slots:
                sizes.update(dict.fromkeys(family, size))
            elif self.shrinks:
                sizes.update(dict.fromkeys(family, pool.pop(0) if pool else 3))
        return self.resized(sizes)


def _followed(operands: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The operands, each in the first half of memory that ends with the values of another tensor of its shape."""
    return [
        torch.cat([x.flatten(), other.flatten()])[: x.numel()].view(x.shape)
        for x, other in zip(operands, others, strict=True)
    ]


def meta_operands(call: OpCall, shapes: Sequence[Shape]) -> list[torch.Tensor]:
    """Operands without data."""
    return [
        torch.empty(shape, dtype=kind.dtype, device="meta") for kind, shape in zip(call.inputs, shapes, strict=True)
    ]


def numbers_in(call: OpCall) -> set[int]:
    """The absolute values of all integer arguments."""
    numbers: set[int] = set()

    def look(arg: Arg) -> Arg:
        if isinstance(arg, int) and not isinstance(arg, bool):
            numbers.add(abs(arg))
        return arg

    map_arg((call.args, tuple(arg for _, arg in call.kwargs)), look)
    return numbers


def slots_of(call: OpCall) -> list[Slot]:
    """The dims of all operands that have more than one position."""
    return [(i, d) for i, t in enumerate(call.inputs) for d, size in enumerate(t.shape) if int(size) > 1]


def learn(call: OpCall, operation: Callable[..., Any], cautious: bool) -> OperatorProbe:
    """Studies an operation. ``cautious``: dims of equal size stay equal, and integers small. Raises :class:`Unfit`."""
    operator = _with_base(OperatorProbe(call, operation))
    check_function(operator)
    classes = _classes(call)
    if cautious:
        groups = [
            c for c in classes if operator.runs(_changed(operator, c, 2)) and operator.runs(_changed(operator, c, 0))
        ]
    else:
        groups = list(dict.fromkeys(g for c in classes for slot in sorted(c) if (g := _together(operator, slot, c))))
    operator = replace(operator, groups=tuple(groups), families=tuple(_merged(groups)))
    operator = replace(operator, ranges=_ranges(operator, cautious))
    operator = replace(operator, wide=_runs_wide(operator))
    shrinking = replace(operator, shrinks=True)
    can_shrink = all(shrinking.runs(shrinking.sized((), 0, turn)) for turn in range(4))
    return shrinking if can_shrink else operator


def _classes(call: OpCall) -> list[Family]:
    by_size: dict[int, set[Slot]] = {}
    for slot in slots_of(call):
        by_size.setdefault(int(call.inputs[slot[0]].shape[slot[1]]), set()).add(slot)
    return [frozenset(slots) for slots in by_size.values()]


def _with_base(operator: OperatorProbe) -> OperatorProbe:
    """Finds shapes and integers that the operation runs with. Tries, in order: all sizes small except those that occur
    among the arguments; all small; all real, and then as many as possible small."""
    call = operator.call
    real = {int(size) for t in call.inputs for size in t.shape if int(size) > 1}
    for unchanged in (real & numbers_in(call), set()):
        runnable = _first_run(replace(operator, base=_shapes(call, _shrunk(real - unchanged))))
        if runnable is not None:
            return runnable
    runnable = _first_run(replace(operator, base=_shapes(call, {})))
    if runnable is None:
        raise Unfit(f"it runs on no operands we made up: {_complaint(operator)}")
    small = _shrunk(real)
    sizes: dict[int, int] = {}
    for size in sorted(real, reverse=True):
        tried = _first_run(replace(operator, base=_shapes(call, {**sizes, size: small[size]})))
        if tried is not None:
            runnable, sizes = tried, {**sizes, size: small[size]}
    return runnable


def _shrunk(sizes: set[int]) -> dict[int, int]:
    return {size: _BASE[rank] for rank, size in enumerate(sorted(sizes))}


def _shapes(call: OpCall, sizes: Mapping[int, int]) -> tuple[Shape, ...]:
    return tuple(tuple(sizes.get(int(size), int(size)) for size in t.shape) for t in call.inputs)


def _first_run(operator: OperatorProbe) -> OperatorProbe | None:
    integers = [i for i, t in enumerate(operator.call.inputs) if not is_float(t.dtype) and t.dtype != torch.bool]
    for low, high in ((0, 2), (0, 1), (1, 2)):
        ranged = replace(operator, ranges=dict.fromkeys(integers, Range(low, high)))
        if ranged.runs(ranged.base):
            return ranged
        if not integers:
            break
    return None


def _complaint(operator: OperatorProbe) -> str:
    """The error of running on the call's own shapes, or on small ones if those are too large."""
    call = operator.call
    shapes = _shapes(call, {})
    if sum(map(prod, shapes)) > MOST_ELEMENTS:
        shapes = _shapes(call, _shrunk({int(s) for t in call.inputs for s in t.shape if int(s) > 1}))
    try:
        operator.run(operator.operands(shapes, Values(0)))
    except NotImplementedError:
        return "it has no kernel for the CPU"
    except Exception as error:
        text = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {text[0][:200]}"
    return "it needs more memory than a trial may use"


def check_function(operator: OperatorProbe) -> None:
    """Raises :class:`Unfit` unless the operation is a function of its operands and does not change them."""
    operands = operator.operands(operator.base, Values(3))
    before, state = [x.clone() for x in operands], torch.get_rng_state()
    first = operator.run(operands)
    if not torch.equal(state, torch.get_rng_state()):
        raise Unfit("it draws random numbers, and is not tagged torch.Tag.nondeterministic_seeded", harmful=True)
    if not _same(operands, before):
        raise Unfit("it writes into its operands, and its schema does not say so", harmful=True)
    if not _same(first, operator.run(before)):
        raise Unfit("it gives different results for the same operands")
    kinds = [(t and (t.rank, t.dtype)) for t in operator.call.outputs]
    if kinds != [None if r is None else (r.dim(), r.dtype) for r in first]:
        raise Unfit("its results are of another rank or dtype than its shape function says")


def _same(left: Sequence[torch.Tensor | None], right: Sequence[torch.Tensor | None]) -> bool:
    pairs = list(zip(left, right, strict=True))
    return all(
        a is b or (a is not None and b is not None and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)))
        for a, b in pairs
    )


def _changed(operator: OperatorProbe, slots: Iterable[Slot], factor: int) -> tuple[Shape, ...]:
    """The base shapes with some dims twice as long, or (``factor`` 0) half."""

    def size(slot: Slot) -> int:
        now = operator.base[slot[0]][slot[1]]
        return now * 2 if factor else max(1, now // 2)

    return operator.resized({slot: size(slot) for slot in slots})


def _together(operator: OperatorProbe, slot: Slot, tied: Family) -> Family | None:
    """The smallest set of dims, including ``slot``, that can become longer and shorter together; None if ``slot``
    cannot change. ``tied``: the dims of its size."""

    def may_change(slots: Family) -> bool:
        return all(operator.runs_within(_changed(operator, slots, factor)) for factor in (2, 0))

    others = sorted(tied - {slot})
    sets = (frozenset([slot, *more]) for n in range(len(others)) for more in combinations(others, n))
    for slots in islice(sets, MOST_SETS):
        if may_change(slots):
            return slots
    if not may_change(tied):
        return None
    needed = tied
    for other in others:
        if may_change(needed - {other}):
            needed -= {other}
    return needed


def _merged(groups: Sequence[Family]) -> Iterator[Family]:
    left = list(groups)
    while left:
        family, size = left.pop(), -1
        while len(family) != size:
            size = len(family)
            family = family.union(*(g for g in left if g & family))
        left = [g for g in left if not g & family]
        yield family


def _ranges(operator: OperatorProbe, cautious: bool) -> dict[int, Range]:
    """The widest range that each operand of integers accepts: up to the size of a dim (indices), or any (data)."""
    ranges = dict(operator.ranges)
    slots = {operator.base[i][d]: (i, d) for i, d in reversed(slots_of(operator.call))}
    for index, first in operator.ranges.items():
        options = [Range(first.low, size, slot) for size, slot in sorted(slots.items()) if size > first.high]
        if not cautious and not any(r.dtype.itemsize < 4 for r in [operator.call.inputs[index]]):
            options += [Range(first.low, 1 << bits) for bits in (10, 20)]
        for option in options:
            tried = replace(operator, ranges={**ranges, index: option})
            if not all(tried.runs(operator.base, Values(seed)) for seed in range(3)):
                break
            ranges[index] = option
        lower = replace(ranges[index], low=-1)
        tried = replace(operator, ranges={**ranges, index: lower})
        if first.low == 0 and operator.call.inputs[index].dtype != torch.uint8 and tried.runs(operator.base):
            ranges[index] = lower
    return ranges


def _runs_wide(operator: OperatorProbe) -> bool:
    """Whether the operation also runs in float64, which rounds less."""
    if not any(t.dtype in (torch.float32, torch.float16, torch.bfloat16) for t in operator.call.inputs):
        return False
    return operator.runs(operator.base, Values(0, wide=True))
