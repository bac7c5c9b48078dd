"""Programs of plans with pipeline stages or microbatches: the plan's cut, schedule and placements, applied to a graph.

The graph that was planned takes them as they are; at another batch size every choice is carried over
(:mod:`autopar.planner.refit`); another graph of the same model (evaluation) is cut so that each parameter is used
on the stage that stores it, and its placements are solved anew.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from autopar.cluster.description import Cluster
from autopar.errors import InfeasibleError, OptionsError
from autopar.ir.assignment import Assignment, ParameterPlacement
from autopar.ir.graph import Graph
from autopar.ir.node import symbol
from autopar.ir.pipeline_program import PipelineProgram
from autopar.ir.placements import REPLICATE, Placements
from autopar.ir.planned_pipeline import PlannedPipeline
from autopar.ir.stage_meshes import Mesh
from autopar.ir.staged_graph import Staged
from autopar.ir.weight_messages import WeightMessages
from autopar.passes.lower.lower import Path
from autopar.passes.lower.lower_chunk import Wires
from autopar.passes.pipeline.coupled_samples import CoupledError
from autopar.passes.pipeline.cut import cut
from autopar.passes.pipeline.cut_candidates import cuts_for_owners
from autopar.passes.pipeline.microbatch import Microbatched, microbatch, split_inputs
from autopar.passes.recompute.saved_values import SaveActivations
from autopar.placement.prices import BUCKET_BYTES, Prices
from autopar.planner.check_strategies import ChunkNodes, nodes_by_mesh
from autopar.planner.refit import corresponding, refit_plan
from autopar.planner.step_graphs import graph_alone
from autopar.plans.plan import Plan
from autopar.schedule.messages import forward_only
from autopar.schedule.named import SCHEDULES
from autopar.schedule.schedule import Schedule
from autopar.search.schedules.chunks import Chunk, WirePrices, place_chunks
from autopar.search.stage_prices.pipeline_breakdown import price_stages, wire_prices

from .pipeline import pipeline_program

Annotate = Callable[[Graph, Mesh], Graph]
# From a graph that is annotated for a mesh, where its parameters rest there, and the names of the caches there.
Solve = Callable[[Graph, Mesh, Mapping[str, ParameterPlacement], Collection[str]], Assignment]
Placed = tuple[Assignment, Prices]


@dataclass(frozen=True)
class CompiledStages:
    """The ``program`` of one rank, and where the caches of all stages rest inside a stage, by name."""

    program: PipelineProgram
    caches: Mapping[str, Placements]


@dataclass(frozen=True)
class PlacedStages:
    """All stages, cut and placed: what the programs of all ranks have in common. ``caches`` as in
    :class:`CompiledStages`, all others as in :func:`.pipeline.pipeline_program`."""

    pieces: Microbatched
    staged: Staged
    chunks: tuple[Chunk, ...]
    wires: Wires
    schedule: Schedule
    paths: Sequence[Path]
    messages: WeightMessages
    caches: Mapping[str, Placements]

    def program(self, device: int) -> PipelineProgram:
        """That of the ``device``-th of all devices."""
        placed = self.pieces, self.staged, self.chunks, self.wires, self.schedule
        return pipeline_program(*placed, device, self.paths, BUCKET_BYTES, self.messages)


@dataclass(frozen=True)
class StageCompiler:
    """Compiles for the rank ``index`` of the mesh; ``annotate`` and ``solve`` (for a graph whose parameters have the
    planned placements) work on the mesh inside a stage; ``planned_prices`` are those of the planned
    graph on a mesh. ``holds_for``: whether the traced graph holds at a batch size."""

    plan: Plan
    cluster: Cluster
    optimizer: str
    index: int
    annotate: Annotate
    planned_prices: Callable[[Graph, ChunkNodes | None, Graph | None], Prices]
    solve: Solve
    holds_for: Callable[[int], bool]

    @property
    def pipeline(self) -> PlannedPipeline:
        assert self.plan.pipeline is not None
        return self.plan.pipeline

    def planned(self, graph: Graph, symbolic: Graph, bare: Graph) -> CompiledStages:
        """The program of the planned step; ``graph`` is concrete and without saved activations, ``symbolic`` is the
        same with a symbolic batch size. ``bare``: the step without outputs that only a call returns, which may take
        operations that the plan does not know."""
        return self._compiled(self.placed(graph, symbolic, None if len(bare) == len(graph) else bare))

    def placed(self, graph: Graph, symbolic: Graph, bare: Graph | None = None) -> PlacedStages:
        """The stages of the planned step."""
        pieces = self._pieces(graph, symbolic)
        planned = None if bare is None else SaveActivations()(self._pieces(bare, symbolic).graph)
        staged = cut(pieces, self.pipeline.cuts)
        return self._stages(pieces, staged, self._as_planned(pieces, staged, planned))

    def _as_planned(self, pieces: Microbatched, staged: Staged, planned: Graph | None = None) -> Mapping[int, Placed]:
        saving = SaveActivations()(pieces.graph)
        names = {node.target: node.name for node in saving.placeholders("param")}
        placed: dict[int, Placed] = {}
        for part in nodes_by_mesh(self.plan, staged):
            prices = self.planned_prices(saving, part if self.pipeline.meshes else None, planned)
            placed |= dict.fromkeys(part.chunks, (self.plan.assignment(names, part.chunks), prices))
        return placed

    def refitted(self, graph: Graph, symbolic: Graph, planned: Graph, planned_symbolic: Graph) -> CompiledStages:
        """The program of ``graph``, the ``planned`` one at another batch size; inputs may have other names.

        Raises:
            OptionsError: the batch does not divide into the plan's microbatches.
            PlanMismatchError: a dim that was divided evenly no longer is.
            InfeasibleError: the device cannot hold it.
        """
        original, pieces = self._pieces(planned, planned_symbolic), self._pieces(graph, symbolic)
        before, after = (SaveActivations()(each.graph) for each in (original, pieces))
        names = corresponding(before, after)
        staged = cut(pieces, tuple(names[name] for name in self.pipeline.cuts))
        placed: dict[int, Placed] = {}
        for part in nodes_by_mesh(self.plan, cut(original, self.pipeline.cuts)):
            first, second = (self.annotate(each, part.mesh) for each in (before, after))
            prices, own = self._prices(second, part), part.names if self.pipeline.meshes else None
            refit = refit_plan(self.plan, first, second, part.chunks, own)
            placed |= dict.fromkeys(part.chunks, (refit, prices))
        stages = self._stages(pieces, staged, placed)
        self._check(stages, placed, original)
        return self._compiled(stages)

    def other(self, graph: Graph, symbolic: Graph, planned: Graph, planned_symbolic: Graph) -> CompiledStages:
        """The program of another graph of the model: forward only if it has no gradients. Fewer microbatches where the
        batch does not divide into as many as planned.

        Raises:
            InfeasibleError: the device cannot hold it.
        """
        original = self._pieces(planned, planned_symbolic)
        planned_stages = cut(original, self.pipeline.cuts)
        count = self.plan.microbatches
        while not _divides(graph, symbolic, count):
            count -= 1
        pieces = self._other_pieces(graph, symbolic, count)
        holders, chunks = planned_stages.holders(), self.pipeline.chunks
        cuts = cuts_for_owners(pieces.graph, holders, chunks) if self.pipeline.cuts else ()
        homes = {path: users[0] for path, users in planned_stages.owners.items() if users}
        staged, saving = cut(pieces, cuts, homes), SaveActivations()(pieces.graph)
        trains = any(output.kind == "gradient" for output in graph.outputs)
        placed: dict[int, Placed] = {}
        for part in nodes_by_mesh(self.plan, staged):
            annotated = self.annotate(saving, part.mesh)
            caches = [name for chunk in part.graphs.values() for name in chunk.caches]
            solved = self.solve(annotated, part.mesh, self._resting(part, homes), caches)
            placed |= dict.fromkeys(part.chunks, (solved, self._prices(annotated, part)))
        stages = self._stages(pieces, staged, placed)
        if trains:
            self._check(stages, placed, original)
        return self._compiled(stages)

    def _resting(self, part: ChunkNodes, homes: Mapping[str, int]) -> Mapping[str, ParameterPlacement]:
        """Where parameters rest for the chunks of ``part``: as planned, by whichever devices of such a mesh, and whole
        if only chunks on other meshes were planned to have them."""
        if not self.pipeline.meshes:
            return self.plan.parameters
        everywhere = (REPLICATE,) * len(part.mesh)
        whole = ParameterPlacement(everywhere, everywhere, everywhere)
        here = {path for path, home in homes.items() if self.plan.mesh_of(home) == part.mesh}
        own = {path: place for path, place in self.plan.parameters.items() if path in here}
        lent = {path: place for (chunk, path), place in self.pipeline.borrowed.items() if chunk in part.chunks}
        return {**dict.fromkeys(self.plan.parameters, whole), **lent, **own}

    def _pieces(self, graph: Graph, symbolic: Graph) -> Microbatched:
        return self._divided(graph, symbolic, self.plan.microbatches)

    def _divided(self, graph: Graph, symbolic: Graph, count: int) -> Microbatched:
        """The graph in ``count`` microbatches, of statistics of their own if the plan's are."""
        alone = partial(self._alone, graph, symbolic, count) if self.pipeline.own_statistics else None
        return microbatch(graph, count, split_inputs(symbolic), alone)

    def _alone(self, graph: Graph, symbolic: Graph, count: int) -> Graph:
        """``graph``, which is ``symbolic`` at some batch size, at a ``count``-th of that. Raises
        :class:`OptionsError`."""
        batch = _batch(graph, symbolic)
        if not self.holds_for(batch // count):
            raise OptionsError(
                f"the model runs other operations on a microbatch of {batch // count} than on the batch of {batch}, so "
                "that microbatches cannot be batches of their own: use fewer microbatches"
            )
        names = {(output.kind, output.name) for output in graph.outputs}
        outputs = tuple(output for output in symbolic.outputs if (output.kind, output.name) in names)
        return graph_alone(replace(symbolic, outputs=outputs), None, batch, count)

    def _other_pieces(self, graph: Graph, symbolic: Graph, count: int) -> Microbatched:
        """Without gradients, the whole batch at once where microbatches would need statistics of their own."""
        trains = any(output.kind == "gradient" for output in graph.outputs)
        try:
            return self._divided(graph, symbolic, count) if trains else microbatch(graph, count, split_inputs(symbolic))
        except CoupledError:
            if trains or not self.pipeline.own_statistics:
                raise
        return microbatch(graph, 1, split_inputs(symbolic))

    def _prices(self, annotated: Graph, part: ChunkNodes) -> Prices:
        cluster = part_of_cluster(self.plan, self.cluster, part)
        return Prices.of(cluster, part.mesh, annotated, limits=self.plan.device_limits)

    def _compiled(self, stages: PlacedStages) -> CompiledStages:
        return CompiledStages(stages.program(self.index), stages.caches)

    def _stages(self, pieces: Microbatched, staged: Staged, placed: Mapping[int, Placed]) -> PlacedStages:
        schedule = self._schedule(staged, pieces)
        assignments, prices = zip(*(placed[chunk] for chunk in range(len(staged.chunks))), strict=True)
        chunks, wires = place_chunks(staged, assignments, prices, self._links(staged, schedule), self.pipeline.wires)
        paths, messages = [prices[held[0]].path for held in schedule.held], prices[0].messages
        rests = {name: placed[chunk][0] for chunk, graph in enumerate(staged.chunks) for name in graph.caches}
        caches = {name: rests[name].resting(pieces.graph)[name] for name in pieces.graph.caches if name in rests}
        return PlacedStages(pieces, staged, chunks, wires, schedule, paths, messages, caches)

    def _links(self, staged: Staged, schedule: Schedule) -> WirePrices:
        meshes = self.plan.stage_meshes
        pairs = tuple((edge.source, edge.target) for edge in staged.edges)
        return wire_prices(self.cluster, schedule.placement, [meshes.ranks(s) for s in range(meshes.stages)], pairs)

    def _check(self, stages: PlacedStages, placed: Mapping[int, Placed], original: Microbatched) -> None:
        """Raises :class:`InfeasibleError` if stages hold more than their devices can. More is counted of them than they
        hold, as it is of the ``original``, which the plan has measured."""
        staged = cut(original, self.pipeline.cuts)
        planned = self._as_planned(original, staged)
        counted = self._counted(self._stages(original, staged, planned), planned)
        measured = self.pipeline.peaks or counted
        beyond = (count - held for count, held in zip(counted, measured, strict=True))
        held = (count - more for count, more in zip(self._counted(stages, placed), beyond, strict=True))
        for peak, limit in sorted(zip(held, self.plan.stage_limits, strict=True), reverse=True):
            check_memory(self.plan, peak, limit, stages.pieces.graph)

    def _counted(self, stages: PlacedStages, placed: Mapping[int, Placed]) -> tuple[int, ...]:
        """The peak bytes that are counted of each stage."""
        schedule, links = stages.schedule, self._links(stages.staged, stages.schedule)
        prices = [placed[held[0]][1].on_block(rank) for rank, held in enumerate(schedule.held)]
        return price_stages(stages.chunks, stages.wires, schedule, prices, links, self.optimizer, self.cluster).peaks

    def _schedule(self, staged: Staged, pieces: Microbatched) -> Schedule:
        """The planned schedule, or one of its kind for another graph: fewer microbatches, other edges, forward only."""
        planned = self.pipeline.schedule
        name, each = planned.name, planned.chunks // planned.stages
        if name not in SCHEDULES:
            name = "gpipe" if planned.placement == planned.placement[: planned.stages] * each else "zb-v"
        from autopar.search.fitting_schedules import scheduled  # Here, since it loads the solvers.

        schedule = scheduled((name, each), planned.stages, pieces.count, staged)
        schedule = schedule.reordered(_order(schedule, planned))
        if not any(output.kind == "gradient" for chunk in staged.chunks for output in chunk.outputs):
            return forward_only(schedule)
        same = schedule.edges == planned.edges and schedule.microbatches == planned.microbatches
        return planned if same else schedule


def part_of_cluster(plan: Plan, cluster: Cluster, part: ChunkNodes | None) -> Cluster:
    """What the devices of ``part`` were priced with: if their mesh is their own, the least of the first such stage."""
    if plan.pipeline is None or not plan.pipeline.meshes or part is None:
        return cluster
    ranks = plan.stage_meshes.ranks(plan.pipeline.schedule.placement[part.chunks[0]])
    return cluster.at(ranks.start, len(ranks))


def _order(schedule: Schedule, planned: Schedule) -> tuple[int, ...]:
    """For each rank of ``schedule``, the rank of the ``planned`` one that holds the same chunks."""
    ranks = dict(zip(schedule.placement, planned.placement, strict=True))
    return tuple(ranks[rank] for rank in range(schedule.stages))


def _batch(graph: Graph, symbolic: Graph) -> int:
    """The batch size at which ``graph`` is ``symbolic``; 0 if that has no symbol."""
    sizes = {node.target: node.type.shape for node in graph.placeholders("input")}
    symbols = [symbol(name) for name, _ in symbolic.symbols]
    return next(
        (
            int(number)
            for node in symbolic.placeholders("input")
            for size, number in zip(node.type.shape, sizes.get(node.target, ()), strict=False)
            if size in symbols
        ),
        0,
    )


def check_memory(plan: Plan, peak: int, limit: int, graph: Graph) -> None:
    """Refuses a batch that the plan can run but a device cannot hold: ``peak`` bytes for microbatches of ``graph``, of
    ``limit``. Raises :class:`InfeasibleError`."""
    if peak > limit:
        shapes = ", ".join(f"{node.target} {node.type}" for node in graph.placeholders("input"))
        raise InfeasibleError(
            f"the plan made for batch {plan.batch} needs {peak} bytes per device for microbatches of ({shapes}), more "
            f"than its limit of {limit}; use a smaller batch, or make a plan for this one"
        )


def _divides(graph: Graph, symbolic: Graph, count: int) -> bool:
    """Whether every divided input divides into ``count`` microbatches."""
    dims = split_inputs(symbolic)
    sizes = [int(n.type.shape[d]) for n in graph.inputs if (d := dims.get(n.target)) is not None]
    return count == 1 or (bool(sizes) and all(size % count == 0 for size in sizes))
