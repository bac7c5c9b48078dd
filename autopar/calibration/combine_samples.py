"""One set of figures out of those of several rounds, or of several processes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from .measure_device import AttentionSample, DeviceSamples, MatrixSample, lower_quartile
from .samples import FIGURES, TIMES, CollectiveSample, Samples

Summary = Callable[[Sequence[float]], float]
_Sample = TypeVar("_Sample", MatrixSample, AttentionSample, CollectiveSample)


def undisturbed(rounds: Sequence[Samples]) -> Samples:
    """What a process measured in several rounds. Other work on the machine only ever adds to times, and lasts for some
    rounds and not for others, so of these the lower quartile counts; of differences and ratios the median."""
    return combined(rounds, lower_quartile, statistics.median)


def mean(processes: Sequence[Samples]) -> Samples:
    """What several processes measured at once."""
    return combined(processes, statistics.fmean, statistics.median)


def mean_device(devices: Sequence[DeviceSamples]) -> DeviceSamples:
    """What several processes measured of their devices at once."""
    return _device(devices, statistics.fmean)


def combined(samples: Sequence[Samples], times: Summary, figures: Summary) -> Samples:
    """Each time of ``samples`` by ``times``, what was derived from times by ``figures``."""
    found = {name: figures([getattr(s, name) for s in samples]) for name in FIGURES}
    found |= {name: times([getattr(s, name) for s in samples]) for name in TIMES}
    return Samples(_device([s.device for s in samples], times), _collectives(samples, times), **found)


def _device(devices: Sequence[DeviceSamples], times: Summary) -> DeviceSamples:
    return DeviceSamples(
        launch=times([d.launch for d in devices]),
        view=times([d.view for d in devices]),
        matrices=tuple(_one(same, times) for same in zip(*(d.matrices for d in devices), strict=True)),
        pointwise=tuple(
            (same[0][0], times([seconds for _, seconds in same]))
            for same in zip(*(d.pointwise for d in devices), strict=True)
        ),
        attention=tuple(_one(same, times) for same in zip(*(d.attention for d in devices), strict=True)),
        function=times([d.function for d in devices]),
        update=times([d.update for d in devices]),
        share=times([d.share for d in devices]),
    )


def _collectives(samples: Sequence[Samples], times: Summary) -> tuple[CollectiveSample, ...]:
    """Those that all have: on a slow link the largest messages are left out."""
    tables = [{(c.kind, c.members, c.nbytes): c for c in s.collectives} for s in samples]
    common = [key for key in tables[0] if all(key in table for table in tables)]
    return tuple(_one([table[key] for table in tables], times) for key in common)


def _one(same: Sequence[_Sample], times: Summary) -> _Sample:
    return replace(same[0], seconds=times([s.seconds for s in same]))
