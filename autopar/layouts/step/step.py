"""The step of a layout: its chunks on the pipeline ranks, simulated, with the parts that the busiest rank waits for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autopar.cluster.description import Cluster
from autopar.cost import simulate
from autopar.cost.collective.point_to_point import message_rate
from autopar.cost.pipeline.prices import ChunkPrice, EdgePrice, PipelinePrices
from autopar.layout import Layout
from autopar.layouts.sections.section import Section, counted
from autopar.schedule.named import SCHEDULES, make_schedule

from .optimizer_update import offloading_seconds, updating_seconds
from .pipeline_ranks import chunks_of, shared_weights, summing_seconds
from .section_seconds import SectionTimes

# Microbatches beyond this many rounds of the pipeline repeat each other: the time of a round is extrapolated. A round
# settles later where weights' gradients are delayed, and where ranks with several chunks have microbatches that are no
# multiple of the stages. Steps simulated in full are within 0.2% of this, of small models that wait for messages 2%.
ROUNDS = 2
# Found by comparing with full simulations, see above.
LATE_ROUNDS = 4


class LayoutStep:
    """Prices of one step, kept while they are put together."""

    def __init__(
        self, chunks: Sequence[Sequence[Section]], layout: Layout, microbatches: int, cluster: Cluster
    ) -> None:
        self.chunks, self.layout, self.microbatches, self.cluster = chunks, layout, microbatches, cluster
        self.sections = SectionTimes(layout, microbatches, cluster)
        self.edges = self._edges()
        self.shared = shared_weights(chunks, layout)
        self.prices = self._chunk_prices()

    def _chunk_prices(self) -> list[ChunkPrice]:
        """Of each chunk; those of the same sections between the same links are one."""
        found: dict[object, ChunkPrice] = {}
        prices = []
        for c, chunk in enumerate(self.chunks):
            idle_seconds = self.idle_seconds(c)
            key = tuple(map(id, chunk)), idle_seconds
            if key not in found:
                found[key] = self.chunk_price(chunk, *idle_seconds)
            prices.append(found[key])
        return prices

    def chunk_price(self, chunk: Sequence[Section], before: float, after: float) -> ChunkPrice:
        """``before``, ``after``: seconds of blocking for what comes in and for what goes out."""
        forward, backward = self.sections.chunk_times(chunk)
        reduction = self.sections.reduce(chunk, backward + before + after)
        each = reduction if self.layout.reducing == "microbatch" else 0.0
        half = (backward + each) / 2
        return ChunkPrice(
            forward + before + after,
            half + before + after,
            half,
            backward=2 * half + before + after,
            reduce=reduction - each,
            receive_forward=before,
            receive_backward=after,
        )

    def update(self, rank: int) -> float:
        """Seconds of summing gradients of weights that other ranks hold too, of the optimizer, of gathering what it
        updated, and of bringing states that rest on the host."""
        sections = self.sections_of(rank)
        there = updating_seconds(sections, self.layout, self.cluster)
        there += summing_seconds(rank, self.shared, self.layout, self.cluster)
        return there + self.gathering(rank) + offloading_seconds(sections, self.layout, self.cluster)

    def reducing(self, rank: int) -> float:
        """Seconds of reducing a rank's gradients that nothing hides."""
        held = chunks_of(rank, self.layout)
        if self.layout.reducing == "step":
            return sum(self.prices[c].reduce for c in held)
        alone = (self.sections.chunk_times(self.chunks[c])[1] + sum(self.idle_seconds(c)) for c in held)
        return self.microbatches * (sum(self.prices[c].whole_backward for c in held) - sum(alone))

    def sections_of(self, rank: int) -> list[tuple[Section, int]]:
        """What a rank holds: so many of each section."""
        return counted(section for c in chunks_of(rank, self.layout) for section in self.chunks[c])

    def gathering(self, rank: int) -> float:
        """Seconds of gathering the weights that were updated in shards."""
        if self.layout.zero not in (1, 2):
            return 0.0
        return self.sections.over_data("all_gather", self.sections.weights(self.sections_of(rank)))

    def idle_seconds(self, c: int) -> tuple[float, float]:
        """Seconds for which a rank blocks in forward, and again in backward, while what a chunk shares with the
        one before it and with the one after it is sent, if nothing is computed meanwhile."""
        if "message" in self.layout.overlap:
            return 0.0, 0.0
        before, after = (self.edges.get(ends, EdgePrice()) for ends in ((c - 1, c), (c, c + 1)))
        return before.latency + before.nbytes / before.bandwidth, after.latency + after.nbytes / after.bandwidth

    def fetching(self, rank: int) -> float:
        """Seconds for which each microbatch waits for what layers keep on the host."""
        return sum(sum(self.sections.fetching(self.chunks[c])) for c in chunks_of(rank, self.layout))

    def idle(self, rank: int) -> float:
        """Seconds for which a rank blocks for each microbatch."""
        return 2 * sum(sum(self.idle_seconds(c)) for c in chunks_of(rank, self.layout))

    def _edges(self) -> dict[tuple[int, int], EdgePrice]:
        found = {}
        ranks = SCHEDULES[self.layout.schedule_name].placement(self.layout.pipeline, self.layout.interleave)
        for c in range(1, len(self.chunks)):
            if ranks[c - 1] == ranks[c]:
                continue
            size = self.chunks[c][0].entry
            if self.layout.scatter and not self.layout.sequence_parallel:
                size //= self.layout.tensor
            latency, bandwidth = message_rate(self.cluster, ranks[c - 1], ranks[c], self.layout.stage_devices)
            found[c - 1, c] = EdgePrice(float(size), bandwidth, latency)
        return found

    def seconds(self) -> float:
        """The simulated step; many microbatches are extrapolated from the last round of few."""
        layout, round_size = self.layout, self.layout.pipeline
        rounds, rest = divmod(self.microbatches, round_size)
        settles_late = SCHEDULES[layout.schedule_name].delays or (layout.interleave > 1 and rest)
        enough = LATE_ROUNDS if settles_late else ROUNDS
        if rounds <= enough:
            return self.simulated(self.microbatches)
        few = round_size * enough + rest
        last, before = self.simulated(few), self.simulated(few - round_size)
        return last + (self.microbatches - few) / round_size * (last - before)

    def bound(self) -> float:
        """Seconds that no simulation is much below."""
        ranks = sorted({0, self.layout.pipeline // 2, self.layout.pipeline - 1})
        busiest = max(sum(self.of_rank(rank)) for rank in ranks)
        middle = self.prices[len(self.prices) // 2]
        received = middle.receive_forward + middle.receive_backward
        filling = (self.layout.pipeline - 1) * (middle.forward + middle.whole_backward - received)
        return busiest + filling

    def simulated(self, microbatches: int) -> float:
        update = max(map(self.update, range(self.layout.pipeline)))
        if self.layout.chunks == 1:
            price = self.prices[0]
            return microbatches * (price.forward + price.whole_backward) + price.reduce + update
        schedule = make_schedule(self.layout.schedule_name, self.layout.pipeline, microbatches, self.layout.interleave)
        # Messages for which ranks block are in the prices of chunks.
        edges = self.edges if "message" in self.layout.overlap else {}
        prices = PipelinePrices(tuple(self.prices), edges, update, hides_reductions="gradient" in self.layout.overlap)
        return simulate(schedule, prices).seconds

    def busiest(self) -> tuple[float, float]:
        """Seconds of computing, waiting for the host included, and of communicating of the rank that is busy
        longest."""
        return max(map(self.of_rank, range(self.layout.pipeline)), key=sum)

    def of_rank(self, rank: int) -> tuple[float, float]:
        sections = self.sections_of(rank)
        compute = total = 0.0
        for section, often in sections:
            alone = section.forward + section.backward + self.sections.again(section)
            compute += often * (alone.compute + alone.host + self.sections.adding_up(section))
            total += often * sum(self.sections.times(section))
        updating = updating_seconds(sections, self.layout, self.cluster)
        computed = self.microbatches * compute + updating
        moved = self.update(rank) - updating + self.reducing(rank) + self.microbatches * self.fetching(rank)
        # What is left by rounding is no communication.
        return computed, max(0.0, self.microbatches * (total + self.idle(rank) - compute)) + moved

    def parts(self) -> dict[str, float]:
        rank = max(range(self.layout.pipeline), key=lambda r: sum(self.of_rank(r)))
        sections = self.sections_of(rank)
        offloading = offloading_seconds(sections, self.layout, self.cluster)

        def summed(seconds: Callable[[Section], float]) -> float:
            return self.microbatches * sum(often * seconds(section) for section, often in sections)

        return {
            "forward": summed(lambda s: s.forward.compute),
            "backward": summed(lambda s: s.backward.compute),
            "again": summed(lambda s: self.sections.again(s).compute),
            "tensor": summed(lambda s: (s.forward + s.backward + self.sections.again(s)).communicate),
            "adding up": summed(self.sections.adding_up),
            "exchange": summed(self.sections.exchanges),
            "host": summed(lambda s: (s.forward + s.backward + self.sections.again(s)).host),
            "messages": self.microbatches * self.idle(rank),
            "reduce": self.reducing(rank),
            "update": self.update(rank) - offloading,
            "offload": offloading + self.microbatches * self.fetching(rank),
        }
