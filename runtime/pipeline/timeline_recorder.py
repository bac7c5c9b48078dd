"""Measures what the actions of steps take, in the form simulated steps have (:mod:`autopar.schedule.timeline`)."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from autopar.schedule.actions import Action
from autopar.schedule.timeline import Span, Timeline

from .stage_mesh import StageGroups


@dataclass
class Recorder:
    """Records the spans of one rank in one step. Computations last from when what they need is there; what they wait
    for each message is a span of the receive, in the lane ``communication``, as are sends (their start only) and
    reductions. On devices that compute asynchronously every span is waited for, which slows the step down."""

    stages: StageGroups
    spans: list[Span] = field(default_factory=list)
    begin: float = 0.0

    def start(self) -> None:
        """Begins a step: zero is when the first stage does, by the hosts' clocks. Collective."""
        first = torch.tensor([time.time()], dtype=torch.float64, device=self.stages.whole.device)
        zero = float(self.stages.everywhere(first, 0))
        self.begin = time.perf_counter() - (time.time() - zero)

    def now(self) -> float:
        """Seconds since the step began, once the device is done."""
        device = self.stages.whole.device
        if device.type != "cpu":
            torch.get_device_module(device).synchronize(device)
        return time.perf_counter() - self.begin

    def add(self, action: Action, start: float) -> None:
        """``action`` took from ``start`` until now."""
        lane = "compute" if action.computes else "communication"
        self.spans.append(
            Span(self.stages.stage, str(action), action.kind, start, self.now(), lane)  # type: ignore[arg-type]
        )

    def timeline(self, name: str) -> Timeline:
        """What all stages did, as the ranks at this one's coordinate saw it. Collective."""
        everything: list[list[Span]] = [self.spans] * self.stages.count
        if self.stages.peers is not None:
            dist.all_gather_object(everything, self.spans, group=self.stages.peers)
        spans = sorted((s for spans in everything for s in spans), key=lambda s: (s.start, s.rank, s.end))
        return Timeline(self.stages.count, tuple(spans), name=name)
