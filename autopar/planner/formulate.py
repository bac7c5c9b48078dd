"""Formulates the placement program of a request on its mesh, with the choices that its options leave."""

from __future__ import annotations

from collections.abc import Set

from autopar.ir.graph import Graph
from autopar.offload import allowed, required
from autopar.options import Options
from autopar.passes.annotate.few_layers import FewLayers
from autopar.passes.annotate.fold import fold_layers
from autopar.passes.pipeline.microbatch import split_inputs
from autopar.placement.constraints import pin_instance, pinned_apart, with_choices, zero_allows
from autopar.placement.formulation import Instance, build_instance
from autopar.placement.prices import Prices
from autopar.planner.roles.axis_roles import restricted_to
from autopar.planner.roles.products import Products
from autopar.restriction import words_of

from .memory_limit import may_widen, widened, with_limit
from .request import PlanRequest, host_limit_of, memory_limit_of, returned_shapes

# Parts of the depth in which layers choose alike where memory is short. Chosen: first, middle and last layers differ.
STRETCHES = 3
# Programs that are kept, with what is known of each: those of two meshes or restrictions. Chosen: each is large.
PROGRAMS = 2
# Solutions without a limit of memory that are kept. Chosen: each is a choice for every group, and few others met on the
# way.
SOLUTIONS = 64


def formulate(request: PlanRequest, annotated: Graph, prices: Prices, stretches: int = 1) -> Instance:
    """The instance of an annotated graph, which may have classes, without recomputation and offload. The depth of the
    model is divided into ``stretches``; equal layers of one stretch are tied."""
    return _formulate_tied(request, _tied(request, annotated, stretches), prices)


def _formulate_tied(request: PlanRequest, graph: Graph, prices: Prices) -> Instance:
    """The instance of a graph with classes, without recomputation and offload."""
    instance = build_instance(
        graph,
        prices,
        optimizer=request.options.optimizer,
        memory_limit=float(memory_limit_of(request)),
        host_limit=host_limit_of(request),
        repeats=request.repeats,
    )
    return _restricted(request, instance)


def _tied(request: PlanRequest, annotated: Graph, stretches: int) -> Graph:
    """The annotated graph with classes of the nodes that choose alike."""
    pins = request.options.pins
    if annotated.classes and not pins and stretches == 1:
        return annotated
    return request.shared.once(
        "tied graph",
        (annotated,),
        stretches,
        tuple(pins.items()),
        make=lambda: fold_layers(annotated, stretches, pinned_apart(annotated, pins)),
    )


def untie_layers(request: PlanRequest, annotated: Graph, folded: Instance) -> Instance:
    """The instance whose equal layers are tied only within stretches of depth. It has recomputation and offload if
    ``folded`` has them. One for all limits of the device's memory, as of the programs of which few are kept."""

    def make() -> Instance:
        instance = formulate(request, annotated, folded.prices, STRETCHES)
        return with_memory_savers(request, instance) if folded.is_wide else instance

    of = annotated, folded.prices, folded.choices
    return request.shared.once("untied program", of, folded.is_wide, make=make, kept=1)


def part_layers(request: PlanRequest, annotated: Graph, folded: Instance, parted: Set[str]) -> Instance:
    """The instance in which the nodes ``parted`` are tied to none but each other. It has recomputation and offload if
    ``folded`` has them. Unlike other programs it is not kept, so that it displaces none."""
    pinned = pinned_apart(annotated, request.options.pins)
    apart = {name: (pinned.get(name, ()), name in parted) for name in (*pinned, *parted)}
    instance = _formulate_tied(request, fold_layers(annotated, apart=apart), folded.prices)
    widens = folded.is_wide and may_widen(request.options, instance)
    return _restricted(request, widened(instance, request.options)) if widens else instance


def with_memory_savers(request: PlanRequest, instance: Instance) -> Instance:
    """The instance with recomputation and offload, if the options allow them and it does not have them yet."""
    options, graph = request.options, instance.graph
    if not may_widen(options, instance):
        return instance
    # One for all limits of the device's memory. A program has choices of its own, which its copies share.
    of = graph, instance.choices
    settings = options.recompute, allowed(options.offload), required(options.offload)
    wide = request.shared.once(
        "wide program", of, *settings, make=lambda: _restricted(request, widened(instance, options)), kept=PROGRAMS
    )
    return with_limit(wide, instance.problem.memory_limit)


def _restricted(request: PlanRequest, instance: Instance) -> Instance:
    """The instance with only the choices that the options allow."""
    before: list[tuple[str, Instance]] = []
    if request.roles:
        before.append((words_of(request.options.layout), instance))
        instance = restricted_to(
            instance, request.roles, _products(request, instance), words_of(request.options.layout)
        )
    stage = request.options.zero
    if stage is not None:
        before.append((_zero_of(request.options), instance))
        instance = with_choices(instance, zero_allows(instance, stage), gathers=stage == 3)
    pins = request.options.pins
    return pin_instance(instance, pins, before, returned_shapes(request)) if pins else instance


def _products(request: PlanRequest, instance: Instance) -> Products:
    """The products of few layers of the instance's graph, among them the nodes by whose names groups go. One object for
    all graphs that share nodes, strategies and classes."""
    graph, axes = instance.graph, len(request.roles)
    dims = {name: dim for name, dim in split_inputs(request.graph).items() if dim is not None}
    of, settings = (graph.nodes, graph.strategies, graph.classes), (axes, tuple(dims.items()))

    def make() -> Products:
        return Products(FewLayers()(graph), axes, dims)

    return request.shared.once("products", of, *settings, make=make, kept=PROGRAMS)


def _zero_of(options: Options) -> str:
    """The option as its user gave it."""
    by_layout = options.layout is not None and "zero" in options.layout.given
    return f"{'Layout' if by_layout else 'Options'}(zero={options.zero})"
