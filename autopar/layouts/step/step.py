"""The price of a step of a layout: simulates its chunks on the pipeline ranks, and splits the seconds of the busiest
rank into parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autopar.cluster.description import Cluster
from autopar.cost import simulate
from autopar.cost.collective.point_to_point import message_rate
from autopar.cost.pipeline.prices import ChunkPrice, EdgePrice, PipelinePrices
from autopar.layout import Layout
from autopar.layouts.sections.section import Chunk, Section, counted
from autopar.placement.overlap_windows import HiddenShares, SectionSeconds
from autopar.schedule.named import SCHEDULES, make_schedule

from .optimizer_update import offloading_seconds
from .pipeline_ranks import borrowing_seconds, chunks_of
from .section_seconds import SectionTimes

# After this many rounds of the pipeline rounds repeat each other, so the time of a round is extrapolated. It takes more
# rounds if weights' gradients are delayed, or if ranks have several chunks and the number of microbatches is not a
# multiple of the stages. Steps simulated in full differ by at most 0.2%, those of small models that wait for messages
# by 2%.
ROUNDS = 2
# Found by comparing with full simulations, see above.
LATE_ROUNDS = 4


class LayoutStep:
    """The prices of one step."""

    def __init__(self, chunks: Sequence[Chunk], layout: Layout, microbatches: int, cluster: Cluster) -> None:
        self.chunks, self.layout, self.microbatches, self.cluster = chunks, layout, microbatches, cluster
        exchanged = sum(count * section.exchanged_elements for section, count in counted(chunks))
        self.sections = SectionTimes(layout, microbatches, cluster, exchanged)
        self.ranks = SCHEDULES[layout.schedule_name].placement(layout.pipeline, layout.interleave)
        # A bound needs few of these.
        self._prices: dict[object, ChunkPrice] = {}
        self._rates: dict[tuple[int, int], tuple[float, float]] = {}

    def price(self, c: int) -> ChunkPrice:
        """The price of a chunk. Chunks of the same sections between the same links share one."""
        chunk, idle_seconds = self.chunks[c], self.idle_seconds(c)
        key = chunk.key, idle_seconds
        if key not in self._prices:
            self._prices[key] = self.chunk_price(chunk, *idle_seconds)
        return self._prices[key]

    def chunk_price(self, chunk: Chunk, before: float, after: float) -> ChunkPrice:
        """The price of one chunk; ``before``, ``after``: seconds of blocking for the messages at its two ends."""
        forward, backward = self.sections.chunk_times(chunk)
        reduction, (_, computing) = self.sections.reduction(chunk), self.sections.sides(chunk)
        shares = self.sections.hidden_shares(chunk) if "gradient" in self.layout.overlap else HiddenShares()
        hidden = shares.of_reductions(computing, reduction)
        each = reduction - hidden if self.layout.reducing == "microbatch" else 0.0
        half = (backward + each) / 2
        second = SectionSeconds(min(half, computing.computing / 2))
        once = {
            "reduce": reduction,
            "overlap_weight_gradient": shares.of_reductions(second, reduction),
            "overlap_backward": hidden,
        }
        return ChunkPrice(
            forward + before + after,
            half + before + after,
            half,
            backward=2 * half + before + after,
            receive_forward=before,
            receive_backward=after,
            **(once if self.layout.reducing == "step" else {}),
        )

    def update(self, rank: int) -> float:
        """Seconds of borrowing weights that ranks share, of the optimizer, of gathering the updated weights, and of
        transferring states in host memory."""
        sections = self.sections_of(rank)
        seconds = self.updating(sections)
        seconds += borrowing_seconds(rank, sections, self.layout, self.cluster)
        return seconds + self.gathering(rank) + offloading_seconds(sections, self.layout, self.cluster)

    def updating(self, sections: Sequence[tuple[Section, int]]) -> float:
        """Seconds of the optimizer for sections, each with its number."""
        return sum(count * self.sections.updating(section) for section, count in sections)

    def reducing(self, rank: int) -> float:
        """Exposed seconds of reducing a rank's gradients."""
        held = chunks_of(rank, self.layout)
        if self.layout.reducing == "step":
            return sum(self.price(c).reduce - self.price(c).overlap_backward for c in held)
        alone = (self.sections.chunk_times(self.chunks[c])[1] + sum(self.idle_seconds(c)) for c in held)
        return self.microbatches * (sum(self.price(c).whole_backward for c in held) - sum(alone))

    def sections_of(self, rank: int) -> list[tuple[Section, int]]:
        """The sections of a rank, with the number of each."""
        return counted([self.chunks[c] for c in chunks_of(rank, self.layout)])

    def gathering(self, rank: int) -> float:
        """Seconds of gathering weights that were updated in shards."""
        if self.layout.zero not in (1, 2):
            return 0.0
        return self.sections.in_buckets("all_gather", self.sections_of(rank), self.sections.updated_bytes)

    def idle_seconds(self, c: int) -> tuple[float, float]:
        """Seconds for which a rank blocks in forward, and again in backward, for messages between a chunk and the ones
        before and after it; 0 if messages overlap computation."""
        if "message" in self.layout.overlap:
            return 0.0, 0.0
        before, after = self.edge(c), self.edge(c + 1)
        return before.latency + before.nbytes / before.bandwidth, after.latency + after.nbytes / after.bandwidth

    def fetching(self, rank: int) -> float:
        """Seconds for which each microbatch waits for saved activations in host memory."""
        return sum(sum(self.sections.fetching(self.chunks[c])) for c in chunks_of(rank, self.layout))

    def sharding(self, rank: int) -> float:
        """Exposed seconds of ZeRO-3's collectives for each microbatch."""
        return sum(sum(self.sections.exposed_sharding(self.chunks[c])) for c in chunks_of(rank, self.layout))

    def idle(self, rank: int) -> float:
        """Seconds for which a rank blocks for each microbatch."""
        return 2 * sum(sum(self.idle_seconds(c)) for c in chunks_of(rank, self.layout))

    def edge(self, c: int) -> EdgePrice:
        """The messages between chunk ``c`` and the one before it; nothing where there is none, or both are on a
        rank."""
        if not 0 < c < len(self.chunks) or self.ranks[c - 1] == self.ranks[c]:
            return EdgePrice()
        size, ends = self.chunks[c][0].entry, (self.ranks[c - 1], self.ranks[c])
        if self.layout.scatter and not self.layout.sequence_parallel:
            size //= self.layout.tensor
        if ends not in self._rates:
            self._rates[ends] = message_rate(self.cluster, *ends, self.layout.stage_devices)
        latency, bandwidth = self._rates[ends]
        return EdgePrice(float(size), bandwidth, latency)

    def seconds(self) -> float:
        """Seconds of the simulated step. Many microbatches are extrapolated from the last round of few."""
        layout, round_size = self.layout, self.layout.pipeline
        rounds, remainder = divmod(self.microbatches, round_size)
        settles_late = SCHEDULES[layout.schedule_name].delays or (layout.interleave > 1 and remainder)
        enough = LATE_ROUNDS if settles_late else ROUNDS
        if rounds <= enough:
            return self.simulated(self.microbatches)
        few = round_size * enough + remainder
        last, before = self.simulated(few), self.simulated(few - round_size)
        return last + (self.microbatches - few) / round_size * (last - before)

    def bound(self) -> float:
        """Approximate lower bound of the simulated seconds."""
        ranks = sorted({0, self.layout.pipeline // 2, self.layout.pipeline - 1})
        busiest = max(sum(self.of_rank(rank)) for rank in ranks)
        middle = self.price(len(self.chunks) // 2)
        received = middle.receive_forward + middle.receive_backward
        filling = (self.layout.pipeline - 1) * (middle.forward + middle.whole_backward - received)
        return busiest + filling

    def simulated(self, microbatches: int) -> float:
        update = max(map(self.update, range(self.layout.pipeline)))
        if self.layout.chunks == 1:
            price = self.price(0)
            exposed = price.reduce - price.overlap_backward
            return microbatches * (price.forward + price.whole_backward) + exposed + update
        schedule = make_schedule(self.layout.schedule_name, self.layout.pipeline, microbatches, self.layout.interleave)
        # If ranks block for messages, the prices of chunks include them.
        cuts = (c for c in range(1, len(self.chunks)) if self.ranks[c - 1] != self.ranks[c])
        edges = {(c - 1, c): self.edge(c) for c in cuts} if "message" in self.layout.overlap else {}
        hides, hides_reductions = self.cluster.overlaps, "gradient" in self.layout.overlap
        chunks = tuple(map(self.price, range(len(self.chunks))))
        prices = PipelinePrices(chunks, edges, update, hides=hides, hides_reductions=hides_reductions)
        return simulate(schedule, prices).seconds

    def busiest(self) -> tuple[float, float]:
        """Seconds of computation, including waiting for the host, and of communication of the rank that is busy
        longest."""
        return max(map(self.of_rank, range(self.layout.pipeline)), key=sum)

    def of_rank(self, rank: int) -> tuple[float, float]:
        sections = self.sections_of(rank)
        compute = total = 0.0
        for section, count in sections:
            seconds = section.forward + section.backward + self.sections.again(section)
            compute += count * (seconds.compute + seconds.host + self.sections.adding_up(section))
            total += count * sum(self.sections.times(section))
        total += self.sharding(rank)
        updating = self.updating(sections)
        computed = self.microbatches * compute + updating
        moved = self.update(rank) - updating + self.reducing(rank) + self.microbatches * self.fetching(rank)
        # Rounding may leave less than nothing.
        return computed, max(0.0, self.microbatches * (total + self.idle(rank) - compute)) + moved

    def parts(self) -> dict[str, float]:
        rank = max(range(self.layout.pipeline), key=lambda r: sum(self.of_rank(r)))
        sections = self.sections_of(rank)
        offloading = offloading_seconds(sections, self.layout, self.cluster)

        def summed(seconds: Callable[[Section], float]) -> float:
            return self.microbatches * sum(count * seconds(section) for section, count in sections)

        return {
            "forward": summed(lambda s: s.forward.compute),
            "backward": summed(lambda s: s.backward.compute),
            "again": summed(lambda s: self.sections.again(s).compute),
            "tensor": summed(lambda s: (s.forward + s.backward + self.sections.again(s)).communicate),
            "adding up": summed(self.sections.adding_up),
            "exchange": summed(self.sections.exchanges),
            "host": summed(lambda s: (s.forward + s.backward + self.sections.again(s)).host),
            "weights": self.microbatches * self.sharding(rank),
            "messages": self.microbatches * self.idle(rank),
            "reduce": self.reducing(rank),
            "update": self.update(rank) - offloading,
            "offload": offloading + self.microbatches * self.fetching(rank),
        }
