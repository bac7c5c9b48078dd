"""Finds mesh axes that a plan leaves idle: along them, all devices compute the same."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping

from autopar.ir.placements import REPLICATE, is_shard
from autopar.ir.plan_record import PlanLine, PlanRecord, Predicted

from .quantities import duration

# An axis is idle if at least this share of the computation is the same on all its devices. Operations that cost next to
# nothing, such as slices, may still be sharded.
# Chosen, not measured.
MOSTLY = 0.9
# The share from which on people are told that it is all of the computation. Chosen: it is what rounds to 100%.
ALL = 0.995


def idle_devices(plan: PlanRecord, priced: Mapping[str, Predicted | None]) -> Iterator[str]:
    """Yields one sentence for people if devices of ``plan`` compute the same. ``priced`` are baselines by name."""
    axes = idle_axes(plan)
    if not axes:
        return
    count = math.prod(plan.mesh[axis] for axis in axes)
    names = " and ".join(plan.axis_names[axis] for axis in axes)
    where = f"ax{'is' if len(axes) == 1 else 'es'} {names}{' of each stage' if plan.stages > 1 else ''}"
    # Sources of prices that were not measured name this command.
    measures = "autopar calibrate" in plan.cluster_source
    advice = "; prices were not measured here, run `autopar calibrate` and plan again" if measures else ""
    share = min(_alike(plan, axis) for axis in axes)
    what = "all compute the same" if share > ALL else f"spend {share:.0%} of their computing on the same"
    yield (
        f"the {count} devices along {where} {what}: {_reason(plan, priced)}; fewer processes would do as well, and a "
        f"larger batch or model could use them{advice}"
    )


def legend(texts: Iterable[str]) -> str:
    """What autopar's names of axes mean such as ``idle0=2``, if there are any in ``texts``; otherwise empty."""
    names = sorted({name for text in texts for name in re.findall(r"\b(idle\d*)=(?!1\b)", text)})
    axes = "axes" if len(names) > 1 else "an axis"
    return f"{', '.join(names)}: {axes} whose devices compute the same as each other, or nearly" if names else ""


def idle_axes(plan: PlanRecord, share: float = MOSTLY) -> tuple[int, ...]:
    """The axes of several devices along which at least a ``share`` of the computation is the same on all devices. An
    axis that shards most parameters is not idle: it serves to save memory. Names of axes do not count: they may be the
    user's."""
    several = (axis for axis, size in enumerate(plan.mesh) if size > 1)
    return tuple(axis for axis in several if not _saves_memory(plan, axis) and _alike(plan, axis) >= share)


def divides_nothing(plan: PlanRecord) -> bool:
    """Whether each of several devices computes the whole step."""
    several = sum(size > 1 for size in plan.mesh)
    return plan.stages == 1 and several > 0 and len(idle_axes(plan, ALL)) == several


def _saves_memory(plan: PlanRecord, axis: int) -> bool:
    """Whether ``axis`` shards most parameters."""
    sharded = sum(is_shard(place.optimizer[axis]) for place in plan.parameters.values())
    return 2 * sharded > len(plan.parameters)


def _alike(plan: PlanRecord, axis: int) -> float:
    """The share of the compute seconds that is spent on the same work on all devices along ``axis``; 0 if there is no
    computation."""
    # Agreeing on the loss scale and recomputed operations have no node of their own.
    kinds = {"compute": plan.strategies, "optimizer": plan.nodes}
    several = {stage for stage, mesh in enumerate(plan.stage_meshes.meshes) if mesh[axis] > 1}
    lines = [line for line in plan.lines if line.name in kinds.get(line.kind, ()) and line.stage in several]
    known: dict[int, bool] = {}  # By the identity of a strategy, which equal layers share.
    alike = sum(line.seconds for line in lines if not _is_divided(plan, line, axis, known))
    total = sum(line.seconds for line in lines)
    return alike / total if total else 0.0


def _is_divided(plan: PlanRecord, line: PlanLine, axis: int, known: dict[int, bool]) -> bool:
    if line.kind == "optimizer":
        return is_shard(plan.parameters[plan.nodes[line.name].target].optimizer[axis])
    strategy = plan.strategies[line.name]
    if id(strategy) not in known:
        # Partial sums are of other parts on each device.
        known[id(strategy)] = any(places[axis] != REPLICATE for places in (*strategy.inputs, *strategy.outputs))
    return known[id(strategy)]


def _reason(plan: PlanRecord, priced: Mapping[str, Predicted | None]) -> str:
    other, seconds = priced.get("data parallel"), plan.predicted.step_seconds
    if plan.pinned:
        return "nothing quicker was found under these pins"
    if plan.layout:
        return "nothing quicker was found under this layout"
    if other is None or other.step_seconds <= seconds:
        return "for this model and batch nothing quicker was found"
    figures = f"data parallel is priced at {duration(other.step_seconds)} against {duration(seconds)}"
    return f"for this model and batch an exchange costs more than it saves ({figures})"
