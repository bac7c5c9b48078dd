"""In which shares rows of a batch may be divided among devices of unequal speed, and on which meshes.

The devices along an axis work in step, each on its own rows, so a step takes as long as the one that finishes last.
:func:`divided` gives the division whose last device finishes first; the seconds of a device are those of the whole step
on it alone, as a function of its rows. Whether a plan in these shares, or in equal ones, or one that divides the model
instead, is the quickest, is for the search to say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce

from autopar.cluster.description import Cluster
from autopar.errors import OptionsError
from autopar.ir.placements import Shares, coordinate_of, parse_placements, shares_of

from .alone import single_device_seconds
from .request import PlanRequest, axes_are_fixed, kernels_of, mesh_candidates
from .step_graphs import step_graph

Division = tuple[tuple[int, ...], Shares]
Finish = Callable[[int], float]


def divided(rows: int, finish: Sequence[Finish]) -> tuple[int, ...]:
    """How many of ``rows`` each device takes, at least one, so that the last finishes first; empty if there are not
    enough. ``finish[i](n)``: the seconds of device i for n rows, which grow with n.

    Each row goes to the device that is then done first. No division is better: let T be the largest of the seconds in
    the end, and look at the moment before the row came that made them T. One row more would have cost every device T
    or more at that moment (the row went where it cost least). Whoever finishes before T thus has no more rows than it
    had then, and all devices together had fewer than ``rows``. (The first rows, which every device takes, are the same
    in every division.)

    >>> divided(8, [lambda n: n * 1.0, lambda n: n * 3.0])
    (6, 2)
    """
    if rows < len(finish):
        return ()
    taken = [1] * len(finish)
    for _ in range(rows - len(finish)):
        first = min(range(len(finish)), key=lambda device: finish[device](taken[device] + 1))
        taken[first] += 1
    return tuple(taken)


def divisions(request: PlanRequest, rows: int) -> tuple[Division, ...]:
    """The meshes to try for ``rows`` rows (of a microbatch). Where the cluster has devices of several kinds, rows may
    be divided in unequal shares on one axis, besides the equal ones that the program of a mesh always has. Several
    kinds may need an axis of all devices, which is tried too unless axes are fixed. Shares that pins name come instead
    of others."""
    equal: tuple[Division, ...] = tuple((mesh, ()) for mesh in mesh_candidates(request))
    asked = _pinned(request)
    if asked:
        return tuple((mesh, asked) for mesh, _ in equal if _fit(asked, mesh)) or ((request.mesh, asked),)
    if not request.cluster.groups or request.roles or request.graph.caches:
        return equal
    finish = request.shared.once(
        "row seconds",
        (request.graph, request.cluster),
        rows,
        request.loss,
        make=lambda: _seconds_of_rows(request, rows),
    )
    flat = (math.prod(request.mesh),)
    joined = [] if axes_are_fixed(request) or (flat, ()) in equal else _unequal(flat, rows, finish)
    tried = [(mesh, shares) for mesh, _ in equal for shares in _unequal(mesh, rows, finish) or [()]]
    return (*tried, *((flat, shares) for shares in joined))


def _fit(shares: Shares, mesh: tuple[int, ...]) -> bool:
    return len(shares) == len(mesh) and all(len(each) in (0, n) for each, n in zip(shares, mesh, strict=True))


def _pinned(request: PlanRequest) -> Shares:
    """The shares that pins name. Raises :class:`OptionsError` if they name several for one axis."""
    placements = [
        tuple(map(shares_of, parse_placements(text.removeprefix("not "))))
        for text in request.options.pins.values()
        if ":" in text
    ]
    named = list(dict.fromkeys(shares for shares in placements if any(shares)))
    if len(named) > 1:
        raise OptionsError(f"pins divide rows in several ways, {' and '.join(map(str, named))}: name one of them")
    return named[0] if named else ()


def _seconds_of_rows(request: PlanRequest, rows: int) -> tuple[Finish, ...]:
    """For each device of the cluster, its seconds for some of ``rows``: those of all of them and of half of them lie on
    a line, since work and bytes grow with rows and launches do not."""
    half = -(-rows // 2) if request.graph.symbols else rows
    whole, part = (step_graph(request.graph, request.loss, count) for count in (rows, half))
    kinds: dict[Cluster, Finish] = {}
    finish = []
    for rank in range(request.cluster.size or 0):
        own = request.cluster.at(rank, 1)
        if own not in kinds:
            kinds[own] = _line(
                (half, single_device_seconds(own, part, kernels_of(request, part))[0]),
                (rows, single_device_seconds(own, whole, kernels_of(request, whole))[0]),
            )
        finish.append(kinds[own])
    return tuple(finish)


def _line(part: tuple[int, float], whole: tuple[int, float]) -> Finish:
    (few, less), (rows, seconds) = part, whole
    each = (seconds - less) / (rows - few) if rows > few else seconds / rows
    fixed = max(0.0, seconds - each * rows)
    return lambda count: fixed + each * count


def _unequal(mesh: tuple[int, ...], rows: int, finish: Sequence[Finish]) -> list[Shares]:
    """Unequal shares on one axis of ``mesh``, for each axis where devices differ. The devices with the same place on
    the axis work in step, in every stage, so the slowest of them counts."""
    found: list[Shares] = []
    devices = math.prod(mesh)
    for axis, size in enumerate(mesh):
        members: list[list[Finish]] = [[] for _ in range(size)]
        for rank, each in enumerate(finish):
            own = members[coordinate_of(rank % devices, mesh)[axis]]
            own += [] if each in own else [each]
        taken = divided(rows, [_slowest(own) for own in members])
        if len(set(taken)) > 1:
            shares = _reduced(taken)
            found.append(tuple(shares if other == axis else () for other in range(len(mesh))))
    return found


def _slowest(members: Sequence[Finish]) -> Finish:
    return lambda count: max(finish(count) for finish in members)


def _reduced(counts: tuple[int, ...]) -> tuple[int, ...]:
    common = reduce(math.gcd, counts)
    return tuple(count // common for count in counts)


def on_mesh(request: PlanRequest, division: Division) -> PlanRequest:
    """The request for just this mesh and these shares."""
    return replace(request, mesh=division[0], shares=division[1])
