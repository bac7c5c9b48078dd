"""Seconds of one microbatch in a section of a layout, and of the collectives over data ranks for its weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain
from typing import TypeVar

from autopar.cluster.description import Cluster
from autopar.cost import bucketed_seconds, collective_seconds
from autopar.cost.collective.collective import copying_seconds
from autopar.cost.overlap import at_once, taken_by_messages
from autopar.layout import MASTER_BYTES, Layout
from autopar.layouts.sections.expert_all_to_all import exchange_seconds
from autopar.layouts.sections.section import Chunk, Seconds, Section, Weight
from autopar.placement.overlap_windows import HiddenShares, SectionSeconds, shares_of_sizes
from autopar.placement.prices import BUCKET_BYTES, bucket_bytes

from .chunks import recompute_seconds
from .memory import gathered_bytes, gradient_bytes, offloaded_bytes
from .optimizer_update import updating_seconds

Result = TypeVar("Result")
# Buckets have at least so many bytes for each of the ranks that reduce them, as in Megatron-Core (a million elements
# in fp32; `DistributedDataParallelConfig.bucket_size`): the more ranks, the longer a collective takes to start. The
# runtime's do not grow, so a plan of many data ranks pays more.
BYTES_OF_A_RANK = 4_000_000
# The number of pieces of a collective that overlaps the product next to it: one of them is exposed.
# Chosen: Transformer Engine's default num_splits where it overlaps by pieces; not fitted.
PIECES = 4

# Fields on which no section's seconds depend: they say how layers are put on ranks, or what is kept apart.
_OF_RANKS = ("pipeline", "interleave", "schedule", "cuts", "embedding_as_layers", "head_as_layers", "recompute")
_FIELDS = tuple(name for name in Layout.__dataclass_fields__ if name not in (*_OF_RANKS, "given"))
# What of a section does not depend on recomputation and microbatches either.
_OF_STORED = frozenset(("update", "all_gather", "all_reduce", "reduce_scatter"))


@lru_cache(maxsize=1 << 14)
def _identity(*_: object) -> object:
    """The same object for the same values: a key whose hash takes no time."""
    return object()


class SectionTimes:
    """Seconds of sections under a layout; ``microbatches``: how many a data rank computes in a step; ``exchanged``:
    elements of all unsharded gradients."""

    def __init__(self, layout: Layout, microbatches: int, cluster: Cluster, exchanged: int) -> None:
        self.layout, self.microbatches, self.cluster, self.exchanged = layout, microbatches, cluster, exchanged
        self.taken = taken_by_messages(cluster)
        # What sections take is computed once for all layouts that are alike in these.
        every = {name: getattr(layout, name) for name in _FIELDS}
        self._stored = _identity(*every.values(), cluster, exchanged)
        self._key = _identity(self._stored, layout.recompute, microbatches)
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
        return sum(self.over_group(kind, experts, size) for experts, size in sizes.items() if size)

    def over_group(self, kind: str, experts: int, nbytes: float) -> float:
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
        bucket = bucket_bytes(nbytes, self.exchanged / weight.whole, most=max(BUCKET_BYTES, BYTES_OF_A_RANK * mesh[0]))
        packing = copying_seconds(self.cluster.device, nbytes)
        return packing + bucketed_seconds(self.cluster, mesh, kind, (0,), nbytes, bucket)

    def exchange(self, section: Section) -> float:
        """Seconds of sending the rows of a section to their experts and back."""
        return sum(2 * exchange_seconds(self.cluster, self.layout, block) for block in section.blocks)

    def again(self, section: Section) -> Seconds:
        return self._once("again", section, lambda each: recompute_seconds(each, self.layout))

    def exchanges(self, section: Section) -> float:
        """Seconds of the exchanges of forward, of backward and of recomputation."""
        passes = 3 if section.is_layer and self.layout.recompute in ("full", "operations") else 2
        return passes * self.exchange(section)

    def reduced_bytes(self, weight: Weight) -> float:
        """Bytes of a gradient in the dtype in which it is sent."""
        if self.layout.reduction != "all-fp32":
            return gradient_bytes(weight, self.layout)
        return weight.trained * weight.elements * MASTER_BYTES

    def updated_bytes(self, weight: Weight) -> float:
        """Bytes of an updated weight in the dtype in which it is sent."""
        return weight.trained * self._sharded_bytes(weight)

    def times(self, section: Section) -> tuple[float, float]:
        """Seconds of forward and backward of one section, exchanges of rows included, without ZeRO-3's collectives."""
        return self._once("times", section, self._times_of)

    def updating(self, section: Section) -> float:
        """Seconds of the optimizer for one section."""
        return self._once("update", section, lambda each: updating_seconds(each, self.layout, self.cluster))

    def _times_of(self, section: Section) -> tuple[float, float]:
        exchange = self.exchange(section)
        forward = self.exchanging(self.total(section.forward), exchange)
        back = self.exchanges(section) - exchange
        backward = self.exchanging(self.total(section.backward + self.again(section)), back)
        return forward, backward + self.adding_up(section)

    def sharded(self, section: Section) -> tuple[float, float]:
        """Seconds of the collectives of ZeRO-3 in forward and in backward: gathers of weights, and scatters of their
        gradients."""
        return self._once("weights", section, self._sharded) if self.layout.zero >= 3 else (0.0, 0.0)

    def _sharded(self, section: Section) -> tuple[float, float]:
        gather = self.gather(section)
        again = gather if section.runs_backward else 0.0
        if self.layout.gathers == "tensor":
            again += self.gather_again(section)
        scatter = self.over_data("reduce_scatter", section.weights, lambda weight: gradient_bytes(weight, self.layout))
        return gather, again + scatter

    def gather_again(self, section: Section) -> float:
        """Seconds of gathering weights one by one for recomputation: all weights of layers that are recomputed in full,
        otherwise those that recomputed operations read."""
        if not self.again(section).compute:
            return 0.0
        if section.is_layer and self.layout.recompute in ("full", "operations"):
            return self.gather(section)
        ways = {"recomputed", self.layout.recompute if section.is_layer else "none"}
        taken = tuple(weight for weight in (*section.weights, *section.lent) if weight.again & ways)
        return self.gather(replace(section, weights=taken, lent=()))

    def gather(self, section: Section) -> float:
        """Seconds of gathering the weights that a section reads, together or one by one."""
        every = (*section.weights, *section.lent)
        groups = [[weight] for weight in every] if self.layout.gathers == "tensor" else [every]
        return sum(self.over_data("all_gather", group, self._sharded_bytes) for group in groups)

    def _sharded_bytes(self, weight: Weight) -> float:
        return gathered_bytes(weight, self.layout)

    def adding_up(self, section: Section) -> float:
        """Seconds in which the gradients of a microbatch are added to those of earlier ones, on average over all."""
        seconds = section.accumulating
        if not self.layout.gradient_accumulation_fusion:
            experts = [weight for weight in section.trained if weight.experts]
            moved = sum(w.elements * w.itemsize + 2 * gradient_bytes(w, self.layout) for w in experts)
            seconds += moved / self.cluster.device.memory_bandwidth
        return seconds * (self.microbatches - 1) / self.microbatches

    def exchanging(self, seconds: float, exchange: float) -> float:
        """Seconds with exchanges of rows, which follow the rest of the section, or overlap that of another microbatch
        and occupy some of its processors."""
        if "expert" not in self.layout.overlap:
            return seconds + exchange
        return at_once(seconds, exchange, self.taken)

    def total(self, seconds: Seconds) -> float:
        """Seconds of computation and communication in turn, or overlapped piece by piece."""
        if "tensor" not in self.layout.overlap:
            return seconds.total
        both = (seconds.compute, seconds.communicate)
        return at_once(*both, self.taken) + min(both) / PIECES + seconds.host

    def chunk_times(self, chunk: Chunk) -> tuple[float, float]:
        """Seconds of forward and backward of a chunk, without blocking for messages."""
        forward, backward = self._alone(chunk)
        forward_waits, backward_waits = self.fetching(chunk)
        return forward + forward_waits, backward + backward_waits

    def _alone(self, chunk: Chunk) -> tuple[float, float]:
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
            sides = self.sides(chunk)
            shares = self.hidden_shares(chunk) if "weight" in self.layout.overlap else HiddenShares()
            forward, backward = (side.gathers - shares.of_gathers(side) for side in sides)
            self._sharding[key] = forward, backward
        return self._sharding[key]

    def sides(self, chunk: Chunk) -> tuple[SectionSeconds, SectionSeconds]:
        """Forward and backward of a chunk: the computing that may overlap messages, and ZeRO-3's collectives."""
        forward = backward = SectionSeconds()
        for section, count in chunk.counted:
            back = section.backward + self.again(section)
            first, second = section.forward.compute + section.forward.host, back.compute + back.host
            gather, scatter = self.sharded(section)
            forward += SectionSeconds(count * first, count * gather)
            backward += SectionSeconds(count * (second + self.adding_up(section)), count * scatter)
        return forward, backward

    def fetching(self, chunk: Chunk) -> tuple[float, float]:
        """Seconds for which forward and backward of a chunk wait for saved activations in host memory."""
        offloaded, _ = offloaded_bytes(chunk, self.layout)
        if not offloaded:
            return 0.0, 0.0
        transfer = offloaded / self.cluster.device.host_bandwidth
        forward, backward = (max(0.0, transfer - alone) for alone in self._alone(chunk))
        return forward, backward

    def reduction(self, chunk: Chunk) -> float:
        """Seconds of reducing a chunk's gradients, of a step or of one microbatch."""
        if self.layout.zero >= 3:
            return 0.0
        divided = self.layout.zero and self.layout.reduction == "scatter"
        return self.in_buckets("reduce_scatter" if divided else "all_reduce", chunk.counted, self.reduced_bytes)

    def hidden_shares(self, chunk: Chunk) -> HiddenShares:
        """The shares of a chunk's messages that may overlap its computing, as of a chunk of a plan."""
        key = chunk.key
        if key not in self._shares:
            distinct = ((weight, count) for section, count in chunk.counted for weight in section.trained)
            exchanged = sum(n * w.whole * self.layout.gradient_itemsize(w.itemsize) for w, n in distinct)
            sizes = chain.from_iterable(section.whole_sizes for section in chunk)
            self._shares[key] = shares_of_sizes(sizes, exchanged, self.cluster)
        return self._shares[key]
