"""All measurements of one process while a machine is calibrated, as plain numbers."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from .measure_device import AttentionSample, DeviceSamples, MatrixSample

# Fields that are times of single operations, what is measured of work like a step, and differences and ratios of times.
TIMES = ("launch",)
STEPS = ("step", "exchange", "update", "own_step", "own_update")
FIGURES = ("synchronisation", "alone")


@dataclass(frozen=True)
class CollectiveSample:
    """One collective among ``members`` processes took ``seconds``. ``nbytes``: of the full tensor, as in
    :mod:`autopar.cost.collective.collective`."""

    kind: str
    members: int
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Samples:
    """All measurements of one rank. ``synchronisation``: the seconds by which a collective takes longer after
    computation than after another collective. ``alone``: the factor by which the rank computes faster while the others
    wait. The others: see :class:`~autopar.calibration.measure_step.StepSample`."""

    device: DeviceSamples
    collectives: tuple[CollectiveSample, ...]
    synchronisation: float = 0.0
    alone: float = 1.0
    step: float = 0.0
    launch: float = 0.0
    exchange: float = 0.0
    update: float = 0.0
    own_step: float = 0.0
    own_update: float = 0.0

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> Samples:
        table = json.loads(text)
        device = table["device"]
        matrices = tuple(MatrixSample(**sample) for sample in device.pop("matrices"))
        pointwise = tuple((int(nbytes), float(seconds)) for nbytes, seconds in device.pop("pointwise"))
        attention = tuple(AttentionSample(**sample) for sample in device.pop("attention"))
        collectives = tuple(CollectiveSample(**sample) for sample in table["collectives"])
        device_samples = DeviceSamples(matrices=matrices, pointwise=pointwise, attention=attention, **device)
        return Samples(device_samples, collectives, **{name: float(table[name]) for name in (*TIMES, *STEPS, *FIGURES)})
