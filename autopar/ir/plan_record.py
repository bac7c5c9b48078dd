"""What a plan says, as plain data, and what follows from it alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, TypeVar

from autopar.precision import Precision

from .assignment import Assignment, ParameterPlacement
from .graph_text import parse_type
from .node import RECOMPUTED
from .placements import Placements, Shares, Strategy, shares_of
from .planned_pipeline import PlannedPipeline
from .planned_sync import PlannedSync
from .program import CollectiveKind
from .searched import Searched
from .stage_meshes import Mesh, StageMeshes
from .weight_messages import WeightMessages, filled

Item = TypeVar("Item")
Status = Literal["optimal", "feasible", "fallback"]


@dataclass(frozen=True, slots=True)
class ReshardStep:
    """One hop of a reshard: ``kind`` as in :mod:`autopar.ir.program`, over mesh ``axes`` together; ``bytes`` of the
    full tensor of a group (0 for local steps); ``source`` and ``target`` in short form.
    """

    kind: str
    axes: tuple[int, ...]
    source: str
    target: str
    bytes: int

    @property
    def communicates(self) -> bool:
        return self.bytes > 0


@dataclass(frozen=True, slots=True)
class PlanLine:
    """One priced item of a step, ``seconds`` in all. ``kind``: compute, reshard, weight (gathered for use), gradient,
    refresh, optimizer, offload (optimizer state to the device and back), swap (a saved activation or a weight to host
    memory and back), or hidden: minus the communication that computation overlaps. ``name`` is the node computed,
    the value moved, or where communication is overlapped; it happens ``times`` a step (once for each
    microbatch, or once), on the devices of pipeline stage ``stage``.
    """

    kind: str
    name: str
    module: str
    phase: str
    seconds: float
    steps: tuple[ReshardStep, ...] = ()
    times: int = 1
    stage: int = 0

    @property
    def sent(self) -> tuple[ReshardStep, ...]:
        """The hops that communicate."""
        return tuple(step for step in self.steps if step.communicates)


@dataclass(frozen=True, slots=True)
class PlanNode:
    """What a node of the planned graph is: its operation, result types, module, the path that a placeholder represents
    (``target``), the nodes it takes, and the node whose choice it shares because it has the same role in an equal layer
    (``tied``; "" if it is the first).
    """

    op: str
    type: str
    module: str
    target: str
    operands: tuple[str, ...]
    tied: str


@dataclass(frozen=True, slots=True)
class ResidentTensor:
    """Bytes that the fullest device holds through the step: a "weight", "gradient", "optimizer" state, saved
    "activation" or "input". ``name`` is the node.
    """

    kind: str
    name: str
    module: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another choice for one node, and by how many ``seconds`` a step, and by how many ``bytes`` what a device holds,
    would change if only this node changed (with the nodes tied to it).
    """

    choice: str
    seconds: float
    bytes: int


@dataclass(frozen=True, slots=True)
class Alternatives:
    """The cheapest other choices of a node, out of ``possible`` ones; ``impossible`` others would need neighbours to
    change too.
    """

    cheapest: tuple[Alternative, ...]
    possible: int
    impossible: int


@dataclass(frozen=True, slots=True)
class PlannedCollective:
    """``count`` collectives of one kind, over the same axes, of the same bytes each, for the same reason."""

    kind: CollectiveKind
    axes: tuple[int, ...]
    bytes: int
    count: int
    reason: str


LineKind = Literal[
    "compute", "exchange", "reshard", "weight", "gradient", "refresh", "optimizer", "offload", "swap", "hidden"
]
# The name of the line in which all devices agree on the loss scale of fp16; the line belongs to no node.
LOSS_SCALE = "loss scale"
# The kinds that are paid once a step, however many microbatches it has.
ONCE_A_STEP: tuple[LineKind, ...] = ("gradient", "refresh", "optimizer", "offload")


@dataclass(frozen=True, slots=True)
class Predicted:
    """Seconds of one step, and peak bytes of the device that holds most, with their parts: what it holds at that
    moment, so that what is not alive then (gradients, where forward holds most) is 0.

    Attributes:
        comm_seconds: communication that is waited for; what is sent while devices compute is not part of it. Of a
            layout, waiting for the host counts as computing.
        mfu: FLOPs of the model over what all devices could do in the step.
        freed_seconds: what the busiest stage computes faster than its lines say because others that share its
            processors wait: step = compute + comm + bubble - freed.
        host_bytes: optimizer state and saved activations in host memory, not part of the peak, and the buffers through
            which state of a disk passes.
        nvme_bytes: optimizer state on a local disk.
    """

    step_seconds: float
    compute_seconds: float
    comm_seconds: float
    bubble_seconds: float
    peak_bytes: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    temporary_bytes: int
    input_bytes: int
    mfu: float
    freed_seconds: float = 0.0
    host_bytes: int = 0
    nvme_bytes: int = 0

    @property
    def peak_parts(self) -> dict[str, int]:
        """What the peak is the sum of, by name."""
        return {
            "weights": self.weight_bytes,
            "gradients": self.gradient_bytes,
            "optimizer": self.optimizer_bytes,
            "activations": self.activation_bytes,
            "temporary": self.temporary_bytes,
            "inputs": self.input_bytes,
        }

    def to_dict(self) -> dict[str, float | int]:
        figures = {name: getattr(self, name) for name in self.__slots__}
        # Earlier versions of autopar do not know it.
        return figures if self.nvme_bytes else {name: n for name, n in figures.items() if name != "nvme_bytes"}


@dataclass(frozen=True)
class PlanRecord:
    """What a plan says, see :class:`~autopar.plans.plan.Plan`.

    Attributes:
        mesh, axis_names: with several ``stages``, those inside a stage, the largest if they are unequal.
        objective: what the placement program minimises, in seconds. For one stage it is the step. For several it is the
            work of all stages together, since the program is solved before the graph is cut: without the bubble,
            messages between stages, and how unevenly the work is divided; ``predicted.step_seconds`` includes these.
        bound: the lower bound of the objective that the solver proves; ``gap`` is its distance from ``objective``. Of
            several stages, which work at the same time, both may be more than the step takes: neither bounds it.
        placements: by path, how each parameter's value is placed during a step, and the output of each module;
            ``parameters`` adds where gradients and optimizer state rest.
        strategies: the choice for each node of the graph whose fingerprint is ``graph_hash``; ``nodes`` describes them.
        lines: the cost breakdown of a step.
        baselines: other plans with the same prices; None: not possible.
        alternatives: by the first node of those that choose alike, what else was possible and by how many seconds a
            step would change.
        microbatches: pieces of the batch; one stage with several of them accumulates gradients.
        pipeline: how the model is cut and run, and what its parts were priced at.
        module_nodes: the node that makes a module's output, by path.
        gradient_values: the value that is a parameter's gradient, by path; with stages one for each chunk that uses the
            parameter, separated by commas.
        rules: where the sharding rules of an operation come from: written, DTensor, registered, probed, or fallback and
            why there are none.
        recomputed: the forward nodes that backward runs again because memory is short; their copies are nodes too.
        offloaded: the saved activations that rest in host memory from forward to backward, and the parameters whose
            stored weights do between their uses.
        precision: the policy (:mod:`autopar.precision`); "fp32" leaves the model's dtypes as they are.
        layout: the fields of the layout that restricted the search, as ``Layout.parse`` reads them; "" if none did.
        tied: other names of tied parameters: the name under which ``parameters`` has them.
        sync: how this replica stays together with others; None: there are none, and ``mesh`` is the whole one.
        excluded: kinds of plans of which none was priced, and why: that without stages does not fit, or takes at least
            so long.
        searched: where a few of many divisions of the devices were solved, what is known of the others.
        device_peaks, device_limits: by device, its peak bytes and what it may hold, where rows are divided in unequal
            shares among devices of different memory; ``predicted`` and ``memory_limit`` are those of the one that is
            nearest to its limit.
        optimizer, compile, imbalance: the options of these names (:class:`autopar.Options`) with which it was priced.
    """

    model: str
    batch: int
    mesh: tuple[int, ...]
    axis_names: tuple[str, ...]
    cluster: str
    cluster_source: str
    status: Status
    objective: float
    bound: float
    gap: float
    solve_seconds: float
    memory_limit: int
    graph_hash: str
    predicted: Predicted
    lines: tuple[PlanLine, ...]
    strategies: Mapping[str, Strategy]
    parameters: Mapping[str, ParameterPlacement]
    outputs: Mapping[str, Placements]
    baselines: Mapping[str, Predicted | None] = field(default_factory=dict)
    alternatives: Mapping[str, Alternatives] = field(default_factory=dict)
    pinned: Mapping[str, str] = field(default_factory=dict)
    fallbacks: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    timings: Mapping[str, float] = field(default_factory=dict, compare=False)
    stages: int = 1
    schedule: str | None = None
    microbatches: int = 1
    nodes: Mapping[str, PlanNode] = field(default_factory=dict)
    module_nodes: Mapping[str, str] = field(default_factory=dict)
    gradient_values: Mapping[str, str] = field(default_factory=dict)
    holdings: tuple[ResidentTensor, ...] = ()
    rules: Mapping[str, str] = field(default_factory=dict)
    pipeline: PlannedPipeline | None = None
    recomputed: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()
    precision: Precision = "fp32"
    layout: str = ""
    tied: Mapping[str, str] = field(default_factory=dict)
    sync: PlannedSync | None = None
    excluded: Mapping[str, str] = field(default_factory=dict)
    searched: Searched | None = None
    device_peaks: tuple[int, ...] = ()
    device_limits: tuple[int, ...] = ()
    optimizer: str = "adamw"
    compile: Literal["auto"] | bool = "auto"
    imbalance: float | None = None

    @property
    def placements(self) -> Mapping[str, Placements]:
        return {**self.outputs, **{path: place.weight for path, place in self.parameters.items()}}

    @property
    def stage_meshes(self) -> StageMeshes:
        """The mesh inside each stage."""
        unequal = self.pipeline.meshes if self.pipeline is not None else ()
        return StageMeshes(unequal) if unequal else StageMeshes.equal(self.stages, self.mesh)

    def mesh_of(self, chunk: int) -> Mesh:
        """The mesh inside the stage that has a chunk of the pipeline."""
        return self.mesh if self.pipeline is None else self.stage_meshes.meshes[self.pipeline.schedule.placement[chunk]]

    @property
    def least_limit(self) -> int:
        """Bytes that a plan without stages may hold on every device: those of the smallest, where they differ."""
        return min(self.stage_limits)

    @property
    def stage_limits(self) -> tuple[int, ...]:
        """Bytes that the devices of each stage may hold: those of the smallest."""
        if self.device_limits:
            ranks = map(self.stage_meshes.ranks, range(self.stages))
            return tuple(min(self.device_limits[rank] for rank in own) for own in ranks)
        limits = self.pipeline.limits if self.pipeline is not None else ()
        return limits or (self.memory_limit,) * self.stages

    @cached_property
    def shares(self) -> Shares:
        """For each axis of the mesh the unequal shares in which some rows are divided; empty: there are none."""
        found: list[tuple[int, ...]] = [()] * len(self.mesh)
        for strategy in self.strategies.values():
            for places in strategy.places:
                for axis, place in enumerate(places[: len(found)]):
                    found[axis] = found[axis] or shares_of(place)
        return tuple(found) if any(found) else ()

    @cached_property
    def parameter_nodes(self) -> Mapping[str, str]:
        """The node of each parameter path."""
        return {node.target: name for name, node in self.nodes.items() if node.op == "param"}

    @cached_property
    def lines_by_name(self) -> Mapping[str, tuple[PlanLine, ...]]:
        """The lines of each node, in order."""
        return _grouped((line.name, line) for line in self.lines)

    @cached_property
    def holdings_by_name(self) -> Mapping[str, tuple[ResidentTensor, ...]]:
        """What rests in memory for each node."""
        return _grouped((holding.name, holding) for holding in self.holdings)

    @cached_property
    def alike(self) -> Mapping[str, tuple[str, ...]]:
        """All nodes that share a choice, by the first of them, which is included."""
        return _grouped((node.tied or name, name) for name, node in self.nodes.items())

    def assignment(self, names: Mapping[str, str], chunks: Sequence[int] = ()) -> Assignment:
        """The choice as lowering takes it; ``names`` maps a parameter's path to its node. ``chunks``: on the mesh of
        their stages, which are of one kind, and with the parameters as they have them; what they do not use is
        meaningless there."""
        mesh = self.mesh_of(chunks[0]) if chunks else self.mesh
        borrowed = self.pipeline.borrowed if self.pipeline is not None else {}
        lent = {path: place for (user, path), place in borrowed.items() if user in chunks}
        parameters = {names[path]: place for path, place in {**self.parameters, **lent}.items()}
        copies = {name + RECOMPUTED for name in self.recomputed}
        strategies = {name: strategy for name, strategy in self.strategies.items() if name not in copies}
        return Assignment(
            mesh,
            strategies,
            parameters,
            recomputed=frozenset(self.recomputed),
            offloaded=frozenset(self.offloaded),
        )

    def collectives(self, stage: int | None = None, *, joined: bool = True) -> tuple[PlannedCollective, ...]:
        """Every collective of a step, equal ones counted together; of all pipeline stages, or those that the devices of
        one ``stage`` take part in. Messages between stages are not included. Weights that are gathered in one message
        (:meth:`sent_together`) are one collective. ``joined``: if False, they count singly, as they are priced.
        """
        counts: Counter[tuple[str, tuple[int, ...], int, str]] = Counter()
        for lines in self.sent_together if joined else ((line,) for line in self.lines):
            if stage in (None, lines[0].stage):
                for steps in zip(*(line.sent for line in lines), strict=True):
                    size = sum(step.bytes for step in steps)
                    counts[steps[0].kind, steps[0].axes, size, lines[0].kind] += lines[0].times
        return tuple(
            PlannedCollective(kind, axes, size, count, reason)  # type: ignore[arg-type]
            for (kind, axes, size, reason), count in sorted(counts.items())
        )

    @cached_property
    def sent_together(self) -> tuple[tuple[PlanLine, ...], ...]:
        """The lines, those of weights that the program gathers in one message together
        (:mod:`autopar.ir.weight_messages`). With pipeline stages, whose chunks have messages of their own that a plan
        does not know, and for gradients, which travel in buckets, each is alone."""
        types = {name: node.type.partition(", stored ")[0] for name, node in self.nodes.items() if node.op == "param"}
        weights = {name: parse_type(text, {}) for name, text in types.items()}
        messages = WeightMessages.full_at(kind for kind in weights.values() if kind is not None)
        alone: list[tuple[PlanLine, ...]] = []
        groups: dict[object, list[PlanLine]] = {}
        for line in self.lines:
            kind = weights.get(line.name) if line.kind == "weight" and self.stages == 1 else None
            if kind is not None and messages.takes(kind) and any(step.kind == "all_gather" for step in line.sent):
                groups.setdefault((line.phase, *((s.kind, s.axes) for s in line.sent)), []).append(line)
            else:
                alone.append((line,))
        joined = (filled(group, messages.limit, lambda line: line.sent[-1].bytes) for group in groups.values())
        return (*alone, *(tuple(members) for group in joined for members in group))

    def seconds_of(self, *kinds: str) -> float:
        """Seconds of the lines of these kinds."""
        return sum(line.seconds for line in self.lines if line.kind in kinds)


def _grouped(pairs: Iterable[tuple[str, Item]]) -> dict[str, tuple[Item, ...]]:
    groups: dict[str, list[Item]] = {}
    for name, item in pairs:
        groups.setdefault(name, []).append(item)
    return {name: tuple(items) for name, items in groups.items()}
