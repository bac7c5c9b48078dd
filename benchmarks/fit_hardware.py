"""Fits the constants of presets to published rows: ``python -m benchmarks.fit_hardware [NAME...]`` prints them as TOML.

What is fitted is the very formula plans are priced with: rates of collectives by
:mod:`autopar.cost.collective.algorithms`, efficiency of products by :mod:`autopar.cost.compute.matmul_efficiency`, on
the two thirds of the rows that are not held out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from autopar.calibration.relative_least_squares import Model, least_error
from autopar.cluster.description import Cluster, Device, Link, Rate
from autopar.cost import compute_seconds
from autopar.cost.collective.algorithms import Level, routes
from autopar.solver.problem import Floats

from .hardware_rows import CollectiveRow, ProductRow, collective_rows, dtype_of, product_rows

# Presets that share links or chips are fitted together: (name, rows of GPUs).
LINKS = {
    "A100": ("A100-SXM",),
    "H100, H200": ("H100-SXM", "H200-SXM"),
    "B200": ("B200-SXM",),
    "GB200": ("GB200-NVL72", "GB300-NVL72"),
    "MI300X": ("MI300X",),
}
DEVICES = {"H100, H200": "H100-SXM", "B200": "B200-SXM"}
NVLS = ("H100, H200", "B200", "GB200")


def _model(rows: Sequence[CollectiveRow], kind: str, link: Callable[[Floats], Link]) -> Model:
    """Seconds of all ``rows`` by parameters."""
    members = np.array([row.members for row in rows])
    nbytes = np.array([row.nbytes for row in rows])

    def seconds(parameters: Floats) -> Floats:
        described, found = link(parameters), np.empty(len(rows))
        for count in np.unique(members):
            level, mine = Level(described, float(count), 1.0, 1.0, (float(count),)), members == count
            size = nbytes[mine]
            ways = routes(kind, (level,), ("ring", "tree", "nvls"))
            lines = [phases[0][0] for phases in ways]
            found[mine] = np.min([a + b * size + c * np.sqrt(size) for a, b, c in lines], axis=0)
        return found

    return seconds


def _rates(kind: str, parameters: Floats, ring: Rate | None, nvls: bool) -> tuple[Rate, ...]:
    """``ring`` is what an all-gather was fitted to: an all-reduce by ring or tree has its bandwidth."""
    start, latency, ramp, bandwidth = parameters
    if kind != "all_reduce":
        return (Rate(latency, bandwidth, 1.0, start, ramp),)
    if nvls and ring is not None:
        plain = replace(ring, latency=latency, start=start)
        return plain, Rate(2 * latency, bandwidth, 1.0, start, ramp, "nvls")
    return (Rate(latency, ring.bandwidth if ring else bandwidth, 1.0, start, ramp),)


def fit_link(name: str) -> None:
    """Prints rates of every kind measured on the links of ``name``, and the bandwidth between two devices."""
    rows = [r for r in collective_rows() if r.gpu in LINKS[name] and r.nodes == 1 and not r.held_out]
    pair = _pair_bandwidth(rows)
    print(f"# {name}: pair_bandwidth = {pair:.3g}")
    ring: Rate | None = None
    for kind in ("all_gather", "all_to_all", "all_reduce"):
        mine = [row for row in rows if row.kind == kind]
        nvls = kind == "all_reduce" and name in NVLS
        if len(mine) < 10:
            continue

        def link(p: Floats, kind: str = kind, nvls: bool = nvls, ring: Rate | None = ring) -> Link:
            return Link("", None, 1.0, 0.0, {kind: _rates(kind, p, ring, nvls)}, pair_bandwidth=pair)

        seconds = np.array([row.seconds for row in mine])
        starts = [(1e-5, 1e-6, ramp, bandwidth) for bandwidth in (3e11, 5e11) for ramp in (2e-6, 2e-5)]
        tries = [least_error(_model(mine, kind, link), seconds, start) for start in starts]
        found, error = min(tries, key=lambda pair: pair[1])
        rates = _rates(kind, found, ring, nvls)
        ring = rates[0] if kind == "all_gather" else ring
        for rate in rates:
            print(
                f"{kind} {rate.algorithm}: latency = {rate.latency:.3g}, bandwidth = {rate.bandwidth:.4g}, "
                f"start = {rate.start:.3g}, ramp = {rate.ramp:.3g}  # {error:.1%} of {len(mine)}"
            )


def _pair_bandwidth(rows: Sequence[CollectiveRow]) -> float:
    """What two devices alone reach with their largest tensors, infinite if as much as more devices do."""

    def best(chosen: Sequence[CollectiveRow]) -> float:
        share = {"all_gather": 1.0, "all_reduce": 2.0}
        return max((share[r.kind] * (1 - 1 / r.members) * r.nbytes / r.seconds for r in chosen), default=0.0)

    mine = [row for row in rows if row.kind in ("all_gather",)]
    two = best([row for row in mine if row.members == 2])
    return two if 0 < two < 0.9 * best([row for row in mine if row.members > 2]) else float("inf")


def _products(rows: Sequence[ProductRow], cluster: Callable[[Floats], Cluster]) -> Model:
    def seconds(parameters: Floats) -> Floats:
        described = cluster(parameters)
        found = []
        for row in rows:
            priced, dtype = dtype_of(described, row.dtype)
            work = 2.0 * row.batch * np.prod(row.matrix)
            found.append(compute_seconds(priced, float(work), row.nbytes, dtype, row.matrix))
        return np.array(found)

    return seconds


def fit_device(name: str) -> None:
    """Prints launch, efficiency, tile depth and border of the chip, then what efficiency other dtypes have of it."""
    rows = [row for row in product_rows() if row.gpu == DEVICES[name] and not row.held_out]
    bf16 = [row for row in rows if row.dtype == "bf16"]
    base = bf16[0].cluster

    def cluster(p: Floats) -> Cluster:
        device = replace(
            base.device,
            launch_seconds=p[0],
            tile_depth=p[1],
            matmul_efficiency=min(p[2], 1.0),
            tile_border=p[3],
            dtype_efficiency={},
            sustained=1.0,
        )
        return replace(base, device=device)

    seconds = np.array([row.seconds for row in bf16])
    found, error = least_error(_products(bf16, cluster), seconds, (5e-6, 300, 0.9, 15), 40)
    print(f"# {name}: {error:.1%} of {len(bf16)} bf16 products")
    print(
        f"launch_seconds = {found[0]:.3g}, tile_depth = {found[1]:.4g}, "
        f"matmul_efficiency = {min(found[2], 1.0):.3g}, tile_border = {found[3]:.3g}"
    )
    for dtype in ("tf32", "f8e4m3"):
        mine = [row for row in rows if row.dtype == dtype]
        fitted = cluster(found).device

        def scaled(p: Floats, dtype: str = dtype, fitted: Device = fitted) -> Cluster:
            return replace(base, device=replace(fitted, dtype_efficiency={dtype: p[0]}))

        factor, error = least_error(_products(mine, scaled), np.array([r.seconds for r in mine]), (1.0,), 20)
        print(f"dtype_efficiency.{dtype} = {factor[0]:.3g}  # {error:.1%} of {len(mine)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join({*LINKS, *DEVICES})}; default all")
    chosen = parser.parse_args().names
    for name in LINKS:
        if not chosen or name in chosen:
            fit_link(name)
    for name in DEVICES:
        if not chosen or name in chosen:
            fit_device(name)


if __name__ == "__main__":
    main()
