"""Which pipelines are worth solving: layouts of stages, and numbers of microbatches for each.

If the options fix neither stages nor schedule, a layout is tried only if it could win: if its bound
(:mod:`.division_bounds`), which is proven, is below the best plan's seconds. Of those that could, the ones are tried
that are expected to be quickest (:meth:`.Bounds.expected`, and the messages of the first microbatch). Where memory is
short, the step without stages is tried in microbatches as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, pairwise

from autopar.cost.collective.point_to_point import rate_between
from autopar.errors import OptionsError
from autopar.ir.graph import Graph
from autopar.planner.request import PlanRequest, axes_are_fixed
from autopar.restriction import Restriction, words_of

from .division_bounds import Division, bounds_of, estimates_of
from .stage_meshes import StageLayout, layout_of, layouts, microbatch_counts, nearest_counts, unequal_layouts

# How many placement programs, times operations of the graph, may be solved to see whether stages pay; at least one
# program is solved.
# Chosen: one program for a graph of 2000 operations, whose solve takes longest; four for one of 500.
EFFORT = 2000

# Layouts of unequal stages that are solved for a number of stages that the options fix.
# Chosen: each takes a placement program for every kind of stage.
MOST_UNEQUAL = 4

# In about so many microbatches a whole step is tried.
WHOLE_STEPS = (2, 4, 8)

# Of the quickest pipeline, the next numbers of microbatches are solved that are expected to take at most so many times
# as long. Chosen: of numbers next to each other, what is expected of one relative to the other was off by as much.
ABOUT = 1.1

# From so many devices on, layouts are proposed. Chosen: there are more ways to divide them than can be solved.
MANY_DEVICES = 128
Attempt = tuple[StageLayout, tuple[int, ...]]


def attempts(
    request: PlanRequest,
    graph: Graph,
    best: float,
    lacks_memory: bool,
    with_whole: bool = True,
    found: Callable[[], float] = lambda: math.inf,
) -> Iterator[Attempt]:
    """Layouts with the numbers of microbatches to try. ``graph``: the step that will be cut; ``best``: seconds of the
    best plan without stages and microbatches, infinite if there is none; ``lacks_memory``: whether there might be one,
    or a quicker one, with more memory; ``with_whole``: whether the whole step in microbatches may be tried then;
    ``found``: seconds of the quickest that was found meanwhile."""
    options = request.options
    one_stage = StageLayout(1, request.mesh, tuple(range(len(request.mesh))))
    may_lack_stages = options.stages in (None, 1) and not asks_for_chunks(request)
    if may_lack_stages and options.microbatches is not None and options.microbatches > 1:
        yield one_stage, (options.microbatches,)
    is_open = options.microbatches is None and options.schedule is None
    whole, stages = iter(list[Attempt]()), _staged(request, graph, best, lacks_memory, found)
    if may_lack_stages and is_open and lacks_memory and with_whole:
        whole = _whole_steps(request, graph, lambda: min(best, found()), one_stage)
    # Where nothing fits without microbatches, programs of whole steps in them are the hardest; of stages one is soon
    # found, and then few of them could be quicker. Within a time limit stages may leave none for them.
    yield from chain(stages, whole) if math.isinf(best) and options.time_limit is None else chain(whole, stages)


def _staged(
    request: PlanRequest, graph: Graph, best: float, lacks_memory: bool, found: Callable[[], float]
) -> Iterator[Attempt]:
    """Those of stages. Arguments as for :func:`attempts`."""
    options = request.options
    is_whole = math.prod(request.mesh) == 1 or keeps_axes(request)
    if options.stages == 1 or (options.stages is None and is_whole):
        return
    possible = [
        (layout, microbatch_counts(_own_batch(request), layout.stages, options.microbatches))
        for layout in _layouts(request, graph)
        if not request.roles or request.mesh[0] % layout.stages == 0
    ]
    if options.stages is not None or options.schedule is not None or asks_for_chunks(request):
        yield from (_from_expected(request, graph, *attempt) for attempt in possible)
    else:
        yield from _promising(request, graph, best, possible, lacks_memory, found)


def _from_expected(request: PlanRequest, graph: Graph, layout: StageLayout, counts: tuple[int, ...]) -> Attempt:
    """A layout with the number of microbatches that is expected to be quickest, and with more, which hold less."""
    if len(counts) == 1:
        return layout, counts
    expect = _expected_seconds(request, graph, layout)
    first = min(counts, key=lambda n: (expect(n), n))
    return layout, tuple(n for n in counts if n >= first)


def beside(
    request: PlanRequest, graph: Graph, layout: StageLayout, count: int, seconds: float, best: float
) -> tuple[int, ...]:
    """The next numbers of microbatches, fewer and more than ``count`` (:func:`_next`), with which the stages of
    ``layout`` might be quicker than the ``best`` plan by their bounds, and are expected to be about as quick. What is
    expected is scaled by the ``seconds`` that they take with ``count``. Of stages that are about as quick themselves it
    rules out no fewer microbatches, since it knows least of what does not shrink with samples; of whole steps it rules
    out none, since it knows nothing of memory, for which these have microbatches."""
    counts = microbatch_counts(_own_batch(request), layout.stages, request.options.microbatches)
    if layout.stages == 1:  # Without microbatches it is another plan.
        counts = tuple(n for n in counts if n > 1)
    if len(counts) < 2:
        return ()
    sides = [n for n in reversed(counts) if n < count], [n for n in counts if n > count]
    batch = _own_batch(request)  # Samples that a layout has divided are no longer divided among devices of a stage.
    sharing = math.prod(layout.mesh) if batch == request.batch else 1
    fewer, more = (_next(side, batch, sharing) for side in sides)
    bound, expect = least_seconds(request, graph, layout), _expected_seconds(request, graph, layout)
    worth = expect(count) * best / seconds * (ABOUT if seconds <= best else 1.0)
    unknown = (*fewer, *(more if layout.stages == 1 else ())) if seconds <= ABOUT * best else ()
    expected = [n for n in (*fewer, *more) if n in unknown or expect(n) < worth]
    return tuple(n for n in expected if bound(n) < best)


def _next(counts: Sequence[int], batch: int, devices: int) -> tuple[int, ...]:
    """The first of ``counts``, and the first that divides the ``batch`` so that each of the ``devices`` of a stage has
    as many samples of a microbatch: one that does not may hide one that does, and is quicker."""
    even = [n for n in counts if batch // n % devices == 0]
    return tuple(dict.fromkeys((*counts[:1], *even[:1])))


def _whole_steps(
    request: PlanRequest, graph: Graph, quickest: Callable[[], float], layout: StageLayout
) -> Iterator[Attempt]:
    """The whole step in microbatches, which saves activations where memory is short. Only numbers that could win over
    the ``quickest`` seconds known when it comes to them; if nothing else fits, single samples at last."""
    if request.loss is None or not request.graph.gradients:
        return
    bound, best = least_seconds(request, graph, layout), quickest()
    batch = _own_batch(request)
    tried = dict.fromkeys((*nearest_counts(batch, WHOLE_STEPS), *((batch,) if math.isinf(best) else ())))
    counts = tuple(n for n in tried if n > 1 and bound(n) < best)
    if counts:
        yield layout, counts


def _layouts(request: PlanRequest, graph: Graph) -> tuple[StageLayout, ...]:
    """The layouts that the options allow; of unequal stages in a given number only those of the least bound. Raises
    :class:`OptionsError` if there are none."""
    mesh, stages = request.mesh, request.options.stages
    if isinstance(stages, tuple):
        layout = layout_of(mesh, stages)
        if layout.counts:
            _check_unequal(request)
        return (layout,)
    unequal = unequal_layouts(request.cluster, math.prod(mesh)) if _why_not_unequal(request) is None else ()
    if stages is not None:
        asked = [layout for layout in unequal if layout.stages == stages]
        unequal = tuple(sorted(asked, key=lambda layout: least_seconds(request, graph, layout)(1))[:MOST_UNEQUAL])
    return (*layouts(mesh, stages, others=bool(unequal)), *unequal)


def _why_not_unequal(request: PlanRequest) -> str | None:
    """What of a request needs stages of as many devices each; None if nothing does."""
    if request.roles:
        return f"layout={words_of(request.options.layout)} divides the devices of every stage alike"
    if len(request.axis_names) > 1 or (not request.options.mesh_search and len(request.mesh) > 1):
        return f"the axes of the mesh {request.mesh} are fixed, and stages with meshes of their own have none of them"
    if any(":" in text for text in request.options.pins.values()):
        return "pins name shares of rows, S(dim:3+1), which only stages of as many devices each have"
    return None


def _check_unequal(request: PlanRequest) -> None:
    """Raises :class:`OptionsError` if something needs stages of as many devices each."""
    reason = _why_not_unequal(request)
    if reason is not None:
        stages = len(request.options.stages) if isinstance(request.options.stages, tuple) else request.options.stages
        raise OptionsError(
            f"stages={request.options.stages}: {reason}; leave that out, or ask for stages={stages}, of as many "
            "devices each"
        )


def proposes(request: PlanRequest) -> bool:
    """Whether the stages to try are those of proposed layouts: on many devices, if the options leave stages open, and
    the request can propose any."""
    options = request.options
    fixed = (options.layout, options.stages, options.microbatches, options.schedule, options.recompute, options.offload)
    is_open = all(value is None for value in fixed) and not request.roles and not keeps_axes(request)
    trains = request.loss is not None and bool(request.graph.gradients)
    return request.propose is not None and is_open and trains and math.prod(request.mesh) >= MANY_DEVICES


def asks_for_chunks(request: PlanRequest) -> bool:
    """Whether a layout asks for several chunks of each stage, which only pipelines have."""
    return (Restriction.of(request.options.layout).interleave or 1) > 1


def keeps_axes(request: PlanRequest) -> bool:
    """Whether the options refer to axes of the mesh. Then axes are not given to stages unless stages are requested. Of
    axes with roles, only an outermost one that a layout leaves open may be."""
    options = request.options
    if request.roles:
        return bool(request.roles[0].name)
    asks_for_zero = options.zero is not None and "zero" not in dict(options.from_layout)
    fixed = asks_for_zero or axes_are_fixed(request)
    return fixed and options.schedule is None and options.microbatches is None


def _own_batch(request: PlanRequest) -> int:
    """The samples of a step among which microbatches are divided: those of one data rank, if a layout says how many
    there are."""
    of_data = zip(request.roles, request.mesh, strict=False)
    return request.batch // math.prod(size for role, size in of_data if role.products == {"data"})


def _promising(
    request: PlanRequest,
    graph: Graph,
    best: float,
    possible: list[Attempt],
    lacks_memory: bool,
    found: Callable[[], float],
) -> Iterator[Attempt]:
    """Of all possible attempts those that could win, as many as the effort allows. The attempts of each layout that are
    expected to be quickest come first; others follow if they are expected to win over what was ``found``. Where memory
    is short, more microbatches follow, which hold less, and the layouts with fewest devices in a stage come first:
    their programs are the easiest, and spare others much work."""
    promising = _ranked(request, graph, best, possible)
    # If nothing fits without stages, a pipeline is needed, and where devices differ only stages use the quick ones, so
    # more are tried.
    is_likely = math.isinf(best) or bool(request.cluster.groups)
    most = max(4 if is_likely else 1, EFFORT // len(graph))
    most *= 2 if any(layout.counts for _, _, layout, _ in promising) else 1
    chosen = promising[:most]
    if not lacks_memory:
        for rank, seconds, layout, n in chosen:
            if rank == 0 or seconds < min(best, found()):
                yield layout, (n,)
        return
    own = dict.fromkeys(layout for _, _, layout, _ in chosen)
    for layout in sorted(own, key=lambda layout: max(layout.sizes)):
        first = next(n for _, _, other, n in promising if other == layout)
        yield layout, tuple(sorted(n for _, _, other, n in promising if other == layout and n >= first))


def _ranked(
    request: PlanRequest, graph: Graph, best: float, possible: list[Attempt]
) -> list[tuple[int, float, StageLayout, int]]:
    """The numbers of microbatches of each layout whose bounds are below ``best`` seconds, with their rank among those
    of their layout, and the seconds that are expected: first the first of every layout."""
    ranked: list[tuple[int, float, StageLayout, int]] = []
    for layout, counts in possible:
        bound, expect = least_seconds(request, graph, layout), _expected_seconds(request, graph, layout)
        expected = sorted((expect(n), n) for n in counts if bound(n) < best)
        ranked += [(rank, seconds, layout, n) for rank, (seconds, n) in enumerate(expected)]
    return sorted(ranked, key=lambda attempt: attempt[:2])


def least_seconds(request: PlanRequest, graph: Graph, layout: StageLayout) -> Callable[[int], float]:
    """A function of the number of microbatches: seconds that no step of this layout can beat."""
    bounds, inside = bounds_of(request, graph), math.prod(layout.mesh)
    if layout.is_unequal:
        return partial(bounds.seconds_of_blocks, layout.blocks)
    return lambda n: bounds.seconds(Division(layout.stages, 1, inside, n, 1))


def _expected_seconds(request: PlanRequest, graph: Graph, layout: StageLayout) -> Callable[[int], float]:
    """A function of the number of microbatches: seconds that a step of this layout is expected to take."""
    estimates, hops = estimates_of(request, graph), _hops(request, layout)
    return lambda n: estimates.expected(layout.blocks, n) + hops


def _hops(request: PlanRequest, layout: StageLayout) -> float:
    """Sum of the latencies that a microbatch meets on its way through all stages and back."""
    return 2.0 * sum(rate_between(request.cluster, *pair)[0] for pair in pairwise(layout.blocks))
