"""Seconds of one microbatch in a section of a layout, and of the collectives over data ranks for its weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from functools import lru_cache, partial
from itertools import chain
from typing import Literal, TypeVar, cast

from autopar.cluster.description import Cluster
from autopar.cost import bucketed_seconds, collective_seconds
from autopar.cost.collective.collective import copying_seconds
from autopar.cost.overlap import taken_by_messages
from autopar.cost.update import casting_seconds, update_seconds
from autopar.given_fields import own_fields
from autopar.layout import Layout
from autopar.passes.lower.emit import IN_FLIGHT
from autopar.placement.overlap_windows import HiddenShares, SectionSeconds, shares_of_sizes
from autopar.placement.prices import BUCKET_BYTES, bucket_bytes
from benchmarks.emulator.sections.expert_all_to_all import exchange_seconds
from benchmarks.emulator.sections.section import Chunk, Seconds, Section, Weight
from benchmarks.emulator.stored import gradient_itemsize, moment_itemsize, repeats_layers

from .memory import LayoutMemory

Result = TypeVar("Result")
# Buckets have at least so many bytes for each of the ranks that reduce them, as in Megatron-Core (a million elements
# in fp32; `DistributedDataParallelConfig.bucket_size`): the more ranks, the longer a collective takes to start. The
# runtime's do not grow, so a plan of many data ranks pays more.
BYTES_OF_A_RANK = 4_000_000
# What of a section does not depend on recomputation and microbatches either.
_OF_STORED = frozenset(("update", "all_gather", "all_reduce", "reduce_scatter"))


@lru_cache(maxsize=1 << 14)
def _identity(*_: object) -> object:
    """The same object for the same values: a key whose hash takes no time."""
    return object()


@lru_cache
def _names(kind: Hashable) -> tuple[str, ...]:
    """The fields of layouts of a kind but those on which no section's seconds depend: how layers are put on ranks, and
    what is kept apart."""
    of_ranks = "pipeline", "interleave", "schedule", "recompute"
    return tuple(field.name for field in own_fields(kind) if field.name not in of_ranks)


class SectionTimes:
    """Seconds of sections under a layout, whose bytes are ``memory``'s; ``microbatches``: how many a data rank computes
    in a step; ``exchanged``: elements of all unsharded gradients."""

    def __init__(self, memory: LayoutMemory, microbatches: int, cluster: Cluster, exchanged: int) -> None:
        self.memory, self.microbatches, self.cluster, self.exchanged = memory, microbatches, cluster, exchanged
        self.layout, self.taken = memory.layout, taken_by_messages(cluster)
        # What sections take is computed once for all layouts that are alike in these.
        every = (getattr(self.layout, name) for name in _names(cast(Hashable, type(self.layout))))
        self._stored = _identity(*every, cluster, exchanged)
        self._key = _identity(self._stored, self.layout.recompute, microbatches)
        self._sharding: dict[tuple[int, ...], tuple[float, float]] = {}
        self._shares: dict[tuple[int, ...], HiddenShares] = {}

    def _once(self, what: str, section: Section, compute: Callable[[Section], Result]) -> Result:
        key = what, self._stored if what in _OF_STORED else self._key
        return section.once(key, partial(compute, section))

    def over_data(self, kind: str, weights: Iterable[Weight], nbytes: Callable[[Weight], float]) -> float:
        """Seconds of collectives over the data and context ranks that have the same weights, one for each number of
        ranks among which experts are divided; ``nbytes``: of each weight."""
        sizes = Counter[int]()
        for weight in weights:
            sizes[weight.experts] += nbytes(weight)  # type: ignore[assignment]
        return sum(self._over_group(kind, experts, size) for experts, size in sizes.items() if size)

    def _over_group(self, kind: str, experts: int, nbytes: float) -> float:
        return collective_seconds(self.cluster, self._mesh(experts), kind, (0,), nbytes)

    def _mesh(self, experts: int) -> tuple[int, ...]:
        """The devices of a stage, those first that have the same weights."""
        degree = max(1, experts)
        return self.layout.data * self.layout.context // degree, degree, self.layout.tensor

    def in_buckets(
        self, kind: str, sections: Iterable[tuple[Section, int]], nbytes: Callable[[Weight], float]
    ) -> float:
        """Seconds of exchanging ``nbytes`` of each weight once a step, packed into buckets as in a plan. All exchanges
        of a ``kind`` are of the same bytes."""

        def exchanging(section: Section) -> float:
            return sum(self._bucketed(kind, weight, nbytes(weight)) for weight in section.weights)

        return sum(count * self._once(kind, section, exchanging) for section, count in sections)

    def _bucketed(self, kind: str, weight: Weight, nbytes: float) -> float:
        mesh = self._mesh(weight.experts)
        if not nbytes or mesh[0] == 1:
            return 0.0
        bucket = bucket_bytes(nbytes, self.exchanged / weight.whole, most=self._most_of_a_bucket(weight))
        packing = copying_seconds(self.cluster.device, nbytes)
        return packing + bucketed_seconds(self.cluster, mesh, kind, (0,), nbytes, bucket)

    def _most_of_a_bucket(self, weight: Weight) -> int:
        return max(BUCKET_BYTES, BYTES_OF_A_RANK * self._mesh(weight.experts)[0])

    def exchange(self, section: Section) -> float:
        """Seconds of sending the rows of a section to their experts and back."""
        return sum(2 * exchange_seconds(self.cluster, self.layout, block, block.rows) for block in section.blocks)

    def again(self, section: Section) -> Seconds:
        """The cost of recomputing a section in backward."""
        return self._once("again", section, self.recomputing) if section.runs_backward else Seconds()

    def recomputing(self, section: Section) -> Seconds:
        """:meth:`again` of a section that runs backward."""
        return recompute_seconds(section, self.layout)

    def exchanges(self, section: Section) -> float:
        """Seconds of the exchanges of forward, of backward and of recomputation."""
        passes = 3 if section.is_layer and repeats_layers(self.layout) else 2
        return passes * self.exchange(section)

    def updated_bytes(self, weight: Weight) -> float:
        """Bytes of an updated weight in the dtype in which it is sent."""
        return weight.trained * self.memory.gathered_bytes(weight)

    def times(self, section: Section) -> tuple[float, float]:
        """Seconds of forward and backward of one section, exchanges of rows included, without ZeRO-3's collectives."""
        return self._once("times", section, self._times_of)

    def updating(self, section: Section) -> float:
        """Seconds in which the optimizer updates the weights of a section, one after the other."""
        return self._once("update", section, lambda each: sum(map(self._updating, each.trained)))

    def _updating(self, weight: Weight) -> float:
        """Seconds of one weight. If a weight is a copy of a master weight, it is written apart."""
        if weight.owner is not None:
            return 0.0
        memory, device = self.memory, self.cluster.device
        shards = memory.data_ranks(weight) if self.layout.zero else 1
        elements, value = weight.elements / shards, memory.stored_bytes(weight) / shards
        moments = elements * moment_itemsize(self.layout)
        seconds = update_seconds(device, memory.gradient_bytes(weight) / shards, value, moments)
        return seconds + (casting_seconds(device, value, elements * weight.itemsize) if memory.has_copies else 0.0)

    def _times_of(self, section: Section) -> tuple[float, float]:
        exchange, (forward, backward) = self.exchange(section), self.alone(section)
        back = self.exchanging(backward, self.exchanges(section) - exchange)
        return self.exchanging(forward, exchange), back + self.adding_up(section)

    def alone(self, section: Section) -> tuple[float, float]:
        """Seconds of forward and of backward without exchanges of rows: computing and communicating in turn."""
        return section.forward.total, (section.backward + self.again(section)).total

    def sharded(self, section: Section) -> tuple[float, float]:
        """Seconds of the collectives of ZeRO-3 in forward and in backward: gathers of weights, and scatters of their
        gradients."""
        return self._once("weights", section, self.sharding) if self.layout.zero >= 3 else (0.0, 0.0)

    def sharding(self, section: Section) -> tuple[float, float]:
        """:meth:`sharded` of a section whose weights ZeRO-3 divides."""
        gather = self.gather((*section.weights, *section.lent))
        scatter = self.over_data("reduce_scatter", section.weights, self.memory.gradient_bytes)
        return gather, (gather if section.runs_backward else 0.0) + scatter

    def gather(self, weights: Iterable[Weight]) -> float:
        """Seconds of gathering weights together."""
        return self.over_data("all_gather", weights, self.memory.gathered_bytes)

    def adding_up(self, section: Section) -> float:
        """Seconds in which the gradients of a microbatch are added to those of earlier ones, on average over all."""
        return self.accumulating(section) * (self.microbatches - 1) / self.microbatches

    def accumulating(self, section: Section) -> float:
        """Seconds in which the gradients of one microbatch are added to those of an earlier one."""
        return section.accumulating

    def exchanging(self, seconds: float, exchange: float) -> float:
        """Seconds with exchanges of rows, which follow the rest of the section."""
        return seconds + exchange

    def chunk_times(self, chunk: Chunk) -> tuple[float, float]:
        """Seconds of forward and backward of a chunk, without blocking for messages."""
        forward, backward = (
            sum(count * self.times(section)[phase] for section, count in chunk.counted) for phase in (0, 1)
        )
        gathering, scattering = self.exposed_sharding(chunk)
        return forward + gathering, backward + scattering

    def exposed_sharding(self, chunk: Chunk) -> tuple[float, float]:
        """Exposed seconds of ZeRO-3's collectives in forward and in backward."""
        if self.layout.zero < 3:
            return 0.0, 0.0
        key = chunk.key
        if key not in self._sharding:
            shares = self.hidden_shares(chunk, "weight")
            forward, backward = (side.gathers - shares.of_gathers(side) for side in self.sides(chunk))
            self._sharding[key] = forward, backward
        return self._sharding[key]

    def sides(self, chunk: Chunk) -> tuple[SectionSeconds, SectionSeconds]:
        """Forward and backward of a chunk: the computing that may overlap messages, and ZeRO-3's collectives."""
        forward = backward = SectionSeconds()
        for section, count in chunk.counted:
            back = (section.backward + self.again(section)).compute + self.adding_up(section)
            gather, scatter = self.sharded(section)
            forward += SectionSeconds(count * section.forward.compute, count * gather)
            backward += SectionSeconds(count * back, count * scatter)
        return forward, backward

    def reduction(self, chunk: Chunk) -> float:
        """Seconds of reducing a chunk's gradients."""
        return 0.0 if self.layout.zero >= 3 else self.in_buckets(self.reduces_by, chunk.counted, self.reduced_bytes)

    @property
    def reduces_by(self) -> str:
        """The collective that reduces gradients once a step."""
        return "reduce_scatter" if self.layout.zero else "all_reduce"

    def reduced_bytes(self, weight: Weight) -> float:
        """Bytes of a gradient in the dtype in which it is sent."""
        return self.memory.gradient_bytes(weight)

    def first_buckets(self, chunk: Chunk) -> float:
        """Seconds of the buckets of gradients that fill first in backward, as many as may be in flight at once, as in a
        plan (:func:`autopar.search.stage_prices.chunk_price.first_buckets_seconds`): the last weights come first."""
        if self.layout.zero >= 3:
            return 0.0
        filling: dict[int, tuple[float, float]] = {}
        full: list[float] = []
        for weight in (weight for section in reversed(chunk) for weight in reversed(section.weights)):
            sent = self.reduced_bytes(weight)
            nbytes, seconds = filling.pop(weight.experts, (0.0, 0.0))
            group = nbytes + sent, seconds + self._bucketed(self.reduces_by, weight, sent)
            if group[0] >= self._most_of_a_bucket(weight):
                full.append(group[1])
            else:
                filling[weight.experts] = group
            if len(full) == IN_FLIGHT:
                break
        return sum(full)

    def hidden_shares(self, chunk: Chunk, sent: Literal["weight", "gradient"]) -> HiddenShares:
        """The shares of a chunk's messages that may overlap its computing, as of a chunk of a plan; ``sent``: what the
        messages are of."""
        key = chunk.key
        if key not in self._shares:
            distinct = ((weight, count) for section, count in chunk.counted for weight in section.trained)
            exchanged = sum(n * w.whole * gradient_itemsize(self.layout, w.itemsize) for w, n in distinct)
            sizes = chain.from_iterable(section.whole_sizes for section in chunk)
            self._shares[key] = shares_of_sizes(sizes, exchanged, self.cluster)
        return self._shares[key]


def recompute_seconds(section: Section, layout: Layout) -> Seconds:
    """The cost of recomputing a section that runs backward."""
    if not section.is_layer or layout.recompute == "none":
        return Seconds()
    if layout.recompute == "full":
        return section.forward
    recompute: str = layout.recompute  # A recipe has further values.
    return section.inside + section.rematerialised if recompute == "elementwise" else section.inside
