"""The pipeline stages of a plan as people ask for them: what each holds, takes and sends.

Figures come from the plan's lines and its pipeline, so that they are those the plan was priced with.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from autopar.ir.plan_record import PlanRecord
from autopar.ir.staged_graph import Edge

from .module_tree import numbers, readable


@dataclass(frozen=True)
class Sent:
    """What one chunk sends another for one microbatch: ``names`` of values, the largest first, whose ``place`` is that
    of the first; ``bytes`` that one rank sends; ``seconds`` of all microbatches."""

    source: int
    target: int
    phase: str
    names: tuple[str, ...]
    place: str
    bytes: int
    seconds: float


@dataclass(frozen=True)
class StageRow:
    """One pipeline stage. ``forward`` and ``backward`` are seconds of one microbatch through all of its chunks,
    ``compute`` and ``comm`` of a step (``comm``: collectives inside the stage); ``peak`` bytes on each of its devices;
    ``modules`` what it holds, by chunk. ``sent`` counts stages, not chunks, as source and target."""

    stage: int
    ranks: tuple[int, int]
    modules: tuple[tuple[str, ...], ...]
    forward: float
    backward: float
    compute: float
    comm: float
    peak: int
    sent: tuple[Sent, ...]

    @property
    def busy(self) -> float:
        return self.compute + self.comm


def stage_rows(plan: PlanRecord) -> tuple[StageRow, ...]:
    """Every stage of a plan; one that holds everything if the plan has no pipeline."""
    held = modules_of_chunks(plan)
    return tuple(_stage_row(plan, stage, held) for stage in range(plan.stages))


def _stage_row(plan: PlanRecord, stage: int, held: Mapping[int, tuple[str, ...]]) -> StageRow:
    lines = [line for line in plan.lines if line.stage == stage]
    compute = sum(line.seconds for line in lines if line.kind in ("compute", "optimizer"))
    each = [line for line in lines if line.kind in ("compute", "reshard", "weight")]
    per_phase = {
        phase: sum(line.seconds / line.times for line in each if line.phase == phase)
        for phase in ("forward", "backward")
    }
    chunks = plan.pipeline.schedule.held[stage] if plan.pipeline else (0,)
    return StageRow(
        stage=stage,
        ranks=ranks_of(plan, stage),
        modules=tuple(held.get(chunk, ()) for chunk in chunks),
        forward=per_phase["forward"],
        backward=per_phase["backward"],
        compute=compute,
        comm=sum(line.seconds for line in lines) - compute,
        peak=plan.pipeline.peaks[stage] if plan.pipeline else plan.predicted.peak_bytes,
        sent=tuple(one for one in sends(plan) if one.source == stage),
    )


def ranks_of(plan: PlanRecord, stage: int) -> tuple[int, int]:
    """The first and the last rank of a stage."""
    size = math.prod(plan.mesh)
    return stage * size, (stage + 1) * size - 1


def busiest_stage(plan: PlanRecord) -> int:
    """The stage whose lines take longest in sum: its step is ``predicted`` computing, communicating and bubble."""
    totals = [0.0] * plan.stages
    for line in plan.lines:
        totals[line.stage] += line.seconds
    return max(range(plan.stages), key=totals.__getitem__)


def fullest_stage(plan: PlanRecord) -> int:
    """The stage whose memory ``predicted`` and ``holdings`` are."""
    peaks = plan.pipeline.peaks if plan.pipeline else ()
    return max(range(len(peaks)), key=peaks.__getitem__, default=0)


def sends(plan: PlanRecord) -> tuple[Sent, ...]:
    """What is sent between stages, by source and target."""
    if plan.pipeline is None:
        return ()
    pipeline, placement = plan.pipeline, plan.pipeline.schedule.placement
    groups: dict[tuple[int, int], list[Edge]] = {}
    for edge in sorted(pipeline.wires):
        if placement[edge.source] != placement[edge.target]:
            groups.setdefault((edge.source, edge.target), []).append(edge)
    links = {(link.source, link.target): link for link in pipeline.link_figures}
    found = []
    for (source, target), edges in groups.items():
        edges.sort(key=lambda edge: -pipeline.wire_bytes[edge])
        total = sum(pipeline.wire_bytes[edge] for edge in edges)
        link = links[min(source, target), max(source, target)]
        found.append(
            Sent(
                source=placement[source],
                target=placement[target],
                phase=edges[0].phase,
                names=tuple(edge.name for edge in edges),
                place=readable(pipeline.wires[edges[0]]),
                bytes=total,
                seconds=link.seconds(total) * plan.microbatches,
            )
        )
    return tuple(found)


@dataclass
class _Tree:
    """Modules with the chunks in which their forward runs."""

    chunks: set[int] = field(default_factory=set)
    own: set[int] = field(default_factory=set)
    children: dict[str, _Tree] = field(default_factory=dict)


def modules_of_chunks(plan: PlanRecord) -> dict[int, tuple[str, ...]]:
    """For each chunk the largest modules whose forward runs wholly in it, in order; one that is cut apart is named with
    ``(part)`` for what belongs to none of its parts."""
    root = _Tree()
    for module, chunk in _forward_places(plan):
        node = root
        node.chunks.add(chunk)
        for part in filter(None, module.split(".")):
            node = node.children.setdefault(part, _Tree())
            node.chunks.add(chunk)
        node.own.add(chunk)
    found: defaultdict[int, list[str]] = defaultdict(list)
    _collect(root, "", found)
    return {chunk: tuple(names) for chunk, names in found.items()}


def _collect(tree: _Tree, path: str, found: defaultdict[int, list[str]]) -> None:
    for name, child in tree.children.items():
        below = f"{path}.{name}" if path else name
        if len(child.chunks) == 1:
            found[next(iter(child.chunks))].append(below)
        else:
            _collect(child, below, found)
    for chunk in sorted(tree.own) if path else ():
        if len(tree.chunks) > 1:
            found[chunk].append(f"{path} (part)")
    if not path:
        for chunk in sorted(tree.own):
            if not found[chunk]:
                found[chunk].append("(model itself)")


def _forward_places(plan: PlanRecord) -> Iterator[tuple[str, int]]:
    """(module, chunk) of every forward computation, in order. Copies for other chunks do not count."""
    cuts = set(plan.pipeline.cuts) if plan.pipeline else set()
    chunk = 0
    for name, node in plan.nodes.items():
        chunk += name in cuts
        if any(line.kind == "compute" and line.phase == "forward" for line in plan.lines_by_name.get(name, ())):
            yield node.module, chunk


def folded_modules(modules: Iterable[str]) -> str:
    """``embed, layers.{0..3}``: names with the numbers of neighbours together."""
    groups: dict[tuple[str, str], list[str]] = {}
    for module in modules:
        parts = module.split(".")
        at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if at is None:
            groups[module, ""] = []
        else:
            tail = "".join(f".{part}" for part in parts[at + 1 :])
            groups.setdefault((".".join(parts[:at]), tail), []).append(parts[at])
    return ", ".join(
        f"{stem}{'.' if stem else ''}{numbers(list(dict.fromkeys(found)))}{tail}" if found else stem
        for (stem, tail), found in groups.items()
    )


def mesh_text(plan: PlanRecord) -> str:
    """``pp=2, dp=2``: the axis of stages, then those inside a stage; those of one device are left out."""
    inner = [f"{name}={n}" for name, n in zip(plan.axis_names, plan.mesh, strict=True)]
    if plan.stages == 1:
        return ", ".join(inner)
    return ", ".join([f"pp={plan.stages}", *(inner if math.prod(plan.mesh) > 1 else ())])


def stages_holding(plan: PlanRecord, names: Iterable[str]) -> tuple[int, ...]:
    """The stages whose cost breakdown has a computation of one of ``names``, or of what takes them."""
    wanted = set(names)
    found = {line.stage for name in wanted for line in plan.lines_by_name.get(name, ()) if line.kind == "compute"}
    if not found:
        users = {name for name, node in plan.nodes.items() if wanted.intersection(node.operands)}
        found = {line.stage for name in users for line in plan.lines_by_name.get(name, ()) if line.kind == "compute"}
    return tuple(sorted(found))
