"""In which shares rows of a batch may be divided among devices of unequal speed, and on which meshes.

The devices along an axis work in step, each on its own rows, so a step takes as long as the one that finishes last.
:func:`divided` gives the division whose last device finishes first; the seconds of a device are those of the whole step
on it alone, as a function of its rows. Whether a plan in these shares, or in equal ones, or one that divides the model
instead, is the quickest, is for the search to say.

Where memory is short, and devices have more or less of it, rows in proportion to it are tried too, and what lies
between (:func:`divisions_by_memory`): whoever has little takes no more rows than it has room for, and of the divisions
that are left, the one whose last device finishes first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import TypeVar

from autopar.cluster.description import Cluster
from autopar.errors import OptionsError
from autopar.ir.graph import Graph
from autopar.ir.placements import Shares, coordinate_of, parse_placements, shares_of
from autopar.ir.row_shares import apportioned
from autopar.optimizers import optimizer_bytes

from .alone import single_device_seconds
from .memory_limit import TooSlowError
from .request import PlanRequest, axes_are_fixed, kernels_of, mesh_candidates, rank_limits
from .step_graphs import step_graph

Division = tuple[tuple[int, ...], Shares]
Finish = Callable[[int], float]
Solved = TypeVar("Solved")
Item = TypeVar("Item")

# The most divisions between one by speed and one by memory that are listed for an axis, of which a few are solved.
# Chosen: bisection solves at most four of 15.
MOST_BY_MEMORY = 15


def divided(rows: int, finish: Sequence[Finish], most: Sequence[int] = ()) -> tuple[int, ...]:
    """How many of ``rows`` each device takes, at least one, so that the last finishes first; empty if there are not
    enough, or more than all may take. ``finish[i](n)``: the seconds of device i for n rows, which grow with n;
    ``most[i]``: the rows that it may have.

    Each row goes to the device that is then done first. No division is better: let T be the largest of the seconds in
    the end, and look at the moment before the row came that made them T. One row more would have cost every device T
    or more at that moment (the row went where it cost least), if it could have taken any. Whoever finishes before T
    thus has no more rows than it had then, and all devices together had fewer than ``rows``. (The first rows, which
    every device takes, are the same in every division.)

    >>> divided(8, [lambda n: n * 1.0, lambda n: n * 3.0])
    (6, 2)
    >>> divided(8, [lambda n: n * 1.0, lambda n: n * 3.0], most=(4, 8))
    (4, 4)
    """
    most = most or [rows] * len(finish)
    if rows < len(finish) or sum(most) < rows or min(most) < 1:
        return ()
    taken = [1] * len(finish)
    for _ in range(rows - len(finish)):
        able = (device for device in range(len(finish)) if taken[device] < most[device])
        taken[min(able, key=lambda device: finish[device](taken[device] + 1))] += 1
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
    finish = _finish(request, rows)
    flat = (math.prod(request.mesh),)
    joined = [] if axes_are_fixed(request) or (flat, ()) in equal else _unequal(flat, rows, finish)
    tried = [(mesh, shares) for mesh, _ in equal for shares in _unequal(mesh, rows, finish) or [()]]
    return (*tried, *((flat, shares) for shares in joined))


def divisions_by_memory(request: PlanRequest, rows: int, tried: Sequence[Division]) -> tuple[tuple[Division, ...], ...]:
    """Where devices may hold different amounts, lists of more divisions of ``rows`` rows: for each mesh of those that
    were ``tried``, and each of its axes along which devices differ so, from rows by speed to rows in proportion to
    memory, those that finish first first. None under pins that name shares."""
    limits, pinned = rank_limits(request), _pinned(request)
    if len(set(limits)) < 2 or pinned or request.roles or request.graph.caches:
        return ()
    finish, flat = _finish(request, rows), (math.prod(request.mesh),)
    meshes = [mesh for mesh, _ in tried] + ([] if axes_are_fixed(request) else [flat])
    blocks = max(1, len(limits) // math.prod(request.mesh))
    held = [parts / blocks for parts in _least_held(request.graph, request.options.optimizer, flat[0])]
    every = (each for mesh in dict.fromkeys(meshes) for each in _by_memory(mesh, rows, finish, limits, held))
    new = (tuple(division for division in each if division not in tried) for each in every)
    return tuple(filter(None, new))


def bisected(
    ordered: Sequence[Division], solve: Callable[[Division], Solved | None], is_short: Callable[[Solved], bool]
) -> list[Solved]:
    """What ``solve`` finds in some of the divisions that :func:`divisions_by_memory` lists: the first that is not
    short of memory is among them. The further back a division, the less the small devices hold, and the later it
    finishes; so those behind one that has enough are not tried, nor those before one that has not. ``solve`` returns
    None where nothing fits, and raises :class:`TooSlowError` where nothing is worth while, nor behind it then."""
    found: list[Solved] = []
    first, end = 0, len(ordered)
    while first < end:
        middle = (first + end) // 2
        try:
            solved = solve(ordered[middle])
        except TooSlowError:
            end = middle
            continue
        found += [] if solved is None else [solved]
        if solved is None or is_short(solved):
            first = middle + 1
        else:
            end = middle
    return found


def _by_memory(
    mesh: tuple[int, ...], rows: int, finish: Sequence[Finish], limits: Sequence[int], held: Sequence[float]
) -> Iterator[tuple[Division, ...]]:
    """:func:`divisions_by_memory` on one mesh. ``held``: bytes that every device may have to hold whatever its rows
    are."""
    for axis, own in enumerate(_along_axes(mesh, range(len(limits)))):
        least = [min(limits[rank] for rank in ranks) for ranks in own]
        members = [_slowest(list(dict.fromkeys(finish[rank] for rank in ranks))) for ranks in own]
        if len(set(least)) < 2 or rows < len(least):
            continue
        families = (_between(rows, members, [limit - fixed for limit in least]) for fixed in held if fixed < min(least))
        counts = dict.fromkeys(each for family in families for each in family)
        quickest = sorted((each for each in counts if len(set(each)) > 1), key=partial(_last, members))
        yield tuple((mesh, _on_axis(axis, mesh, each)) for each in _spread(quickest, MOST_BY_MEMORY))


def _last(members: Sequence[Finish], counts: tuple[int, ...]) -> float:
    """When the last device finishes its rows."""
    return max(finish(count) for finish, count in zip(members, counts, strict=True))


def _between(rows: int, members: Sequence[Finish], left: Sequence[float]) -> Iterator[tuple[int, ...]]:
    """Divisions from rows in proportion to what is ``left`` of the memory of each device to rows by speed alone: no
    device has more than some multiple of its part by memory, and of these divisions the one that finishes first."""
    by_memory = apportioned(rows, [max(1, int(own)) for own in left])
    yield by_memory
    parts = [rows * own / sum(left) for own in left]
    by_speed = zip(by_memory, divided(rows, members), parts, strict=True)
    multiples = sorted({n / part for fewest, most, part in by_speed for n in range(fewest + 1, most + 1)})
    for multiple in _spread(multiples, MOST_BY_MEMORY):
        most = [max(1, math.floor(multiple * part * (1 + 1e-12))) for part in parts]
        found = divided(rows, members, most)
        if found:
            yield found


def _spread(items: Sequence[Item], most: int) -> list[Item]:
    """At most so many of ``items``, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]


def _least_held(graph: Graph, optimizer: str, devices: int) -> tuple[float, float, float]:
    """Bytes that a device holds whatever its rows are: next to nothing, its part of all weights with their gradients
    and state, all of them."""
    nodes = graph.placeholders("param")
    trained = [node for node in nodes if node.target in graph.gradients]
    whole = sum(int(node.stored.bytes) for node in nodes)
    whole += sum(int(node.stored.bytes) + int(optimizer_bytes(optimizer, node.stored)) for node in trained)
    return 0.0, whole / devices, float(whole)


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


def _finish(request: PlanRequest, rows: int) -> tuple[Finish, ...]:
    """:func:`_seconds_of_rows`, computed once."""
    of = request.graph, request.cluster
    return request.shared.once("row seconds", of, rows, request.loss, make=lambda: _seconds_of_rows(request, rows))


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
    for axis, members in enumerate(_along_axes(mesh, range(len(finish)))):
        taken = divided(rows, [_slowest(list(dict.fromkeys(finish[rank] for rank in own))) for own in members])
        if len(set(taken)) > 1:
            found.append(_on_axis(axis, mesh, taken))
    return found


def _along_axes(mesh: tuple[int, ...], ranks: Sequence[int]) -> Iterator[list[list[int]]]:
    """For each axis of ``mesh`` the ranks in each place along it, of all blocks of as many devices."""
    devices = math.prod(mesh)
    for axis, size in enumerate(mesh):
        members: list[list[int]] = [[] for _ in range(size)]
        for rank in ranks:
            members[coordinate_of(rank % devices, mesh)[axis]].append(rank)
        yield members


def _on_axis(axis: int, mesh: tuple[int, ...], counts: tuple[int, ...]) -> Shares:
    """The shares of an axis that gives its devices so many rows."""
    return tuple(_reduced(counts) if other == axis else () for other in range(len(mesh)))


def _slowest(members: Sequence[Finish]) -> Finish:
    return lambda count: max(finish(count) for finish in members)


def _reduced(counts: tuple[int, ...]) -> tuple[int, ...]:
    common = reduce(math.gcd, counts)
    return tuple(count // common for count in counts)


def on_mesh(request: PlanRequest, division: Division) -> PlanRequest:
    """The request for just this mesh and these shares."""
    limits = request.rank_limits or rank_limits(request)
    return replace(request, mesh=division[0], shares=division[1], rank_limits=limits)
