"""The pipeline stages of a plan: what each holds, computes and sends.

Figures come from the plan's lines and its pipeline, so they are those with which the plan was priced.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from autopar.ir.plan_record import PlanRecord
from autopar.ir.staged_graph import Edge

from .module_tree import numbers, readable
from .quantities import size


@dataclass(frozen=True)
class Sent:
    """The message that one chunk sends to another for one microbatch. ``names``: its values, the largest first;
    ``place``: the placement of the first; ``bytes`` that one rank sends; ``seconds`` of all microbatches."""

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
    ``compute`` and ``comm`` those of a step (``comm``: collectives inside the stage). ``peak``: bytes on each of its
    devices. ``modules``: the modules it holds, by chunk. ``sent``: its messages, whose source and target are stages,
    not chunks."""

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
    """Every stage of a plan. A plan without a pipeline has one stage that holds everything."""
    modules = modules_of_chunks(plan)
    return tuple(_stage_row(plan, stage, modules) for stage in range(plan.stages))


def _stage_row(plan: PlanRecord, stage: int, modules: Mapping[int, tuple[str, ...]]) -> StageRow:
    lines = [line for line in plan.lines if line.stage == stage]
    compute = sum(line.seconds for line in lines if line.kind in ("compute", "optimizer"))
    each = [line for line in lines if line.kind in ("compute", "exchange", "reshard", "weight")]
    per_phase = {
        phase: sum(line.seconds / line.times for line in each if line.phase == phase)
        for phase in ("forward", "backward")
    }
    chunks = plan.pipeline.schedule.held[stage] if plan.pipeline else (0,)
    return StageRow(
        stage=stage,
        ranks=ranks_of(plan, stage),
        modules=tuple(modules.get(chunk, ()) for chunk in chunks),
        forward=per_phase["forward"],
        backward=per_phase["backward"],
        compute=compute,
        comm=sum(line.seconds for line in lines) - compute,
        peak=plan.pipeline.peaks[stage] if plan.pipeline else plan.predicted.peak_bytes,
        sent=tuple(message for message in sends(plan) if message.source == stage),
    )


def ranks_of(plan: PlanRecord, stage: int) -> tuple[int, int]:
    """The first and the last rank of a stage."""
    ranks = plan.stage_meshes.ranks(stage)
    return ranks.start, ranks.stop - 1


def mesh_of_parameter(plan: PlanRecord, path: str) -> tuple[int, ...]:
    """The mesh inside the stage that updates a parameter."""
    lines = plan.lines_by_name.get(plan.parameter_nodes.get(path, ""), ())
    stage = next((line.stage for line in lines if line.kind == "optimizer"), None)
    return plan.mesh if stage is None else plan.stage_meshes.meshes[stage]


def busiest_stage(plan: PlanRecord) -> int:
    """The stage whose lines take longest in sum. ``predicted`` gives its compute, communication and bubble."""
    totals = [0.0] * plan.stages
    for line in plan.lines:
        totals[line.stage] += line.seconds
    return max(range(plan.stages), key=totals.__getitem__)


def fullest_stage(plan: PlanRecord) -> int:
    """The stage with the highest memory peak, which ``predicted`` and ``holdings`` describe."""
    peaks = plan.pipeline.peaks if plan.pipeline else ()
    return max(range(len(peaks)), key=peaks.__getitem__, default=0)


def sends(plan: PlanRecord) -> tuple[Sent, ...]:
    """The messages between stages, by source and target."""
    if plan.pipeline is None:
        return ()
    pipeline, placement = plan.pipeline, plan.pipeline.schedule.placement
    groups: dict[tuple[int, int], list[Edge]] = {}
    for edge in sorted(pipeline.wires):
        if placement[edge.source] != placement[edge.target]:
            groups.setdefault((edge.source, edge.target), []).append(edge)
    links = {(link.source, link.target): link for link in pipeline.link_figures}
    messages = []
    for (source, target), edges in groups.items():
        edges.sort(key=lambda edge: -pipeline.wire_bytes[edge])
        total = sum(pipeline.wire_bytes[edge] for edge in edges)
        link = links[min(source, target), max(source, target)]
        messages.append(
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
    return tuple(messages)


@dataclass
class _Tree:
    """Modules with the chunks in which their forward runs."""

    chunks: set[int] = field(default_factory=set)
    own: set[int] = field(default_factory=set)
    children: dict[str, _Tree] = field(default_factory=dict)


def modules_of_chunks(plan: PlanRecord) -> dict[int, tuple[str, ...]]:
    """For each chunk, the largest modules whose forward runs entirely in it, in order. A module that is cut apart
    appears as ``(part)`` where its own operations, outside its submodules, run."""
    root = _Tree()
    for module, chunk in _forward_places(plan):
        node = root
        node.chunks.add(chunk)
        for part in filter(None, module.split(".")):
            node = node.children.setdefault(part, _Tree())
            node.chunks.add(chunk)
        node.own.add(chunk)
    modules: defaultdict[int, list[str]] = defaultdict(list)
    _collect(root, "", modules)
    return {chunk: tuple(names) for chunk, names in modules.items()}


def _collect(tree: _Tree, path: str, modules: defaultdict[int, list[str]]) -> None:
    for name, child in tree.children.items():
        below = f"{path}.{name}" if path else name
        if len(child.chunks) == 1:
            modules[next(iter(child.chunks))].append(below)
        else:
            _collect(child, below, modules)
    for chunk in sorted(tree.own) if path else ():
        if len(tree.chunks) > 1:
            modules[chunk].append(f"{path} (part)")
    if not path:
        for chunk in sorted(tree.own):
            if not modules[chunk]:
                modules[chunk].append("(model itself)")


def _forward_places(plan: PlanRecord) -> Iterator[tuple[str, int]]:
    """(module, chunk) of every forward computation, in order. Copies for other chunks are left out."""
    cuts = set(plan.pipeline.cuts) if plan.pipeline else set()
    chunk = 0
    for name, node in plan.nodes.items():
        chunk += name in cuts
        if any(line.kind == "compute" and line.phase == "forward" for line in plan.lines_by_name.get(name, ())):
            yield node.module, chunk


def folded_modules(modules: Iterable[str]) -> str:
    """``embed, layers.{0..3}``: the names of modules, with the numbers of equal paths joined."""
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
        f"{stem}{'.' if stem else ''}{numbers(list(dict.fromkeys(layers)))}{tail}" if layers else stem
        for (stem, tail), layers in groups.items()
    )


def mesh_text(plan: PlanRecord) -> str:
    """``pp=2, dp=2``: the axis of stages, then the axes inside a stage, unless a stage has only one device. Of unequal
    stages each axis has its size in every one of them: ``pp=2, dp=1+3``."""
    meshes = plan.stage_meshes
    several = [plan.mesh] if meshes.are_equal else meshes.meshes
    sizes = ["+".join(map(str, each)) for each in zip(*several, strict=True)]
    inner = [f"{name}={n}" for name, n in zip(plan.axis_names, sizes, strict=True)]
    if plan.stages == 1:
        return ", ".join(inner)
    return ", ".join([f"pp={plan.stages}", *(inner if math.prod(plan.mesh) > 1 else ())])


def rows_text(plan: PlanRecord) -> str:
    """Which device has how many rows where shares are unequal: ``dp: 6+2 of 8 rows``; empty where they are equal."""
    rows = plan.batch // plan.microbatches
    of_axes = [
        f"{name}: {'+'.join(str(rows * each // sum(shares)) for each in shares)} of {rows} rows"
        for name, shares in zip(plan.axis_names, plan.shares, strict=False)
        if shares
    ]
    return ", ".join(of_axes) + (" of a microbatch" if of_axes and plan.microbatches > 1 else "")


def device_memory_text(plan: PlanRecord) -> str:
    """What each device holds at its peak, of what it may hold, where these differ: ``rank 0: 2.1 of 4.0 GiB``."""
    ranks: dict[tuple[int, int], list[str]] = {}
    for rank, held in enumerate(zip(plan.device_peaks, plan.device_limits, strict=True)):
        ranks.setdefault(held, []).append(str(rank))
    return " · ".join(
        f"rank{'s' if len(own) > 1 else ''} {numbers(own)}: {size(peak)} of {size(limit)}"
        for (peak, limit), own in ranks.items()
    )


def stages_holding(plan: PlanRecord, names: Iterable[str]) -> tuple[int, ...]:
    """The stages that compute one of ``names``; if none does, those that compute a node that reads one of them."""
    wanted = set(names)
    stages = {line.stage for name in wanted for line in plan.lines_by_name.get(name, ()) if line.kind == "compute"}
    if not stages:
        users = {name for name, node in plan.nodes.items() if wanted.intersection(node.operands)}
        stages = {line.stage for name in users for line in plan.lines_by_name.get(name, ()) if line.kind == "compute"}
    return tuple(sorted(stages))
