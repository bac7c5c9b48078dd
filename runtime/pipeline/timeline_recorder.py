"""Measures the seconds of actions, in the form of simulated steps (:mod:`autopar.schedule.timeline`)."""

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
    """Records the spans of one rank in one step. Computations begin when their inputs have arrived; waiting for a
    message is a span of its receive, in the lane ``communication``, as are sends (only their start) and reductions. On
    devices that compute asynchronously each span synchronises, which slows the step down."""

    stages: StageGroups
    spans: list[Span] = field(default_factory=list)
    begin: float = 0.0

    def start(self) -> None:
        """Begins a step; time 0 is when the first stage begins, by the hosts' clocks. Collective."""
        first = torch.tensor([time.time()], dtype=torch.float64, device=self.stages.whole.device)
        zero = float(self.stages.everywhere(first, 0))
        self.begin = time.perf_counter() - (time.time() - zero)

    def now(self) -> float:
        """Synchronises the device. Returns the seconds since the step began."""
        device = self.stages.whole.device
        if device.type != "cpu":
            torch.get_device_module(device).synchronize(device)
        return time.perf_counter() - self.begin

    def add(self, action: Action, start: float) -> None:
        """Records that ``action`` ran from ``start`` until now."""
        lane = "compute" if action.computes else "communication"
        self.spans.append(
            Span(self.stages.stage, str(action), action.kind, start, self.now(), lane)  # type: ignore[arg-type]
        )

    def timeline(self, name: str) -> Timeline:
        """The spans of all stages: those of the ranks at this rank's coordinate, or of the first ranks of unequal
        stages. Collective."""
        everything: list[list[Span]] = [self.spans] * len(self.stages.ranks)
        if self.stages.peers is not None:
            dist.all_gather_object(everything, self.spans, group=self.stages.peers)
        if not self.stages.meshes.are_equal:
            everything = [everything[self.stages.peer(stage, 0)] for stage in range(self.stages.count)]
        spans = sorted((s for spans in everything for s in spans), key=lambda s: (s.start, s.rank, s.end))
        return Timeline(self.stages.count, tuple(spans), name=name)
