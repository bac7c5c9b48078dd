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

Stages of unequal numbers of devices (:meth:`Bounds.seconds_of_blocks`) are bounded alike: let stage s launch for
l[s] seconds, of L in all, and do the part w[s] of the computing, at most v[s] parts a second. It takes at least
l[s] + w[s] / v[s], so the busiest takes at least the average of these with the weights v[s] / sum v. That is
(sum v[s] l[s] + 1) / sum v, and least where the slowest stage has all launches: (min v L + 1) / sum v.

Nothing is assumed of idling, of messages, or of what lack of memory costs: in a bound all of it is free. Ranks that
share processors compute quicker while others wait, at most by what the processors allow.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from autopar.cluster.description import Cluster
from autopar.ir.graph import Graph
from autopar.ir.searched import Searched
from autopar.passes.pipeline.chunk_assignment import gradient_parts
from autopar.passes.pipeline.data_only import data_only_nodes
from autopar.placement.fused_kernels import FusedKernels
from autopar.planner.alone import seconds_alone
from autopar.planner.request import PlanRequest, kernels_of

from .stage_devices import kinds_of_blocks


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
    counts = _divisors(batch)
    for pipeline in (n for n in _divisors(devices) if n <= pieces):
        for data in _divisors(devices // pipeline):
            for microbatches in counts:
                for interleave in range(1, min(most_chunks, pieces // pipeline) + 1 if pipeline > 1 else 2):
                    yield Division(pipeline, data, devices // (pipeline * data), microbatches, interleave)


def divides(division: Division, batch: int) -> bool:
    """Whether each data rank has the same whole samples of each microbatch."""
    return batch % (division.data * division.microbatches) == 0


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


@dataclass(frozen=True)
class Bounds:
    """The bounds of divisions of ``devices`` devices; ``graph``: the whole step at the whole batch, to be cut;
    ``fused``: its kernels, if pieces of it are compiled."""

    cluster: Cluster
    devices: int
    graph: Graph
    fused: FusedKernels | None = None

    @property
    def pieces(self) -> int:
        """The operations between which the model could be cut."""
        return sum(node.phase == "forward" and not node.is_placeholder for node in self.graph.nodes)

    def seconds(self, division: Division) -> float:
        """What a step takes at least."""
        stages, count = division.pipeline, division.microbatches
        average = count * self._launches / stages + 1.0 / self._speed(range(self.devices))
        return max(average, self._chain(self.devices // stages, count)) / self._quickest

    def seconds_of_blocks(self, blocks: Sequence[range], microbatches: int) -> float:
        """What a step takes at least whose stages are ``blocks`` of consecutive devices, which may be unequal."""
        speeds = [self._speed(block) for block in blocks]
        average = (min(speeds) * microbatches * self._launches + 1.0) / sum(speeds) if math.inf not in speeds else 0.0
        return max(average, self._chain(max(map(len, blocks)), microbatches)) / self._quickest

    @property
    def _launches(self) -> float:
        """Seconds to launch every operation once."""
        return min(kind.launches for kind in self._kinds.values())

    def _chain(self, devices: int, microbatches: int) -> float:
        """Seconds of the longest chain of a microbatch on stages of at most so many ``devices``."""
        parts = devices * microbatches
        return min(kind.chain_launches + kind.chain / parts for kind in self._kinds.values())

    @cached_property
    def _kind_of(self) -> tuple[int, ...]:
        """For each device, the first of its kind."""
        each = [range(device, device + 1) for device in range(self.devices)]
        return kinds_of_blocks(self.cluster, each) if self.cluster.groups else (0,) * self.devices

    @cached_property
    def _kinds(self) -> Mapping[int, _Alone]:
        """What the step takes on one device of each kind, by the first of them."""
        firsts = dict.fromkeys(self._kind_of)
        return {first: _alone(self.cluster.at(first, 1), self.graph, self.fused) for first in firsts}

    def _speed(self, devices: range) -> float:
        """Steps a second that some devices can compute together, without launches."""
        each = (self._kinds[self._kind_of[device]].computing for device in devices)
        return sum(1.0 / seconds if seconds else math.inf for seconds in each)

    @cached_property
    def _quickest(self) -> float:
        """How much quicker than priced a rank is at most, because others wait."""
        cluster = self.cluster
        if cluster.sharing == cluster.cores:
            return 1.0
        return max(1.0, cluster.speed(1) / cluster.speed(min(cluster.sharing, self.devices)))


def bounds_of(request: PlanRequest, graph: Graph) -> Bounds:
    """The bounds of the divisions of a request whose step ``graph`` will be cut."""
    cluster, devices, fused = request.cluster, math.prod(request.mesh), kernels_of(request, graph)
    make = partial(Bounds, cluster, devices, graph, fused)
    return request.shared.once("bounds", (cluster, graph, fused), devices, make=make)


@dataclass(frozen=True, slots=True)
class _Alone:
    """Seconds of a step on one device, ``computing`` and ``launches`` apart, and those of its longest chain."""

    computing: float
    launches: float
    chain: float
    chain_launches: float


def _alone(cluster: Cluster, graph: Graph, fused: FusedKernels | None) -> _Alone:
    each, left_out = seconds_alone(cluster, graph, fused), data_only_nodes(graph) | _additions(graph)
    computing = launching = 0.0
    # By node, the longest chain that ends with it: seconds of computing and of launching.
    chains: dict[str, tuple[float, float]] = {}
    for node in graph.nodes:
        before = max((chains[value.node] for value in node.operands), default=(0.0, 0.0))
        seconds, launches = (0.0, 0.0) if node.name in left_out else each.get(node.name, (0.0, 0.0))
        launches = min(launches, seconds)  # What is only viewed launches nothing.
        computing, launching = computing + seconds - launches, launching + launches
        chains[node.name] = before[0] + seconds - launches, before[1] + launches
    return _Alone(computing, launching, *max(chains.values(), default=(0.0, 0.0)))


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
) -> Searched:
    """What a search covered that found a plan of ``seconds``. ``solved``: the divisions whose programs it solved."""
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
    )


def covered(inside: PlanRequest, pipeline: int, count: int, chunks: Iterable[int]) -> frozenset[Division]:
    """The divisions that one program covers, that of ``inside`` a stage. An axis of the mesh without a role may be for
    data or tensor ranks."""
    degrees, roles = {(1, 1)}, [role.name for role in inside.roles] or [""] * len(inside.mesh)
    for size, role in zip(inside.mesh, roles, strict=True):
        ways = [(size, 1)] * (role != "tensor") + [(1, size)] * (role != "data")
        degrees = {(data * d, tensor * t) for data, tensor in degrees for d, t in ways}
    return frozenset(Division(pipeline, data, tensor, count, each) for data, tensor in degrees for each in chunks)
