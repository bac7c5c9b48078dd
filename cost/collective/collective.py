"""The price of a collective over axes of a mesh: alpha-beta for each level of links, by the quickest algorithm.

Sizes are as in nccl-tests: ``nbytes`` is the full tensor of the group (the output of an all-gather, the input of a
reduce-scatter, the tensor of an all-reduce; for all-to-all, the number of devices times what each holds).

:mod:`autopar.cost.collective.algorithms` describes the algorithms. The price is ``collective_seconds +
synchronisation_seconds``, plus the least, over algorithms, of the sum over phases of the largest line ``start + latency
x steps + x + 2 sqrt(ramp x)`` with ``x = bytes / bandwidth``.

Lines are concave, and combine such that one collective of two tensors never costs more than two collectives. So a
solver finds no gain in splitting that the hardware would not show.
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache

import numpy as np
import sympy

from autopar.cluster.description import Cluster
from autopar.cluster.device import Device
from autopar.errors import OptionsError
from autopar.ir.node import Dim
from autopar.ir.program import COLLECTIVES

from .algorithms import Level, Route, routes, traffic

Blocks = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


def check_mesh(cluster: Cluster, mesh: tuple[int, ...]) -> None:
    """Raises :class:`OptionsError` if ``mesh`` has more devices than ``cluster``, or an axis without devices."""
    devices = math.prod(mesh)
    if any(size < 1 for size in mesh):
        raise OptionsError(f"mesh {mesh} has an axis without devices")
    if cluster.size is not None and devices > cluster.size:
        raise OptionsError(f"mesh {mesh} needs {devices} devices; cluster {cluster.name!r} has {cluster.size}")


@lru_cache(maxsize=1 << 12)
def fan_out(cluster: Cluster, mesh: tuple[int, ...], axes: tuple[int, ...]) -> tuple[float, ...]:
    """The number of members that each link level joins, innermost first, for the groups of devices that differ only
    along ``axes``.

    Ranks are row-major in ``mesh``. If groups are placed differently, the most spread one is priced. If a level divides
    a group unevenly, the average counts (fan-outs need not be integers). Raises :class:`OptionsError`.

    >>> fan_out(Cluster.get("dgx-a100-80gb"), (8, 8), (0,))
    (1.0, 8.0)
    >>> fan_out(Cluster.get("dgx-a100-80gb"), (8, 8), (0, 1))
    (8.0, 8.0)
    """
    groups = _groups(cluster, mesh, axes)
    inside, fans = groups.shape[1], []
    for link in cluster.links:
        blocks = 1 if link.size is None else _most_blocks(groups // link.size)
        fans.append(inside / blocks)
        inside = blocks
    return tuple(fans)


def _groups(cluster: Cluster, mesh: tuple[int, ...], axes: tuple[int, ...]) -> Blocks:
    """The ranks of each group, one group in a row."""
    check_mesh(cluster, mesh)
    if len(set(axes)) != len(axes) or any(not 0 <= axis < len(mesh) for axis in axes):
        raise OptionsError(f"axes {axes} are not distinct axes of the mesh {mesh}")
    ranks = np.arange(math.prod(mesh)).reshape(mesh)
    members = math.prod(mesh[axis] for axis in axes)
    return np.moveaxis(ranks, axes, range(-len(axes), 0)).reshape(-1, members)


def _most_blocks(blocks: Blocks) -> int:
    """The largest number of distinct values in a row."""
    rows = np.sort(blocks, axis=1)
    return int((np.diff(rows, axis=1) != 0).sum(axis=1).max(initial=0)) + 1


def levels_of(cluster: Cluster, mesh: tuple[int, ...], axes: tuple[int, ...]) -> tuple[Level, ...]:
    """The levels of links that the groups of ``axes`` use, innermost first; none for groups of one device."""
    levels, inner, below = [], 1.0, 1
    for link, fan in zip(cluster.links, fan_out(cluster, mesh, axes), strict=True):
        if fan > 1.0:
            dims = _dims(_groups(cluster, mesh, axes), below, link.torus) if link.torus else (fan,)
            levels.append(Level(link, fan, inner, link.share(below), dims))
        inner *= fan
        below = link.size or below
    return tuple(levels)


def _dims(groups: Blocks, below: int, torus: tuple[int, ...]) -> tuple[float, ...]:
    """The fan-outs above 1 of the groups in the dims of a torus, whose blocks have ``below`` devices."""
    cuts = [below * math.prod(torus[: i + 1]) for i in range(len(torus))]
    counts = [_most_blocks(groups // cut) for cut in (below, *cuts)]
    return tuple(inside / blocks for inside, blocks in itertools.pairwise(counts) if inside > blocks)


@lru_cache(maxsize=1 << 14)
def _route(cluster: Cluster, mesh: tuple[int, ...], kind: str, axes: tuple[int, ...]) -> Route:
    """The routes of the collective; none for a group of one device."""
    if kind not in COLLECTIVES:
        raise OptionsError(f"{kind!r} is not a collective; one of {', '.join(COLLECTIVES)}")
    levels = levels_of(cluster, mesh, axes)
    return routes(kind, levels, cluster.algorithms) if levels else ()


def bytes_sent(kind: str, nbytes: Dim, members: Dim) -> Dim:
    """Bytes that each of ``members`` devices sends in a bandwidth-optimal collective of ``nbytes`` (see the module
    docstring). The result is an expression if an argument is one, in mesh degrees, batch and sequence.

    >>> n = sympy.Symbol("n", positive=True)
    >>> bytes_sent("all_reduce", 100, n)
    200 - 200/n
    """
    if kind not in COLLECTIVES:
        raise OptionsError(f"{kind!r} is not a collective; one of {', '.join(COLLECTIVES)}")
    share = traffic(kind, sympy.sympify(members), sympy.Integer(1))
    return sympy.simplify(share * nbytes)


def collective_seconds(
    cluster: Cluster, mesh: tuple[int, ...], kind: str, axes: tuple[int, ...], nbytes: float
) -> float:
    """Seconds of one collective on ``mesh`` (a shape) over ``axes`` together; 0 for a group of one device.

    ``nbytes``: of the full tensor of a group; see the module docstring. Raises :class:`OptionsError`.
    """
    route = _route(cluster, mesh, kind, axes)
    if not route:
        return 0.0
    root = math.sqrt(nbytes)
    quickest = math.inf
    for phases in route:
        total = 0.0
        for lines in phases:
            total += max([fixed + slope * nbytes + ramp * root for fixed, slope, ramp in lines])
        quickest = min(quickest, total)
    return cluster.collective_seconds + cluster.synchronisation_seconds + quickest


def bucketed_seconds(
    cluster: Cluster,
    mesh: tuple[int, ...],
    kind: str,
    axes: tuple[int, ...],
    nbytes: float,
    bucket_bytes: float,
) -> float:
    """Seconds of ``nbytes`` as their share of a collective of ``bucket_bytes``: ``nbytes / bucket_bytes`` of its price.
    A tensor larger than the bucket has a collective of its own."""
    if nbytes >= bucket_bytes:
        return collective_seconds(cluster, mesh, kind, axes, nbytes)
    return nbytes / bucket_bytes * collective_seconds(cluster, mesh, kind, axes, bucket_bytes)


def copying_seconds(device: Device, nbytes: float) -> float:
    """Seconds to copy a tensor, into a bucket or out of it, or to make its shards contiguous."""
    return 2.0 * nbytes / device.memory_bandwidth
