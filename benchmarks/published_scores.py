"""Scores of predictions: errors, rank correlation within sweeps, best layouts, and what fits."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from benchmarks.emulator.price import Priced

from .published_rows import PublishedCase

# Fewer layouts than these make no sweep.
LEAST = 4
# Measurements that differ by less may be in either order. One layout measured twice differs by up to 1% (Aleph Alpha),
# by 3% as BigScience says of its single steps, by 5% before and after its nodes were mended.
NOISE = (0.01, 0.03, 0.05)


@dataclass(frozen=True)
class Scored:
    """A priced row; ``chosen``: the fields of its layout that it leaves open."""

    name: str
    file: str
    case: PublishedCase
    priced: Priced
    chosen: tuple[str, ...] = ()

    @property
    def predicted(self) -> float:
        """Seconds of the priced step, and of what ran beside it."""
        return self.priced.predicted.step_seconds + self.case.beside_seconds

    @property
    def flops_per_second(self) -> float:
        """FLOP/s of the model per device."""
        return self.priced.flops / self.predicted / self.priced.layout.devices

    @property
    def error(self) -> float | None:
        """Relative error of the step's seconds, positive if predicted too slow."""
        seconds = self.case.seconds
        return None if seconds is None else self.predicted / seconds - 1

    @property
    def is_open(self) -> bool:
        return bool(self.chosen)

    @property
    def choice(self) -> dict[str, Any]:
        """What was chosen for each field left open."""
        return {name: getattr(self.priced.layout, name) for name in self.chosen}

    def line(self) -> str:
        seconds, error = self.case.seconds, self.error
        said = "did not fit" if seconds is None else f"{seconds:9.3f} s published {error:+7.1%}"
        fit = "fits" if self.priced.fits else "too big"
        peak = self.priced.predicted.peak_bytes / 2**30
        row = f"{self.file[:16]:16} {str(self.case.row.get('row', self.name))[:44]:44}"
        chosen = ", ".join(f"{name}={value}" for name, value in self.choice.items())
        return f"{row} {self.predicted:9.3f} s {said} {peak:6.1f} GiB {fit}" + (f"; chosen: {chosen}" if chosen else "")

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.name,
            "row": self.case.row.get("row"),
            "layout": str(self.priced.layout),
            "chosen": self.choice,
            "published_seconds": self.case.seconds,
            "predicted_seconds": self.predicted,
            "error": self.error,
            "predicted_tflops_per_device": self.flops_per_second / 1e12,
            "published_tflops_per_device": self.case.row["measured"].get("tflops_per_gpu"),
            "peak_bytes": self.priced.predicted.peak_bytes,
            "memory_limit": self.priced.memory_limit,
            "fits": self.priced.fits,
            "published_oom": bool(self.case.oom),
            "parts": {**self.priced.parts, "beside": self.case.beside_seconds},
        }


def kendall(pairs: Sequence[tuple[float, float]]) -> float:
    """Kendall's tau-a of (predicted, published) pairs."""
    agree = 0
    for (a, b), (c, d) in combinations(pairs, 2):
        product = (a - c) * (b - d)
        agree += (product > 0) - (product < 0)
    return agree / (len(pairs) * (len(pairs) - 1) / 2)


def kendall_b(pairs: Sequence[tuple[float, float]]) -> float:
    """Kendall's tau-b, in which pairs that are equal in either count for nothing: one layout measured several times."""
    every = list(combinations(pairs, 2))
    unlike = [sum(one[i] != other[i] for one, other in every) for i in (0, 1)]
    return kendall(pairs) * len(every) / math.sqrt(unlike[0] * unlike[1]) if all(unlike) else 0.0


def kendall_apart(pairs: Sequence[tuple[float, float]], noise: float) -> float | None:
    """The share of pairs in the right order less that in the wrong one, of those whose measurements differ by more than
    ``noise``; None if none do."""
    apart = [
        (one, other) for one, other in combinations(pairs, 2) if abs(one[1] - other[1]) > noise * max(one[1], other[1])
    ]
    right = [(a - c) * (b - d) for (a, b), (c, d) in apart]
    return statistics.fmean((x > 0) - (x < 0) for x in right) if right else None


def left_out(scored: Sequence[Scored]) -> dict[str, Any]:
    """The error of each file's rows if the speed of their device were fitted to the other files alone: predictions
    times the median of published over predicted seconds of all rows of that device elsewhere. Devices of one file have
    none, and rows whose layout was chosen are left out."""
    groups: dict[str, dict[str, list[float]]] = {}
    for one in scored:
        if one.case.seconds is not None and not one.is_open:
            files = groups.setdefault(one.case.cluster.device.name, {})
            files.setdefault(one.file, []).append(one.case.seconds / one.predicted)
    found, errors = [], list[float]()
    for device, files in groups.items():
        for file, ratios in files.items():
            others = [ratio for other, more in files.items() if other != file for ratio in more]
            if others:
                factor = statistics.median(others)
                mine = [abs(factor / ratio - 1) for ratio in ratios]
                errors += mine
                named = {"file": file, "device": device, "rows": len(mine), "factor": factor}
                found.append({**named, "mean_absolute_error": statistics.fmean(mine)})
    return {"files": found, "mean_absolute_error": statistics.fmean(errors) if errors else None}


def sweeps(scored: Sequence[Scored]) -> list[list[Scored]]:
    """Rows with a time that measure the same under several layouts."""
    found: dict[object, list[Scored]] = {}
    for one in scored:
        if one.case.seconds is not None:
            found.setdefault((one.file, *one.case.sweep), []).append(one)
    return [rows for rows in found.values() if len(rows) >= LEAST]


def layouts(rows: Sequence[Scored]) -> list[tuple[float, float]]:
    """(predicted, published) seconds of each layout of a sweep: rows that ask one and the same are one layout, measured
    as their median. A layout that was chosen may not be the one that ran: each such row counts by itself."""
    found: dict[object, list[Scored]] = {}
    for one in rows:
        case = one.case
        layout = case.layout if case.space is None else one.priced.layout
        asked = (case.shape, layout, case.cluster)
        found.setdefault(id(one) if one.is_open else asked, []).append(one)
    return [
        (group[0].predicted, statistics.median(one.case.seconds or 0.0 for one in group)) for group in found.values()
    ]


def regret(rows: Sequence[Scored]) -> float:
    """How much slower than the best measured the row was measured that is best by our prices, of those that fit by
    our memory (of all, if none do)."""
    fitting = [one for one in rows if one.priced.fits] or rows
    chosen = min(fitting, key=lambda one: one.predicted)
    best = min(one.case.seconds or 0.0 for one in rows)
    return (chosen.case.seconds or 0.0) / best - 1


def _tau(rows: Sequence[Scored]) -> float | None:
    """Kendall's tau-a of the layouts of a sweep; None if they are too few."""
    pairs = layouts(rows)
    return kendall(pairs) if len(pairs) >= LEAST else None


def summary(scored: Sequence[Scored]) -> dict[str, Any]:
    """Figures of some rows, and of those among them whose layout is wholly given, and of those where it was chosen;
    None where there is nothing to judge."""
    found = sweeps(scored)
    return {
        **_figures(scored),
        "given": _figures([one for one in scored if not one.is_open]),
        "open": _figures([one for one in scored if one.is_open]),
        "sweeps": [
            {
                "rows": len(rows),
                "open": sum(one.is_open for one in rows),
                "layouts": len(layouts(rows)),
                "first": rows[0].name,
                "kendall_tau": _tau(rows),
                "kendall_tau_rows": kendall(_pairs(rows)),
                "best_is_slower_by": regret(rows),
            }
            for rows in found
        ],
    }


def _median_apart(sweeps: Sequence[Sequence[tuple[float, float]]], noise: float) -> float | None:
    """The median over sweeps of :func:`kendall_apart`; None if no sweep has two rows so far apart."""
    found = [tau for tau in (kendall_apart(pairs, noise) for pairs in sweeps) if tau is not None]
    return statistics.median(found) if found else None


def _pairs(rows: Sequence[Scored]) -> list[tuple[float, float]]:
    return [(one.predicted, one.case.seconds or 0.0) for one in rows]


def _figures(scored: Sequence[Scored]) -> dict[str, Any]:
    errors = [one.error for one in scored if one.error is not None]
    found = sweeps(scored)
    pairs = list(map(_pairs, found))
    apiece = [tau for tau in map(_tau, found) if tau is not None]
    telling = {one.file for one in scored if one.case.oom}
    judged = [one for one in scored if one.file in telling]
    right = [one.priced.fits != bool(one.case.oom) for one in judged]
    return {
        "priced": len(scored),
        "timed": len(errors),
        "mean_absolute_error": statistics.fmean(map(abs, errors)) if errors else None,
        "mean_error": statistics.fmean(errors) if errors else None,
        "median_kendall_tau": statistics.median(apiece) if apiece else None,
        "median_kendall_tau_rows": statistics.median(map(kendall, pairs)) if pairs else None,
        "median_kendall_tau_b": statistics.median(map(kendall_b, pairs)) if pairs else None,
        "median_kendall_tau_apart": {str(noise): _median_apart(pairs, noise) for noise in NOISE},
        "median_best_is_slower_by": statistics.median(map(regret, found)) if found else None,
        "ran_but_said_too_big": sum(not one.priced.fits for one in scored if not one.case.oom),
        "fits_judged": len(judged),
        "fits_right": statistics.fmean(right) if right else None,
    }
