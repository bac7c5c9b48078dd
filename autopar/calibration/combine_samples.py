"""Combines the figures of several rounds, or of several processes, into one set."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from .measure_device import AttentionSample, DeviceSamples, MatrixSample, lower_quartile
from .samples import FIGURES, STEPS, TIMES, CollectiveSample, Samples

Summary = Callable[[Sequence[float]], float]
_Sample = TypeVar("_Sample", MatrixSample, AttentionSample, CollectiveSample)


def undisturbed(rounds: Sequence[Samples]) -> Samples:
    """Combines the rounds of one process. Other load on the machine only adds to times, and affects some rounds and not
    others, so of times of single operations the lower quartile counts. Of work like a step the median counts, to which
    the others are then fitted: steps take what they usually take. So it does of differences and ratios."""
    return combined(rounds, lower_quartile, statistics.median, statistics.median)


def mean(processes: Sequence[Samples]) -> Samples:
    """Averages what several processes measured at once."""
    return combined(processes, statistics.fmean, statistics.fmean, statistics.median)


def mean_device(devices: Sequence[DeviceSamples]) -> DeviceSamples:
    """Averages what several processes measured of their devices at once."""
    return _device(devices, statistics.fmean)


def combined(samples: Sequence[Samples], times: Summary, steps: Summary, figures: Summary) -> Samples:
    """Combines each time in ``samples`` by ``times``, what was measured of work like a step by ``steps``, and each
    figure derived from times by ``figures``."""
    summaries = {name: figures([getattr(s, name) for s in samples]) for name in FIGURES}
    summaries |= {name: steps([getattr(s, name) for s in samples]) for name in STEPS}
    summaries |= {name: times([getattr(s, name) for s in samples]) for name in TIMES}
    return Samples(_device([s.device for s in samples], times), _collectives(samples, times), **summaries)


def _device(devices: Sequence[DeviceSamples], times: Summary) -> DeviceSamples:
    attended = [d.attention for d in devices] if all(d.attention for d in devices) else []
    return DeviceSamples(
        launch=times([d.launch for d in devices]),
        view=times([d.view for d in devices]),
        matrices=tuple(_combined(same, times) for same in zip(*(d.matrices for d in devices), strict=True)),
        pointwise=tuple(
            (same[0][0], times([seconds for _, seconds in same]))
            for same in zip(*(d.pointwise for d in devices), strict=True)
        ),
        attention=tuple(_combined(same, times) for same in zip(*attended, strict=True)),
        function=times([d.function for d in devices]),
        share=times([d.share for d in devices]),
        host=times([d.host for d in devices]),
        masked=times([d.masked for d in devices]),
    )


def _collectives(samples: Sequence[Samples], times: Summary) -> tuple[CollectiveSample, ...]:
    """Combines the collectives that all samples have. On a slow link the largest messages are left out."""
    tables = [{(c.kind, c.members, c.nbytes): c for c in s.collectives} for s in samples]
    common = [key for key in tables[0] if all(key in table for table in tables)]
    return tuple(_combined([table[key] for table in tables], times) for key in common)


def _combined(same: Sequence[_Sample], times: Summary) -> _Sample:
    return replace(same[0], seconds=times([s.seconds for s in same]))
