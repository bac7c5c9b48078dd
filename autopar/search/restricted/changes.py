"""The single changes of a layout that may let it fit into memory: of one field, or of a degree for another one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from autopar.errors import OptionsError
from autopar.layout import Layout, divisors
from autopar.planner.request import PlanRequest, memory_limit_of

from .arrangements import DEGREES
from .nearest import can_be
from .never_fits import at_rest_in_layout

# Which degree may become smaller for which other one: those first whose ranks hold the same for those whose ranks do
# not, then those that divide layers in another way.
_EXCHANGES = (
    *(("data", "tensor"), ("data", "pipeline"), ("context", "tensor"), ("context", "pipeline")),
    *(("pipeline", "tensor"), ("tensor", "pipeline")),
)
# About the share of the limit that may rest on a device where a change is tried first. Chosen: what a step saves and
# computes with needs room too.
ROOMY = 0.5
# What is different, and the layout.
_Named = tuple[str, Layout]


@dataclass(frozen=True)
class Change:
    """A ``layout`` in place of the one that was asked for, and what is different, as ``text``. ``filled``: about what
    rests on a device under it, relative to the limit."""

    text: str
    layout: Layout
    filled: float

    @property
    def may_fit(self) -> bool:
        return self.filled <= 1.0

    def of(self, request: PlanRequest) -> PlanRequest:
        """The request with this change."""
        return _with_layout(request, self.layout)


def changes(request: PlanRequest, layout: Layout) -> list[Change]:
    """The changes of ``layout`` that are possible, those that may fit first, in the order of what they cost: about a
    third of the computation, then communication, then whatever the search makes of it."""
    found = dict[str, Change]()
    own, left_out = _possible(request, _of_fields(request, layout)), _possible(request, _left_out(layout))
    for text, changed in (*own, *_exchanged(request, layout), *left_out):
        found.setdefault(text, Change(text, changed, _filled(request, changed)))
    return sorted(found.values(), key=lambda change: (change.filled > ROOMY, not change.may_fit))


def _with_layout(request: PlanRequest, layout: Layout) -> PlanRequest:
    return replace(request, options=replace(request.options, layout=layout))


def _filled(request: PlanRequest, layout: Layout) -> float:
    return at_rest_in_layout(_with_layout(request, layout)) / memory_limit_of(request)


def _possible(request: PlanRequest, found: Iterable[_Named]) -> Iterator[_Named]:
    return (each for each in found if can_be(request, each[1]))


def _least_enough(
    request: PlanRequest, ascending: Sequence[_Named], shares: Sequence[float] = (ROOMY, 1.0)
) -> Sequence[_Named]:
    """Of changes of one kind, from the smallest to the largest, the first that fills no more than the first of some
    ``shares`` of the limit; if none does, than the next share; or the last."""
    filled = [(_filled(request, layout), (text, layout)) for text, layout in ascending]
    enough = [each for share in shares for own, each in filled if own <= share]
    return [*enough, *ascending[-1:]][:1]


def _given(layout: Layout) -> dict[str, Any]:
    return {name: getattr(layout, name) for name in layout.given}


def _of(values: Mapping[str, Any]) -> Iterator[Layout]:
    """The layout of these ``values``; none if they contradict each other."""
    with suppress(OptionsError):
        yield Layout(**values)


def _changed(layout: Layout, **values: Any) -> Iterator[Layout]:
    """The layout with other ``values`` of fields, if it is one."""
    return _of({**_given(layout), **values})


def _of_fields(request: PlanRequest, layout: Layout) -> Iterator[_Named]:
    given = _given(layout)
    if given.get("recompute") in ("none", "selective"):
        yield from (('recompute="full"', each) for each in _changed(layout, recompute="full"))
    if given.get("zero") in (0, 1, 2):
        higher = [each for zero in range(given["zero"] + 1, 4) for each in _changed(layout, zero=zero)]
        # None costs much time: the highest, rather than one that leaves little room.
        yield from _least_enough(request, [(f"zero={each.zero}", each) for each in higher], shares=(ROOMY,))
    sizes = divisors(given.get("microbatch", 1))[:-1]
    for size in dict.fromkeys((*sizes[-1:], *sizes[:1])):  # The next smaller one, and one sample.
        yield from ((f"microbatch={size}", each) for each in _changed(layout, microbatch=size))
    has_sequence = given.get("tensor") != 1  # One tensor rank has nothing to divide.
    for name in ("sequence_parallel", "offload") if has_sequence else ("offload",):
        if given.get(name) is False:
            yield from ((f"{name}=True", each) for each in _changed(layout, **{name: True}))


def _exchanged(request: PlanRequest, layout: Layout) -> Iterator[_Named]:
    """Of each pair of degrees the smallest exchange that leaves room or else may fit, or the largest one."""
    for fewer, more in _EXCHANGES:
        if fewer not in layout.given:
            continue
        size, found = getattr(layout, fewer), list[_Named]()
        for factor in divisors(size)[1:]:
            values = {fewer: size // factor}
            if more in layout.given:
                values[more] = getattr(layout, more) * factor
            text = " and ".join(f"{name}={value}" for name, value in values.items())
            found += _possible(request, ((text, each) for each in _changed(layout, **values)))
        yield from _least_enough(request, found)


def _left_out(layout: Layout) -> Iterator[_Named]:
    """The layout without one field that restricts what is in flight, and without its degrees."""
    degrees = tuple(name for name in (*DEGREES, "expert") if name in layout.given)
    for text, names in (*((name, (name,)) for name in ("microbatch", "schedule", "interleave")), ("degrees", degrees)):
        kept = {name: value for name, value in _given(layout).items() if name not in names}
        if len(kept) < len(layout.given):
            yield from ((f"{text} left out", each) for each in _of(kept))
