"""Finds rules by experiment: placements of operands from whose results the whole result can be reassembled.

A hypothesis (:mod:`.hypotheses`) is screened in a few trials and, if it survives, tested in a hundred: on two, three
and four devices, with even and uneven shards, changing sizes of other dims, values of every profile over thirteen
decades, and in float64 if the operation supports it. For each result, the placements that have reassembled it in all
trials so far are kept; those left at the end are the rule. So placements of results need no enumeration, and one failed
trial rejects a hypothesis.

Finally, a strategy must hold at the sizes of the call itself (:func:`confirm`), since the meaning of arguments may
depend on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch

from autopar.ir.placements import REPLICATE, AxisStrategy, Placement, shard_dim
from autopar.passes.rule_language.registry import OpCall

from .hypotheses import Inputs, partial, sharded, with_partial_floats
from .operator_study import MOST_ELEMENTS, OperatorProbe, Slot, numbers_in
from .trials import (
    Range,
    Shape,
    Tensors,
    Values,
    are_even,
    candidates,
    cuts_differ,
    is_float,
    is_informative,
    joins,
    leaves_none_out,
    rounding_of,
    split,
)

PROFILES = ("signed", "positive", "spread", "zeros")
# Arguments up to this are no sizes. Chosen: numbers of dims, groups and flags are small, and sizes of models larger.
_SMALL_NUMBER = 4


@dataclass(frozen=True, slots=True)
class Proven:
    """A strategy that no trial contradicts; with ``even`` only if all shards are of one size."""

    strategy: AxisStrategy
    even: bool


@dataclass(frozen=True, slots=True)
class Trial:
    """One run: the number of devices, the size of sharded dims, and the operands' values."""

    devices: int
    size: int
    values: Values


Open = tuple[tuple[Placement, ...], ...]


def _screening(even: bool) -> list[Trial]:
    sizes = ((2, 4), (3, 9)) if even else ((2, 5), (3, 8))
    return [Trial(n, size, Values(n, profile)) for (n, size), profile in zip(sizes, PROFILES, strict=False)]


def _battery(operator: OperatorProbe, even: bool) -> Iterator[Trial]:
    seed = 10
    for devices in (2, 3, 4):
        for size in (devices, devices * 5) if even else (devices * 3 - 1, 31):
            for profile in PROFILES:
                seed += 1
                yield Trial(devices, size, Values(seed, profile, wide=operator.wide and seed % 2 == 0))


def _sweep(operator: OperatorProbe, even: bool) -> Iterator[Trial]:
    """Trials at every scale, so that any threshold on a sum lies between a part and the whole in one of them."""
    floats = any(is_float(t.dtype) for t in operator.call.inputs)
    for power in range(-20, 25 if floats else 1):
        size = 6 if even or power % 2 else 7
        yield Trial(2, size, Values(100 + power, "positive", 2.0**power))
        if power % 3 == 0:
            sign = "signed" if power % 2 else "spread"
            yield Trial(3, size + 2 if not even else 6, Values(200 + power, sign, 2.0**power))


@dataclass
class Examiner:
    """Tries hypotheses about one operation, and counts the ``cases`` it ran."""

    operator: OperatorProbe
    cases: int = 0

    def examine(self, inputs: Inputs, outputs: Open | None = None) -> Proven | None:
        """The strategy that a hypothesis leads to, if any; of several placements of a result the most specific."""
        possible = outputs or tuple(tuple(candidates(t)) for t in self.operator.call.outputs)
        left = self._through(inputs, possible, _screening(even=True))
        if left is None:
            return None
        uneven = self._through(inputs, left, _screening(even=False))
        even = uneven is None
        left = left if uneven is None else uneven
        battery = [*_battery(self.operator, True), *_sweep(self.operator, even)]
        left = self._through(inputs, left, battery if even else [*battery, *_battery(self.operator, False)])
        if left is None:
            return None
        return Proven(AxisStrategy(inputs, tuple(places[0] for places in left)), even)

    def _through(self, inputs: Inputs, outputs: Open, trials: Iterable[Trial]) -> Open | None:
        """The placements of each result that all ``trials`` allow; None if a result has none, or if too few trials were
        informative."""
        informative = total = 0
        for trial in trials:
            slots = [(i, d) for i, p in enumerate(inputs) if (d := shard_dim(p)) is not None]
            shapes = self.operator.sized(slots, trial.size, trial.values.seed)
            if cuts_differ(shapes, inputs) or not leaves_none_out(shapes, inputs, trial.devices):
                return None
            total += 1
            try:
                operands = self.operator.operands(shapes, trial.values)
                whole = self.operator.run(operands)
            except Exception:
                continue
            self.cases += 1
            informative += is_informative(whole)
            outputs = narrowed(self.operator, operands, whole, inputs, trial, outputs)
            if not all(outputs):
                return None
        return outputs if informative * 2 >= total else None


def narrowed(
    operator: OperatorProbe,
    operands: Sequence[torch.Tensor],
    whole: Tensors,
    inputs: Inputs,
    trial: Trial,
    outputs: Open,
) -> Open:
    """The placements of ``outputs`` with which results from shards of ``operands`` reassemble ``whole``; none if the
    operation rejects the shards."""
    generator = torch.Generator().manual_seed(trial.values.seed)
    nothing: Open = ((),) * len(outputs)
    try:
        shards = [split(x, p, trial.devices, generator) for x, p in zip(operands, inputs, strict=True)]
        local = [operator.run([pieces[i] for pieces in shards]) for i in range(trial.devices)]
    except Exception:
        return nothing
    if len(whole) != len(outputs) or any(len(results) != len(whole) for results in local):
        return nothing
    rounding = rounding_of([*operands, *whole])
    return tuple(
        tuple(p for p in places if joins([results[k] for results in local], whole[k], p, rounding))
        for k, places in enumerate(outputs)
    )


def probe(operator: OperatorProbe) -> tuple[list[Proven], int]:
    """All strategies found, and the number of cases tried."""
    examiner = Examiner(operator)
    strategies: list[Proven] = []
    for inputs in sharded(operator):
        proven = examiner.examine(inputs)
        for extended in with_partial_floats(operator, inputs) if proven is None else ():
            if (extended_proven := examiner.examine(extended)) is not None:
                strategies.append(extended_proven)
        if proven is not None:
            strategies.append(proven)
    strategies += [p for inputs in partial(operator) if (p := examiner.examine(inputs)) is not None]
    return [p for p in strategies if any(x != REPLICATE for x in p.strategy.inputs)], examiner.cases


def check(operator: OperatorProbe, claims: Iterable[AxisStrategy]) -> tuple[list[Proven], int]:
    """The ``claims`` that are true, and the number of cases tried."""
    examiner = Examiner(operator)
    tried = [examiner.examine(c.inputs, tuple((p,) for p in c.outputs)) for c in claims]
    return [proven for proven in tried if proven is not None], examiner.cases


_CONFIRMING = (Values(1), Values(2, "positive", 37.0), Values(3, "spread"), Values(4, "positive", 1e-3))
# Operands of fewer elements are tried at more scales. Chosen: such a run takes microseconds.
_FEW_ELEMENTS = 1 << 14
_MORE = tuple(Values(10 + k, PROFILES[k % 2], 8.0**k) for k in range(-5, 8))


def confirm(
    call: OpCall, operation: Callable[..., object], claims: Sequence[AxisStrategy], ranges: dict[int, Range]
) -> list[bool]:
    """Which of the ``claims`` hold at the sizes of ``call`` and on its number of devices; if these are too large for a
    trial, only the sharded dims keep their size."""
    operator = OperatorProbe(call, operation, tuple(tuple(map(int, t.shape)) for t in call.inputs), ranges=ranges)
    return [_holds_here(operator, claim) for claim in claims]


def _holds_here(operator: OperatorProbe, claim: AxisStrategy) -> bool:
    call = operator.call
    for shapes in (operator.base, _reduced(operator, claim)):
        if sum(map(prod, shapes)) > MOST_ELEMENTS or not operator.runs(shapes):
            continue
        outputs: Open = tuple((p,) for p in claim.outputs)
        for values in (*_CONFIRMING, *(_MORE if sum(map(prod, shapes)) < _FEW_ELEMENTS else ())):
            operands = operator.operands(shapes, values)
            whole = operator.run(operands)
            trial = Trial(call.size, 0, values)
            if not all(narrowed(operator, operands, whole, claim.inputs, trial, outputs)):
                return False
        return True
    # Too large to try: small sizes are evidence for large ones only if no argument may have another meaning there.
    return max(numbers_in(call), default=0) <= _SMALL_NUMBER


def _reduced(operator: OperatorProbe, claim: AxisStrategy) -> tuple[Shape, ...]:
    slots: set[Slot] = {(i, d) for i, p in enumerate(claim.inputs) if (d := shard_dim(p)) is not None}
    unchanged = {operator.base[i][d] for i, d in slots} | numbers_in(operator.call)
    return tuple(tuple(n if n in unchanged else min(n, 3 + n % 5) for n in shape) for shape in operator.base)


def fits(call: OpCall, proven: Proven) -> bool:
    """Whether the strategy can be offered for ``call``: in trials all sharded dims had one length, and some strategies
    hold for even shards only."""
    inputs = [tuple(map(int, t.shape)) for t in call.inputs]
    outputs = [None if t is None else tuple(map(int, t.shape)) for t in call.outputs]
    places = (*proven.strategy.inputs, *proven.strategy.outputs)
    if cuts_differ(inputs, proven.strategy.inputs):
        return False
    return not proven.even or are_even([*inputs, *outputs], places, call.size)
