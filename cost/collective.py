"""Seconds of a collective over axes of a mesh: alpha-beta per level of links, hierarchical where a group
spans several.

Sizes are as in nccl-tests: ``nbytes`` is the full tensor of the group (all-gather output, reduce-scatter
input, all-reduce tensor; for all-to-all the number of devices times what each holds).

A group of N devices has ``f_l`` members (the *fan-out*) joined by links of level l; f_0 f_1 ... = N. It works
level by level: a reduce-scatter reduces inside a node first, so that only 1/f_0 of the tensor crosses the
slow link, an all-gather is the mirror image, an all-reduce is one after the other (Thakur et al. 2005; NCCL's
trees and rings move the same traffic). With ``F_l = f_0 ... f_{l-1}``, each device of level l takes

==================  ===============================  ==========================================
kind                steps                            bytes sent by each device
==================  ===============================  ==========================================
all_gather          log2 f_l                         (f_l - 1) / f_l   x nbytes / F_l
reduce_scatter      log2 f_l                         (f_l - 1) / f_l   x nbytes / F_l
all_reduce          2 log2 f_l                       2 (f_l - 1) / f_l x nbytes / F_l
all_to_all          log2 f_l                         (f_l - 1) F_l / N x nbytes / N
==================  ===============================  ==========================================

and the price is ``collective_seconds + synchronisation_seconds + sum_l max over rates of (latency x steps + bytes /
bandwidth)``.

Steps are counted log2 (trees, recursive halving and doubling) and rates combine by max: this makes one
collective over two axes never dearer than two over one axis each, and one of two tensors together never
dearer than one for each, so that a solver finds no gain in splitting that the hardware would not show. A rate
with ``growth`` g above 1 counts (log2 f_l)^g steps; it describes links where splitting does pay.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from autopar.cluster import Cluster, Link
from autopar.errors import OptionsError
from autopar.program import COLLECTIVES

# Per level the lines (seconds, seconds per byte of the full tensor) of which the largest counts.
Lines = tuple[tuple[float, float], ...]


def check_mesh(cluster: Cluster, mesh: tuple[int, ...]) -> None:
    """Raises :class:`OptionsError` if ``mesh`` has more devices than ``cluster``, or an axis without
    devices."""
    devices = math.prod(mesh)
    if any(size < 1 for size in mesh):
        raise OptionsError(f"mesh {mesh} has an axis without devices")
    if cluster.size is not None and devices > cluster.size:
        raise OptionsError(f"mesh {mesh} needs {devices} devices; cluster {cluster.name!r} has {cluster.size}")


@lru_cache(maxsize=1 << 12)
def fan_out(cluster: Cluster, mesh: tuple[int, ...], axes: tuple[int, ...]) -> tuple[float, ...]:
    """Members each link level joins, innermost first, for the groups of devices that differ only along
    ``axes``.

    Ranks are row-major in ``mesh``. Groups that lie unlike each other are priced as the most spread one; a
    group cut unevenly by a level counts its average (fan-outs need not be whole). Raises
    :class:`OptionsError`.

    >>> fan_out(Cluster.get("dgx-a100-80gb"), (8, 8), (0,))
    (1.0, 8.0)
    >>> fan_out(Cluster.get("dgx-a100-80gb"), (8, 8), (0, 1))
    (8.0, 8.0)
    """
    check_mesh(cluster, mesh)
    if len(set(axes)) != len(axes) or any(not 0 <= axis < len(mesh) for axis in axes):
        raise OptionsError(f"axes {axes} are not distinct axes of the mesh {mesh}")
    ranks = np.arange(math.prod(mesh)).reshape(mesh)
    members = math.prod(mesh[axis] for axis in axes)
    groups = np.moveaxis(ranks, axes, range(-len(axes), 0)).reshape(-1, members)
    found, inside = [], members
    for link in cluster.links:
        blocks = 1 if link.size is None else _most_blocks(groups // link.size)
        found.append(inside / blocks)
        inside = blocks
    return tuple(found)


def _most_blocks(blocks: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> int:
    """The largest number of distinct values in a row."""
    rows = np.sort(blocks, axis=1)
    return int((np.diff(rows, axis=1) != 0).sum(axis=1).max(initial=0)) + 1


def steps(kind: str, fan: float, growth: float = 1.0) -> float:
    """How many latencies a collective of that kind takes among ``fan`` devices."""
    return math.pow(math.log2(fan), growth) * (2.0 if kind == "all_reduce" else 1.0)


def traffic(kind: str, fan: float, inner: float = 1.0, members: float | None = None) -> float:
    """Bytes each device sends at one level per byte of the full tensor: ``fan`` devices joined there,
    ``inner`` of the ``members`` of the group (by default all of them) below each."""
    if kind == "all_to_all":
        members = members or fan * inner
        return (fan - 1.0) * inner / members / members
    share = (fan - 1.0) / fan / inner
    return 2.0 * share if kind == "all_reduce" else share


def _level_lines(link: Link, kind: str, fan: float, inner: float, members: float) -> Lines:
    share = traffic(kind, fan, inner, members)
    return tuple((rate.latency * steps(kind, fan, rate.growth), share / rate.bandwidth) for rate in link.lines(kind))


@lru_cache(maxsize=1 << 14)
def _route(cluster: Cluster, mesh: tuple[int, ...], kind: str, axes: tuple[int, ...]) -> tuple[Lines, ...]:
    """The lines of every level the group uses; none for a group of one device."""
    if kind not in COLLECTIVES:
        raise OptionsError(f"{kind!r} is not a collective; one of {', '.join(COLLECTIVES)}")
    fans = fan_out(cluster, mesh, axes)
    members, inner, found = math.prod(fans), 1.0, []
    for link, fan in zip(cluster.links, fans, strict=True):
        if fan > 1.0:
            found.append(_level_lines(link, kind, fan, inner, members))
        inner *= fan
    return tuple(found)


def collective_seconds(
    cluster: Cluster, mesh: tuple[int, ...], kind: str, axes: tuple[int, ...], nbytes: float
) -> float:
    """Seconds of one collective on ``mesh`` (a shape) over ``axes`` together; 0 for a group of one device.

    ``nbytes`` is the full tensor of a group, see the module docstring. Raises :class:`OptionsError`.
    """
    route = _route(cluster, mesh, kind, axes)
    if not route:
        return 0.0
    total = cluster.collective_seconds + cluster.synchronisation_seconds
    for lines in route:
        total += max([fixed + slope * nbytes for fixed, slope in lines])
    return total


def bucketed_seconds(
    cluster: Cluster,
    mesh: tuple[int, ...],
    kind: str,
    axes: tuple[int, ...],
    nbytes: float,
    bucket_bytes: float,
) -> float:
    """Seconds of ``nbytes`` as its share of a collective of ``bucket_bytes``: the traffic in full, of what does not
    depend on size ``nbytes / bucket_bytes``; a tensor larger than the bucket goes alone."""
    if nbytes >= bucket_bytes:
        return collective_seconds(cluster, mesh, kind, axes, nbytes)
    return nbytes / bucket_bytes * collective_seconds(cluster, mesh, kind, axes, bucket_bytes)
