"""The error for a layout that cannot be arranged: which other values of one of its fields can be, or of several."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice, product
from typing import Any

from autopar.errors import OptionsError
from autopar.layout import Layout, divisors
from autopar.planner.request import PlanRequest

from .arrangements import DEGREES, arrangements
from .divides import check_stages_divide

_FIELDS = ("tensor", "context", "data", "pipeline", "expert", "microbatch")
# How many changes of several fields at once are tried. Chosen: each takes milliseconds, of large models a tenth of a
# second.
MOST_TRIED = 50
# Of how many values of each field. Chosen: of four fields these are thousands, which are sorted in milliseconds.
NEAREST = 8


def arranged_or_explained(request: PlanRequest) -> list[PlanRequest]:
    """:func:`.arrangements`. Raises :class:`OptionsError` if there is none, with the nearest values of each given field
    with which, and with all others as they are, there would be some; if there are none, with the nearest values of
    several fields."""
    try:
        return arrangements(request)
    except OptionsError as error:
        said = str(error)
        found = [text for text in _nearest(request) or _nearest_together(request) if not re.search(rf"{text}\b", said)]
        raise OptionsError(f"{said}; {' or '.join(found)} would do" if found else said) from error


def other_degrees(layout: Layout, devices: int) -> str:
    """``; data=4 would take 8``: the nearest degrees with which a layout takes so many ``devices``; else empty."""
    names = [name for name in (*DEGREES, "expert") if name == "data" or getattr(layout, name) > 1]
    near = _by_nearness(layout, {name: divisors(devices) for name in names})
    found = next((each for each in near if each.devices == devices), None)
    return "" if found is None else f"; {_changes(layout, found)} would take {devices}"


def _by_nearness(layout: Layout, possible: Mapping[str, Sequence[int]]) -> Iterator[Layout]:
    """The layouts with values that are ``possible`` of each field, those that are nearest to ``layout`` first: those
    with other data ranks alone, then with as few other fields as possible, then by ratios."""

    def far(name: str, value: int) -> float:
        return abs(math.log(value / getattr(layout, name)))

    def distance(values: tuple[int, ...]) -> tuple[int, float]:
        each = {name: far(name, value) for name, value in zip(possible, values, strict=True)}
        return sum(of > 0 for name, of in each.items() if name != "data"), sum(each.values())

    near = [sorted(values, key=partial(far, name))[:NEAREST] for name, values in possible.items()]
    for values in sorted(product(*near), key=distance):
        given: dict[str, Any] = dict(zip(possible, values, strict=True))
        with suppress(OptionsError):  # Experts do not divide, or chunks take turns on one stage.
            yield replace(layout, **given)


def _changes(before: Layout, after: Layout) -> str:
    """``tensor=4 data=2``: the numbers of which a layout has others after a change."""
    return " ".join(f"{name}={n}" for name in _FIELDS if (n := getattr(after, name)) != getattr(before, name))


def _nearest(request: PlanRequest) -> list[str]:
    """``tensor=2``: of each field the next smaller and the next larger value that can be arranged."""
    layout, found = request.options.layout, list[str]()
    for name in _FIELDS:
        if layout is not None and name in layout.given:
            value, possible = getattr(layout, name), _possible(request, name)
            below, above = [n for n in possible if n < value][::-1], [n for n in possible if n > value]
            for candidates in (below, above):
                works = (_changed(layout, name, n) for n in candidates)
                found += islice((_said(request, each) for each in works if each and can_be(request, each)), 1)
    return found


def _nearest_together(request: PlanRequest) -> list[str]:
    """``tensor=4 data=2``: the nearest values of several fields that can be arranged."""
    layout, devices, batch = request.options.layout, math.prod(request.mesh), request.batch
    if layout is None:
        return []
    names = [name for name in _FIELDS if name in layout.given and (name == "data" or getattr(layout, name) > 1)]
    near = _by_nearness(layout, {name: _possible(request, name) for name in names})
    may_be = (
        each for each in near if (_is_of_layout(request) or devices % each.devices == 0) and batch % each.data == 0
    )
    works = (_said(request, each) for each in islice(may_be, MOST_TRIED) if can_be(request, each))
    return list(islice(works, 1))


def _possible(request: PlanRequest, name: str) -> Sequence[int]:
    """The values that a given field could have."""
    if name in (*DEGREES, "expert") and _is_of_layout(request):
        return range(1, 2 * getattr(request.options.layout, name) + 1)
    return divisors(request.batch if name == "microbatch" else math.prod(request.mesh))


def _changed(layout: Layout, name: str, value: int) -> Layout | None:
    given: dict[str, Any] = {name: value}
    with suppress(OptionsError):
        return replace(layout, **given)
    return None


def _said(request: PlanRequest, changed: Layout) -> str:
    """The values that are others in a ``changed`` layout, and on how many devices, if not on those of the request."""
    layout = request.options.layout
    assert layout is not None
    is_elsewhere = _is_of_layout(request) and changed.devices != layout.devices
    return _changes(layout, changed) + f" on {changed.devices} device{'s' * (changed.devices > 1)}" * is_elsewhere


def _is_of_layout(request: PlanRequest) -> bool:
    """Whether the devices are those that a layout takes of which every degree is given: none of them can be another
    with as many devices."""
    layout = request.options.layout
    every = layout is not None and set(DEGREES) <= set(layout.given) and layout.devices == math.prod(request.mesh)
    return every and not request.axis_names


def can_be(request: PlanRequest, layout: Layout) -> bool:
    """Whether ``layout`` could be asked for instead of that of a request."""
    mesh = layout.mesh if _is_of_layout(request) else request.mesh
    if math.prod(mesh) > (request.cluster.size or math.inf):
        return False
    try:
        changed = replace(request, mesh=mesh, options=replace(request.options, layout=layout))
        check_stages_divide(changed)
        return bool(arrangements(changed))
    except OptionsError:
        return False
