"""The error for a layout that cannot be arranged: which other values of one of its fields can be."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from autopar.errors import OptionsError
from autopar.layout import divisors
from autopar.planner.request import PlanRequest

from .arrangements import DEGREES, arrangements
from .divides import check_stages_divide

_FIELDS = ("tensor", "context", "data", "pipeline", "expert", "microbatch")


def arranged_or_explained(request: PlanRequest) -> list[PlanRequest]:
    """:func:`.arrangements`. Raises :class:`OptionsError` if there is none, with the nearest values of each given field
    with which, and with all others as they are, there would be some."""
    try:
        return arrangements(request)
    except OptionsError as error:
        said = str(error)
        found = [text for text in _nearest(request) if not re.search(rf"{text}\b", said)]
        raise OptionsError(f"{said}; {' or '.join(found)} would do" if found else said) from error


def _nearest(request: PlanRequest) -> Iterator[str]:
    """``tensor=2``: of each field the next smaller and the next larger value that can be arranged."""
    layout = request.options.layout
    for name in _FIELDS:
        if layout is not None and name in layout.given:
            value = getattr(layout, name)
            whole, on = request.batch if name == "microbatch" else math.prod(request.mesh), ""
            possible: Sequence[int] = divisors(whole)
            if name in DEGREES and _is_of_layout(request):
                possible, on = range(1, 2 * value + 1), " on {} devices"
            below, above = [n for n in possible if n < value][::-1], [n for n in possible if n > value]
            for candidates in (below, above):
                works = next((n for n in candidates if _can_be(request, name, n)), None)
                if works is not None:
                    yield f"{name}={works}{on.format(layout.devices // value * works)}"


def _is_of_layout(request: PlanRequest) -> bool:
    """Whether the devices are those that a layout takes of which every degree is given: none of them can be another
    with as many devices."""
    layout = request.options.layout
    every = layout is not None and set(DEGREES) <= set(layout.given) and layout.devices == math.prod(request.mesh)
    return every and not request.axis_names


def _can_be(request: PlanRequest, name: str, value: int) -> bool:
    given: dict[str, Any] = {name: value}
    assert request.options.layout is not None
    try:
        layout = replace(request.options.layout, **given)
        mesh = layout.mesh if _is_of_layout(request) else request.mesh
        if math.prod(mesh) > (request.cluster.size or math.inf):
            return False
        changed = replace(request, mesh=mesh, options=replace(request.options, layout=layout))
        check_stages_divide(changed)
        return bool(arrangements(changed))
    except OptionsError:
        return False
