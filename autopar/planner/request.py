"""A request for a plan, and what follows from it: the meshes to try, and the memory limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise

from sympy import sympify

from autopar.cluster.description import Cluster
from autopar.cost import usable_bytes, usable_host_bytes
from autopar.errors import OptionsError
from autopar.ir.graph import Graph
from autopar.ir.microbatching import ONCE, Repeats
from autopar.ir.node import Dim, symbol
from autopar.ir.placements import Shares
from autopar.layout import Layout
from autopar.options import Options
from autopar.passes.annotate.annotate import annotate
from autopar.passes.annotate.compositions import Compositions
from autopar.passes.annotate.fold import fold_layers
from autopar.placement.fused_kernels import FusedKernels
from autopar.planner.roles.axis_roles import AxisRole
from autopar.trace.lengths import BATCH

from .shared_work import SharedWork

# More bytes than any step needs on a device: a limit of memory that is none.
UNLIMITED = 1 << 50
# By how much a quick price may be off, relative to that of another layout.
# Chosen: those of the largest models are 1.4 to 6.2% above their plans (docs/layouts.md).
NEAR = 1.05
# The most axes on which placements are searched freely: those of a matrix on four are 256, and of two that an operation
# joins 65,536. Chosen: a GPT-2 of two layers on (2, 2, 2, 2) had no plan after ten minutes.
MOST_AXES = 3


@dataclass(frozen=True)
class Proposals:
    """Layouts worth trying, the most promising first, and what a rule of thumb chooses (None: nothing). ``quick``: what
    these take in seconds by prices that are quick to have, and what others take at least: infinite if they do not
    fit. ``estimated``: what each layout takes that has an estimate of its own. ``slow``: of those that are left out
    because they take longer than ``PlanRequest.worth``, the quickest, if there are any, as far as is known;
    ``slow_seconds``: what all of these take at least."""

    layouts: tuple[Layout, ...] = ()
    rule: Layout | None = None
    quick: Mapping[Layout, float] = field(default_factory=dict)
    estimated: Mapping[Layout, float] = field(default_factory=dict)
    slow: Layout | None = None
    slow_seconds: float = math.inf

    def is_near(self, layout: Layout) -> bool:
        """Whether quick prices leave open that ``layout`` is the quickest. They do where it has none."""
        least = min((self.quick.get(each, math.inf) for each in self.layouts), default=math.inf)
        return self.quick.get(layout, 0.0) <= NEAR * least

    def may_take(self, seconds: float, layout: Layout) -> bool:
        """Whether ``layout`` may take as little as ``seconds``: quick prices are of the same kind as those of plans."""
        return self.quick.get(layout, 0.0) <= seconds


Propose = Callable[["PlanRequest"], Proposals]


@dataclass(frozen=True)
class PlanRequest:
    """A request for a plan: the normalised ``graph`` (symbolic in the batch), its ``loss`` output, the ``batch`` size,
    the hardware and the options. ``model`` describes the model for people. ``repeats``, ``memory_limit`` and
    ``host_limit`` belong to one placement program of a search over stages. ``notes`` become warnings of the plan.
    ``worth``: seconds of a step (of a placement program) that takes too long to be of use. ``only_quickest``: whether
    placements that save memory are not asked for. ``only_counted``: whether the limit is one of what the program
    counts. The search over stages measures what its cut pipelines hold, and corrects that limit by it: what the uncut
    graph would hold at its peak is then neither the program's own row nor what any stage holds, and would be corrected
    twice.
    ``shares``: those in which rows may be divided on each axis, besides equal ones; ``rank_limits``: bytes that each
    device may hold then, by rank (:func:`rank_limits`).
    ``roles``: what each axis of the mesh is for, if a layout says. ``tied``: other names of tied parameters.
    ``returned``: by path, the shape of what a module returned, symbolic in the batch.
    ``asked``: the mesh that the user gave, if this is another. ``propose``: finds layouts worth trying for this
    request, where there are too many to try. ``shared``: what requests made from this one have in common."""

    graph: Graph
    loss: str | None
    batch: int
    mesh: tuple[int, ...]
    cluster: Cluster
    options: Options
    model: str = "model"
    axis_names: tuple[str, ...] = ()
    repeats: Repeats = ONCE
    memory_limit: float | None = None
    host_limit: float | None = None
    worth: float = math.inf
    only_quickest: bool = False
    only_counted: bool = False
    notes: tuple[str, ...] = ()
    roles: tuple[AxisRole, ...] = ()
    shares: Shares = ()
    rank_limits: tuple[int, ...] = ()
    tied: tuple[tuple[str, str], ...] = ()
    returned: tuple[tuple[str, tuple[Dim, ...]], ...] = ()
    asked: tuple[int, ...] = ()
    propose: Propose | None = field(default=None, compare=False, repr=False)
    shared: SharedWork = field(default_factory=SharedWork, compare=False, repr=False)


def returned_shapes(request: PlanRequest) -> dict[str, tuple[int, ...]]:
    """By path, the shape of what a module returns for a microbatch; of a model that was traced for one batch alone,
    these are not known."""
    count, batch = request.repeats.microbatches, symbol(BATCH)
    known = (own for own in request.returned if count == 1 or any(batch in sympify(dim).free_symbols for dim in own[1]))
    size = {batch: request.batch // count}
    return {path: tuple(int(sympify(dim).subs(size)) for dim in shape) for path, shape in known}


def as_stated(cluster: Cluster, options: Options) -> Cluster:
    """The cluster with what options state of it: how unevenly a model's router uses experts."""
    return cluster if options.imbalance is None else replace(cluster, expert_imbalance=options.imbalance)


def asked_mesh(request: PlanRequest) -> tuple[int, ...]:
    """The mesh that the user gave, which errors name."""
    return request.asked or request.mesh


def axes_are_fixed(request: PlanRequest) -> bool:
    """Whether pins, names or options refer to the axes of the mesh, so that they cannot be regrouped."""
    return not request.options.mesh_search or bool(request.options.pins) or bool(request.axis_names)


def mesh_candidates(request: PlanRequest) -> list[tuple[int, ...]]:
    """The meshes to try: the requested one or, if it has one axis that may be regrouped, all ways to split its devices
    into two axes. A plan with equal placements on both axes amounts to one on the single axis, so that none is lost.
    Of more than :data:`MOST_AXES` axes neighbours are joined, in every way.

    Raises :class:`OptionsError` if there are more, and they cannot be regrouped."""
    if request.roles:
        return [request.mesh]
    requested = request.mesh
    shared = tuple(size for size in requested if size > 1)
    if len(shared) > MOST_AXES:
        joined = _joined(shared)
        if axes_are_fixed(request):
            raise OptionsError(_too_many_axes(requested, joined[-1]))
        return joined
    devices = math.prod(requested)
    splits: list[tuple[int, ...]] = [(k, devices // k) for k in range(2, devices) if devices % k == 0]
    return [requested] if axes_are_fixed(request) or len(requested) > 1 or not splits else splits


def _joined(mesh: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The meshes of :data:`MOST_AXES` axes that are products of neighbouring axes of ``mesh``."""
    ends = (cuts for cuts in combinations(range(1, len(mesh)), MOST_AXES - 1))
    each = (tuple(math.prod(mesh[a:b]) for a, b in pairwise((0, *cuts, len(mesh)))) for cuts in ends)
    return list(dict.fromkeys(each))


def _too_many_axes(mesh: tuple[int, ...], joined: tuple[int, ...]) -> str:
    return (
        f"the mesh {mesh} has {len(mesh)} axes, and names, pins or mesh_search=False keep them apart: a tensor has too "
        f"many placements on more than {MOST_AXES} axes to search them. Join axes, as in the mesh {joined}, or say "
        "what each is for: Options(layout=autopar.Layout(...)) with degrees of data, context, expert, tensor, pipeline"
    )


def compiles(options: Options, cluster: Cluster) -> bool:
    """Whether pieces of a step are compiled, and so priced as kernels: where ``Options(compile=...)`` says so;
    ``"auto"``: on GPUs."""
    return cluster.device.is_gpu if options.compile == "auto" else bool(options.compile)


def is_compiled(request: PlanRequest) -> bool:
    """:func:`compiles` of a request."""
    return compiles(request.options, request.cluster)


def kernels_of(request: PlanRequest, graph: Graph) -> FusedKernels | None:
    """The kernels that a concrete graph runs as; None if operations run one by one."""
    if not is_compiled(request):
        return None
    device, folded = request.cluster.device, folded_graph(request, graph)
    return request.shared.once("kernels", (graph,), device.is_gpu, make=lambda: FusedKernels.of_layers(folded, device))


def folded_graph(request: PlanRequest, graph: Graph) -> Graph:
    """``graph`` with the classes of equal nodes (:func:`.fold_layers`)."""
    return request.shared.once("folded graph", (graph,), make=lambda: fold_layers(graph))


def annotated_graph(request: PlanRequest, folded: Graph) -> Graph:
    """A folded graph with its strategies (:func:`.annotate`), which share what they can with those of other graphs."""
    once, mesh, shares = request.shared.once, request.mesh, request.shares
    known = once("compositions", (), make=Compositions)
    return once("annotated graph", (folded,), mesh, shares, make=lambda: annotate(folded, mesh, shares, known))


def memory_limit_of(request: PlanRequest) -> int:
    """Bytes that a device may use: the requested limit, or the device's memory less its reserve. Of devices of several
    kinds that is the smallest, and a request for more than a device has means all that it has."""
    if request.memory_limit is None and request.cluster.groups:
        return _within(request, request.cluster.at(0, math.prod(request.mesh)))
    return int(request.memory_limit or request.options.memory_bytes or usable_bytes(request.cluster))


def stage_limits(request: PlanRequest, blocks: Sequence[range]) -> tuple[int, ...]:
    """:func:`memory_limit_of` for each of some ``blocks`` of consecutive devices."""
    cluster = request.cluster
    if not cluster.groups:
        return (memory_limit_of(request),) * len(blocks)
    return tuple(_within(request, cluster.at(block.start, len(block))) for block in blocks)


def rank_limits(request: PlanRequest) -> tuple[int, ...]:
    """:func:`memory_limit_of` for each device of the cluster, by rank, where there are several kinds."""
    if not request.cluster.groups:
        return ()
    return stage_limits(request, [range(rank, rank + 1) for rank in range(request.cluster.size or 0)])


def _within(request: PlanRequest, cluster: Cluster) -> int:
    usable = usable_bytes(cluster)
    return int(min(request.memory_limit or request.options.memory_bytes or usable, usable))


def host_limit_of(request: PlanRequest) -> float:
    """Bytes of host memory for each device that a plan may use."""
    return request.host_limit if request.host_limit is not None else usable_host_bytes(request.cluster)
