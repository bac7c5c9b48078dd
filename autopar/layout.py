"""Layouts that people choose by hand: degrees of parallelism, microbatches, schedule, recomputation, storage."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self

from autopar.schedule.named import SCHEDULES

from .errors import OptionsError
from .field_text import read, written
from .given_fields import own_fields, remembers_given
from .keywords import suggests_fields
from .removed_fields import names_removed_fields, removed

Recompute = Literal["none", "selective", "full"]
# Bytes of an element in fp32: of a master weight, an optimizer's moment or a gradient. By definition of the format.
MASTER_BYTES = 4


@names_removed_fields
@suggests_fields
@remembers_given
@dataclass(frozen=True, repr=False)
class Layout:
    """How devices share a training step, in the terms of the field.

    Args:
        tensor, pipeline, data, context: devices among which weights, layers, the batch and the sequence are divided;
            their product is the number of devices, tensor innermost, pipeline outermost.
        expert: devices among which experts are divided, out of ``data`` x ``context``, neighbours first. Rows are sent
            to their experts and back by all-to-all; gradients of experts are reduced over the other data ranks.
        microbatch: samples that one data rank computes at a time.
        interleave: chunks of layers on each pipeline stage.
        recompute: what backward recomputes. ``"none"``; ``"selective"``: the insides of attention (everything between a
            product of two activations and the next); ``"full"``: whole layers from their inputs.
        sequence_parallel: whether values between tensor-parallel regions are divided along the sequence.
        zero: 1 shards the optimizer state over data ranks, 2 also gradients, 3 also weights.
        schedule: by name (:mod:`autopar.schedule.named`); default ``"1f1b"``, or ``"interleaved"`` with several chunks.
        precision: the dtype of computation. Reduced precisions keep fp32 master weights and accumulate gradients in
            fp32.
        offload: whether optimizer states rest in host memory.
        given: the fields that were given, in order; set by itself. :class:`Options` restrict a plan by these alone.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1
    expert: int = 1
    microbatch: int = 1
    interleave: int = 1
    recompute: Recompute = "none"
    sequence_parallel: bool = False
    zero: Literal[0, 1, 2, 3] = 0
    schedule: str | None = None
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    offload: bool = False
    given: tuple[str, ...] = field(default=(), compare=False, kw_only=True)

    # Fields that are positive numbers, that take one of a few values, and that are flags.
    numbers: ClassVar[tuple[str, ...]] = (
        *("tensor", "pipeline", "data", "context", "expert", "microbatch", "interleave"),
    )
    choices: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "recompute": ("none", "selective", "full"),
        "zero": (0, 1, 2, 3),
        "precision": ("fp32", "bf16", "fp16"),
    }
    flags: ClassVar[tuple[str, ...]] = ("sequence_parallel", "offload")

    def __post_init__(self) -> None:
        self._check_values()
        self._check_divided()
        self._check_schedule()

    def _check_values(self) -> None:
        kind = type(self).__name__
        for name in self.numbers:
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise OptionsError(f"{kind}({name}={value!r}): not a positive whole number")
        for name, choices in self.choices.items():
            value = getattr(self, name)
            if type(value) is not type(choices[0]) or value not in choices:
                known = removed(f"{name}={value}") if isinstance(value, str) else ""
                said = known or f"must be one of {', '.join(map(repr, choices))}"
                raise OptionsError(f"{kind}({name}={value!r}): {said}")
        for name in self.flags:
            if type(getattr(self, name)) is not bool:
                raise OptionsError(f"{kind}({name}={getattr(self, name)!r}): neither True nor False")

    def _check_divided(self) -> None:
        is_known = "data" in self.given and "context" in self.given
        if is_known and (self.data * self.context) % self.expert:
            unit = self.expert // math.gcd(self.expert, self.context)
            raise OptionsError(
                f"Layout(expert={self.expert}): experts are divided among data x context ranks, and {self.expert} "
                f"does not divide {self.data} x {self.context}; "
                f"{degrees('expert', self.data * self.context, self.expert)}, "
                f"or take data={-(-self.data // unit) * unit}"
            )

    def _check_schedule(self) -> None:
        if self.schedule is not None and self.schedule not in SCHEDULES:
            raise OptionsError(f"Layout(schedule={self.schedule!r}): must be one of {', '.join(map(repr, SCHEDULES))}")
        if "pipeline" not in self.given:
            return
        if self.interleave > 1 and self.pipeline == 1:
            raise OptionsError(
                f"Layout(interleave={self.interleave}): chunks of layers take turns on pipeline stages, and pipeline=1 "
                "has none; take interleave=1, or pipeline=2 or more"
            )
        named = SCHEDULES[self.schedule_name]
        if self.pipeline == 1 and named.least > 1:
            raise OptionsError(
                f"Layout(schedule={self.schedule!r}): {named.least} chunks of layers take turns on each stage, and "
                "pipeline=1 has none; leave schedule out, or take pipeline=2 or more"
            )
        most = named.most or max(self.interleave, named.least)
        if self.pipeline > 1 and not named.least <= self.interleave <= most:
            works = min(max(self.interleave, named.least), most)
            raise OptionsError(
                f"Layout(schedule={self.schedule!r}, interleave={self.interleave}): {self.schedule_name!r} runs "
                f"{'at least ' * (named.most is None)}{named.least} chunk{'s' * (named.least > 1)} on each stage; "
                f"take interleave={works}"
            )

    def completed(self) -> Layout:
        """This layout with every field given. Raises :class:`OptionsError` if the fields contradict each other."""
        return replace(self, given=tuple(one.name for one in own_fields(self)))

    @property
    def restriction(self) -> str:
        """The given fields, as :meth:`parse` reads them: ``tensor=2 data=1``."""
        values = ((name, getattr(self, name)) for name in self.given)
        return " ".join(f"{name}={written(value)}" for name, value in values if value is not None)

    @property
    def devices(self) -> int:
        return self.stage_devices * self.pipeline

    @property
    def mesh(self) -> tuple[int, ...]:
        """The mesh whose axes are the degrees, outermost first."""
        degrees = (self.pipeline, self.data, self.context, self.tensor)
        return tuple(degree for degree in degrees if degree > 1) or (1,)

    @property
    def stage_devices(self) -> int:
        """Devices of one pipeline stage."""
        return self.data * self.context * self.tensor

    @property
    def chunks(self) -> int:
        return self.pipeline * self.interleave

    @property
    def schedule_name(self) -> str:
        return self.schedule or ("interleaved" if self.interleave > 1 else "1f1b")

    def microbatches(self, batch: int) -> int:
        """How many microbatches a data rank computes of a global ``batch``. Raises :class:`OptionsError` if the batch
        does not divide evenly."""
        if batch % (self.data * self.microbatch):
            sizes = [d for d in range(1, batch // self.data + 1) if batch % (self.data * d) == 0] or [batch]
            nearest = min(sizes, key=lambda size: abs(size - self.microbatch))
            raise OptionsError(
                f"a batch of {batch} does not divide into {self.data} data ranks x microbatches of "
                f"{self.microbatch}; a microbatch of {nearest} does"
                if batch % self.data == 0
                else f"a batch of {batch} does not divide among {self.data} data ranks; "
                f"{math.ceil(batch / self.data) * self.data} does"
            )
        return batch // (self.data * self.microbatch)

    @classmethod
    def parse(cls, text: str) -> Self:
        """The layout that ``str`` writes as ``text``; words may be separated by commas. Raises :class:`OptionsError`.

        >>> Layout.parse("tensor=8 pipeline=4 recompute=full").devices
        32
        """
        defaults = {one.name: one.default for one in own_fields(cls)}
        values: dict[str, Any] = {}
        for word in text.replace(",", " ").split():
            name, equals, value = word.partition("=")
            if name in values:
                raise OptionsError(f"{word!r} in a layout: {name} is given twice")
            if not equals or name not in defaults:
                said = removed(name) or f"write NAME=VALUE, NAME one of {', '.join(defaults)}"
                raise OptionsError(f"{word!r} in a layout: {said}")
            values[name] = read(name, value, defaults[name])
        return cls(**values)

    def __repr__(self) -> str:
        """The given fields: ``Layout(tensor=2, data=4)``."""
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in self.given)})"

    def __str__(self) -> str:
        """What differs from one device: ``tensor=8 pipeline=8 microbatch=1``."""
        values = ((one.name, getattr(self, one.name), one.default) for one in own_fields(self))
        return " ".join(
            f"{name}={written(value)}" for name, value, default in values if value != default or name == "microbatch"
        )


def divisors(number: int) -> list[int]:
    """Ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def degrees(name: str, size: int, requested: int) -> str:
    """What to take instead of ``requested`` ranks, among which ``size`` does not divide: the nearest divisors.

    >>> degrees("tensor", 8, 5)
    'tensor=4 and tensor=8 do'
    >>> degrees("tensor", 8, 16)
    'tensor=8 does'
    """
    below, above = [n for n in divisors(size) if n < requested][-1:], [n for n in divisors(size) if n > requested][:1]
    degrees_that_divide = [f"{name}={n}" for n in (*below, *above)]
    return f"{' and '.join(degrees_that_divide)} do{'es' * (len(degrees_that_divide) == 1)}"
