"""The paths that a plan says reshards take.

Which of several ways is quickest depends on the cluster: where an all-reduce is slow, a reduce-scatter and an
all-gather replace it. What runs is what the plan was priced with, also on another cluster than it was made for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.ir.node import TensorType
from autopar.ir.placements import Placements, parse_placements, short
from autopar.ir.plan_record import PlanLine, PlanRecord, ReshardStep
from autopar.ir.reshard import Hop, Sent, make_hop

Steps = tuple[ReshardStep, ...]


@dataclass(frozen=True, eq=False)
class PlannedWays:
    """The different ``steps`` of a plan between each two placements, by how a tensor is sent between them, on ``mesh``.
    Those of several types of tensors are told apart by their bytes."""

    mesh: tuple[int, ...] = ()
    steps: dict[tuple[str, str, Sent], dict[Steps, None]] = field(default_factory=dict)
    _found: dict[tuple[TensorType, Placements, Placements, Sent], tuple[Hop, ...]] = field(default_factory=dict)

    @staticmethod
    def of(plan: PlanRecord, mesh: tuple[int, ...], chunks: Sequence[int] = ()) -> PlannedWays:
        """Those of the stages that have ``chunks`` (none: of all), inside of which devices have ``mesh``."""
        ways = PlannedWays(mesh)
        placement = plan.pipeline.schedule.placement if plan.pipeline else ()
        stages = {placement[chunk] for chunk in chunks} or range(plan.stages)
        for line in plan.lines:
            # A line of no seconds is a result that overlaps backward: it takes a single hop in any case.
            if line.steps and line.seconds and line.stage in stages and (sent := _sent(line)):
                ends = line.steps[0].source, line.steps[-1].target
                ways.steps.setdefault((*ends, sent), {})[line.steps] = None
        return ways

    def path(self, kind: TensorType, source: Placements, target: Placements, sent: Sent) -> tuple[Hop, ...]:
        """The planned hops from ``source`` to ``target`` of a tensor of this type; none if the plan has no such
        reshard."""
        if not self.steps:
            return ()
        key = kind, source, target, sent
        if key not in self._found:
            listed = self.steps.get((short(source), short(target), sent), ())
            paths = (_hops(kind, steps, self.mesh) for steps in listed)
            self._found[key] = next(filter(None, paths), ())
        return self._found[key]


def _sent(line: PlanLine) -> Sent | None:
    """How the tensor of a line is sent; None if the line moves none."""
    if line.kind in ("gradient", "refresh"):
        return "bucketed"
    if line.kind == "weight":
        return "forward" if line.phase == "forward" else "backward"
    return "alone" if line.kind == "reshard" else None


def _hops(kind: TensorType, steps: Steps, mesh: tuple[int, ...]) -> tuple[Hop, ...]:
    """``steps`` of a tensor of type ``kind``; none if they are those of another type."""
    hops = []
    for step in steps:
        hop = make_hop(kind, parse_placements(step.source), parse_placements(step.target), mesh)
        if hop is None or (hop.kind, hop.axes) != (step.kind, step.axes):
            return ()
        if step.bytes != (hop.collective.bytes if hop.collective else 0):
            return ()
        hops.append(hop)
    return tuple(hops)
