"""Seconds that no plan can beat, for every division of the devices: what the search did not solve is either excluded by
its bound, or counts in the gap that the plan states.

A *division* is a number of pipeline stages, of data ranks and tensor ranks inside a stage, of microbatches and of
chunks a stage. (Context ranks, experts, and where weights and states rest are placements: the program of a division
chooses them.) Its bound counts what every plan of it does, however it is placed, cut and scheduled:

- *work*: the devices together do at least the work of the whole step, and each launches every operation of its stage
  once for each microbatch. The busiest stage takes at least the average. (What depends on the batch's data alone, and
  additions of gradients, may run once a step or not at all: they are left out.)
- *the longest chain*: operations of one microbatch that each take the result of the one before, through forward and
  backward, run one after the other, each at best on all devices of a stage.

Stages may have unequal numbers of devices, and devices may be of several kinds, each better at other operations. Let
stage s launch for l[s] seconds, of L in all, and let its device d do the part x[o,d] of the computing of operation o,
all of which takes it c[o,d]. The stage takes at least l[s] + sum_o c[o,d] x[o,d] for any of its devices, and the
busiest stage at least the average over all devices, with any weights v[d]. With V[s], the weights of a stage together:

    (sum_s V[s] l[s] + sum_o sum_d v[d] c[o,d] x[o,d]) / sum_d v[d].

The parts of an operation add up to 1, and launches count least in the stage of the least weight, so this is at least
(min V L + sum_o min_d v[d] c[o,d]) / sum v. (Nor is it less than the average of the launches, with equal weights for
stages.) The weights are speeds: the steps a second that a device could compute alone. The sum over operations is then
1 if kinds differ in speed alone. In the longest chain, every operation runs on the kind that is best at it.

Nothing is assumed of idling, of messages, or of what lack of memory costs: in a bound all of it is free. Ranks that
share processors compute quicker while others wait, at most by what the processors allow.

What a division is *expected* to take orders those that could win, and excludes none. Of operations too small to fill a
device, it counts as launching all that fewer samples take as well. The first microbatch passes all stages, and the
others follow at the pace of a stage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, NamedTuple

from autopar.cluster.description import Cluster
from autopar.errors import GraphError
from autopar.ir.graph import Graph
from autopar.ir.searched import Searched, TriedDivision
from autopar.layout import Layout, divisors
from autopar.passes.pipeline.chunk_assignment import gradient_parts
from autopar.passes.pipeline.data_only import data_only_nodes
from autopar.placement.fused_kernels import FusedKernels
from autopar.planner.alone import seconds_alone
from autopar.planner.request import PlanRequest, kernels_of
from autopar.planner.step_graphs import pipelined_graph, pipelined_step_of, returns_input_gradients, step_of

from .stage_devices import kinds_of_blocks

# The samples of the step that shows what does not shrink with them: with fewer a trace may not hold.
FEW_SAMPLES = 2

# How many times a launch an operation takes at most that is too small to fill a device. Chosen: one tile of a product
# takes an A100 10 to 20 us, a launch 5; what takes longer, as reading large weights does, tensor ranks divide.
LIKE_LAUNCHES = 4.0


@dataclass(frozen=True, slots=True, order=True)
class Division:
    """See the module docstring."""

    pipeline: int
    data: int
    tensor: int
    microbatches: int
    interleave: int

    def __str__(self) -> str:
        return " ".join(f"{name}={getattr(self, name)}" for name in self.__slots__ if getattr(self, name) > 1)


def all_divisions(devices: int, batch: int, pieces: int, most_chunks: int) -> Iterator[Division]:
    """Every division of ``devices`` whose chunks, at most ``most_chunks`` a stage, have one of ``pieces`` of the model
    each. Whether the ``batch`` divides so is for the caller to ask (:func:`divides`)."""
    counts = divisors(batch)
    for pipeline in (n for n in divisors(devices) if n <= pieces):
        for data in divisors(devices // pipeline):
            for microbatches in counts:
                for interleave in range(1, min(most_chunks, pieces // pipeline) + 1 if pipeline > 1 else 2):
                    yield Division(pipeline, data, devices // (pipeline * data), microbatches, interleave)


def division_of(layout: Layout, batch: int) -> Division:
    """The division that a layout with all degrees and a chunk on each stage is."""
    return Division(layout.pipeline, layout.data, layout.tensor, layout.microbatches(batch), 1)


def divides(division: Division, batch: int) -> bool:
    """Whether each data rank has the same whole samples of each microbatch."""
    return batch % (division.data * division.microbatches) == 0


class Smaller(NamedTuple):
    """The ``graph`` of the same step with a ``share`` of its samples."""

    graph: Graph
    share: float


@dataclass(frozen=True)
class Bounds:
    """The bounds of divisions of ``devices`` devices; ``graph``: the whole step at the whole batch, to be cut;
    ``fused``: its kernels, if pieces of it are compiled. With a ``smaller`` step they are estimates."""

    cluster: Cluster
    devices: int
    graph: Graph
    fused: FusedKernels | None = None
    smaller: Smaller | None = None

    @property
    def pieces(self) -> int:
        """The operations between which the model could be cut."""
        return sum(node.phase == "forward" and not node.is_placeholder for node in self.graph.nodes)

    def seconds(self, division: Division) -> float:
        """What a step takes at least."""
        stages, inside = division.pipeline, self.devices // division.pipeline
        if self.cluster.groups:
            least = min(self._speed(range(first, first + inside)) for first in range(0, self.devices, inside))
        else:
            least = self._speed(range(inside))
        return self._seconds(stages, least, inside, division.microbatches)

    def seconds_of_blocks(self, blocks: Sequence[range], microbatches: int) -> float:
        """What a step takes at least whose stages are ``blocks`` of consecutive devices, which may be unequal."""
        return self._seconds(len(blocks), min(map(self._speed, blocks)), max(map(len, blocks)), microbatches)

    def expected(self, blocks: Sequence[range], microbatches: int) -> float:
        """What a step is expected to take whose stages are ``blocks`` of consecutive devices, but for messages: a
        pipeline probably idles for at least a sixth of the time that 1F1B idles, as ZB-V does with equal chunks, unless
        idle ranks leave their processors to others."""
        stages, least = len(blocks), min(map(self._speed, blocks))
        average, chain = self._average_and_chain(stages, least, max(map(len, blocks)), microbatches)
        if self.cluster.cores < self.cluster.sharing:
            return max(average, chain) / self._quickest
        pace = average / microbatches
        followed = pace + chain * (microbatches + stages - 2) / stages
        return max(average + pace * (stages - 1) / 6.0, followed, chain) / self._quickest

    def _seconds(self, stages: int, least: float, inside: int, microbatches: int) -> float:
        """What a step takes at least whose stages have at most ``inside`` devices each; ``least``: the speed of the
        slowest stage."""
        return max(self._average_and_chain(stages, least, inside, microbatches)) / self._quickest

    def _average_and_chain(self, stages: int, least: float, inside: int, microbatches: int) -> tuple[float, float]:
        launches, whole = microbatches * self._launches, self._speed(range(self.devices))
        average = max(launches / stages, (least * launches + self._computed) / whole if whole else 0.0)
        return average, self._longest.launches + self._longest.computing / (inside * microbatches)

    @cached_property
    def _kind_of(self) -> tuple[int, ...]:
        """For each device, the first of its kind."""
        each = [range(device, device + 1) for device in range(self.devices)]
        return kinds_of_blocks(self.cluster, each) if self.cluster.groups else (0,) * self.devices

    def estimated(self, smaller: Smaller) -> Bounds:
        """The estimates of the same divisions."""
        estimates = replace(self, smaller=smaller)
        vars(estimates)["_alone"] = self._alone  # Of the same step.
        return estimates

    @cached_property
    def _alone(self) -> Mapping[int, Mapping[str, _Seconds]]:
        """What each operation takes on one device of each kind, by the first of them."""
        firsts = dict.fromkeys(self._kind_of)
        return {first: _operations(self.cluster.at(first, 1), self.graph, self.fused) for first in firsts}

    @cached_property
    def _kinds(self) -> Mapping[int, Mapping[str, _Seconds]]:
        """As ``_alone``; of estimates, what does not shrink with fewer samples counts as launching."""
        if self.smaller is None:
            return self._alone
        each, smaller = self._alone.items(), self.smaller
        return {first: self._by_size(own, smaller, self.cluster.at(first, 1)) for first, own in each}

    def _by_size(self, each: Mapping[str, _Seconds], smaller: Smaller, device: Cluster) -> Mapping[str, _Seconds]:
        """The seconds of operations on a ``device``, of which what does not shrink with their samples counts as
        launching. Compiled pieces are taken to shrink: of fewer samples they are not known."""
        few, found = seconds_alone(device, smaller.graph, None), dict[str, _Seconds]()
        for name, own in each.items():
            is_alone = self.fused is None or self.fused.share_of(self.graph[name]) is None
            if is_alone and own.launches and name in few:
                most = LIKE_LAUNCHES * own.launches
                found[name] = _with_fixed(own, min(most, _fixed(own, few[name][0], smaller.share)))
            else:
                found[name] = own
        return found

    @cached_property
    def _best(self) -> Mapping[str, _Seconds]:
        """What each operation takes at least, on the kind that is best at it."""
        every = tuple(self._kinds.values())
        if len(every) == 1:
            return every[0]
        return {name: _Seconds(*map(min, zip(*(own[name] for own in every), strict=True))) for name in every[0]}

    @cached_property
    def _launches(self) -> float:
        """Seconds to launch every operation once."""
        return sum(own.launches for own in self._best.values())

    @cached_property
    def _longest(self) -> _Seconds:
        return _longest_chain(self.graph, self._best, tuple if self.smaller is None else sum)

    @cached_property
    def _speeds(self) -> Mapping[int, float]:
        """Steps a second that a device of each kind could compute alone, without launches; 0 if it has nothing to
        compute."""
        computing = {kind: sum(own.computing for own in each.values()) for kind, each in self._kinds.items()}
        return {kind: 1.0 / seconds if seconds else 0.0 for kind, seconds in computing.items()}

    @cached_property
    def _computed(self) -> float:
        """The sum over operations that the module docstring explains: at most 1."""
        rated = [(self._speeds[kind], each) for kind, each in self._kinds.items()]
        return sum(min(speed * each[name].computing for speed, each in rated) for name in self._best)

    @cached_property
    def _before(self) -> tuple[float, ...]:
        """For each device, and for the end, the speed of all devices before it together."""
        return tuple(accumulate((self._speeds[kind] for kind in self._kind_of), initial=0.0))

    def _speed(self, devices: range) -> float:
        if not self.cluster.groups:
            return len(devices) * self._speeds[0]
        return self._before[devices.stop] - self._before[devices.start]

    @cached_property
    def _quickest(self) -> float:
        """How much quicker than priced a rank is at most, because others wait."""
        cluster = self.cluster
        if cluster.sharing == cluster.cores:
            return 1.0
        return max(1.0, cluster.speed(1) / cluster.speed(min(cluster.sharing, self.devices)))


def bounds_of(request: PlanRequest, graph: Graph) -> Bounds:
    """The bounds of the divisions of a request whose step ``graph`` will be cut."""
    cluster, devices, fused = request.cluster, math.prod(request.mesh), kernels_of(request, _saving(request, graph))
    make = partial(Bounds, cluster, devices, graph, fused)
    return request.shared.once("bounds", (cluster, graph, fused), devices, make=make)


def estimates_of(request: PlanRequest, graph: Graph) -> Bounds:
    """As :func:`bounds_of`, but estimates, where ``graph`` is the step of the request. Where that is not known with
    fewer samples, operations are taken to shrink with their samples."""
    bounds, samples = bounds_of(request, graph), FEW_SAMPLES
    if not request.graph.symbols or request.batch <= samples:
        return bounds

    def make() -> Bounds:
        try:
            few = pipelined_graph(request.graph, request.loss, samples)
        except GraphError:
            return bounds
        return bounds.estimated(Smaller(few, samples / request.batch))

    return request.shared.once("estimates", (bounds,), make=make)


def _saving(request: PlanRequest, graph: Graph) -> Graph:
    """``graph``, or the step of the request with saved activations if it has the same operations: their kernels are the
    same, and are known where a plan without stages was sought."""
    is_same = graph is pipelined_step_of(request) and not returns_input_gradients(request.graph)
    return step_of(request) if is_same else graph


class _Seconds(NamedTuple):
    """Seconds on one device, to compute and to launch."""

    computing: float
    launches: float


def _operations(cluster: Cluster, graph: Graph, fused: FusedKernels | None) -> dict[str, _Seconds]:
    """What each operation of a step that must run takes on one device."""
    left_out, found = data_only_nodes(graph) | _additions(graph), dict[str, _Seconds]()
    for name, (seconds, launches) in seconds_alone(cluster, graph, fused).items():
        if name not in left_out:
            launches = min(launches, seconds)  # What is only viewed launches nothing.
            found[name] = _Seconds(seconds - launches, launches)
    return found


def _fixed(whole: _Seconds, few: float, share: float) -> float:
    """The seconds of an operation that do not shrink with its samples, if it takes ``few`` of a ``share`` of them."""
    return (few - share * (whole.computing + whole.launches)) / (1.0 - share)


def _with_fixed(whole: _Seconds, fixed: float) -> _Seconds:
    seconds = whole.computing + whole.launches
    fixed = min(max(fixed, whole.launches), seconds)
    return _Seconds(seconds - fixed, fixed)


def _longest_chain(graph: Graph, each: Mapping[str, _Seconds], length: Callable[[_Seconds], Any]) -> _Seconds:
    """What operations that each take the result of the one before take together, of all such chains the one of greatest
    ``length``."""
    nothing = _Seconds(0.0, 0.0)
    # By node, the longest chain that ends with it.
    chains: dict[str, _Seconds] = {}
    for node in graph.nodes:
        before = max((chains[value.node] for value in node.operands), default=nothing, key=length)
        own = each.get(node.name, nothing)
        chains[node.name] = _Seconds(before.computing + own.computing, before.launches + own.launches)
    return max(chains.values(), default=nothing, key=length)


def _additions(graph: Graph) -> frozenset[str]:
    """The additions of which a parameter's gradient is the sum."""
    parts, names = gradient_parts(graph), set[str]()
    for path, gradient in graph.gradients.items():
        waiting = [gradient]
        while waiting:
            value = waiting.pop()
            if value not in parts[path]:
                names.add(value.node)
                waiting += graph[value.node].operands
    return frozenset(names)


def searched(
    bounds: Bounds,
    batch: int,
    most_chunks: int,
    solved: Collection[Division],
    seconds: float,
    tried: Iterable[tuple[TriedDivision, Collection[Division]]] = (),
) -> Searched:
    """What a search covered that found a plan of ``seconds``. ``solved``: the divisions whose programs it solved;
    ``tried``: what it knows of these, by the programs that cover them, and of others."""
    every = list(all_divisions(bounds.devices, batch, bounds.pieces, most_chunks))
    possible = [division for division in every if divides(division, batch) or division in solved]
    least = {division: bounds.seconds(division) for division in possible}
    left = [division for division in possible if division not in solved and least[division] < seconds]
    first = min(left, key=lambda division: (least[division], division), default=None)
    return Searched(
        divisions=len(possible),
        indivisible=len(every) - len(possible),
        solved=len(least.keys() & solved),
        excluded=sum(bound >= seconds for division, bound in least.items() if division not in solved),
        # What was found is no bound of what its division could be: in the program, equal layers choose alike.
        bound=min(least.values(), default=0.0),
        first="" if first is None else str(first) or "one device",
        first_bound=0.0 if first is None else least[first],
        tried=tuple(_counted(tried, possible)),
    )


def _counted(
    tried: Iterable[tuple[TriedDivision, Collection[Division]]], possible: Iterable[Division]
) -> Iterator[TriedDivision]:
    """What was ``tried``, the quickest first, with the number of ``possible`` divisions that it covers and none before
    it."""
    left = set(possible)
    for each, covered in sorted(tried, key=lambda pair: (pair[0].seconds, pair[0].described)):
        yield replace(each, divisions=len(left.intersection(covered)))
        left.difference_update(covered)


def covered(inside: PlanRequest, pipeline: int, count: int, chunks: Iterable[int]) -> frozenset[Division]:
    """The divisions that one program covers, that of ``inside`` a stage. An axis of the mesh without a role may be for
    data or tensor ranks."""
    degrees, roles = {(1, 1)}, [role.name for role in inside.roles] or [""] * len(inside.mesh)
    for size, role in zip(inside.mesh, roles, strict=True):
        ways = [(size, 1)] * (role != "tensor") + [(1, size)] * (role != "data")
        degrees = {(data * d, tensor * t) for data, tensor in degrees for d, t in ways}
    return frozenset(Division(pipeline, data, tensor, count, each) for data, tensor in degrees for each in chunks)
