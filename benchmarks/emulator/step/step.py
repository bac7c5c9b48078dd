"""The price of a step of a layout: simulates its chunks on the pipeline ranks, and splits the seconds of the busiest
rank into parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autopar.cost import simulate
from autopar.cost.collective.point_to_point import message_rate
from autopar.cost.pipeline.prices import ChunkPrice, EdgePrice, PipelinePrices
from autopar.placement.overlap_windows import SectionSeconds
from autopar.schedule.named import SCHEDULES, make_schedule
from benchmarks.emulator.sections.section import Chunk, Section, counted

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
    """The prices of one step, whose sections take ``times``."""

    def __init__(self, chunks: Sequence[Chunk], times: SectionTimes) -> None:
        self.chunks, self.times, self.layout = chunks, times, times.layout
        self.microbatches, self.cluster = times.microbatches, times.cluster
        self.ranks = SCHEDULES[self.layout.schedule_name].placement(self.layout.pipeline, self.layout.interleave)
        # A bound needs few of these.
        self._prices: dict[object, ChunkPrice] = {}
        self._rates: dict[tuple[int, int], tuple[float, float]] = {}

    def price(self, c: int) -> ChunkPrice:
        """The price of a chunk. Chunks of the same sections share one."""
        key = self.chunks[c].key
        if key not in self._prices:
            self._prices[key] = self.chunk_price(self.chunks[c])
        return self._prices[key]

    def chunk_price(self, chunk: Chunk) -> ChunkPrice:
        """The price of one chunk, whose messages overlap computing."""
        forward, backward = self.times.chunk_times(chunk)
        reduction, (_, computing) = self.times.reduction(chunk), self.times.sides(chunk)
        shares = self.times.hidden_shares(chunk, "gradient")
        second = SectionSeconds(min(backward / 2, computing.computing / 2))
        return ChunkPrice(
            forward,
            backward / 2,
            backward / 2,
            reduce=reduction,
            overlap_weight_gradient=shares.of_reductions(second, reduction),
            overlap_backward=shares.of_reductions(computing, reduction),
            unawaited=shares.reductions * self.times.first_buckets(chunk),
        )

    def update(self, rank: int) -> float:
        """Seconds of borrowing weights that ranks share, of the optimizer, of gathering the updated weights, and of
        transferring states in host memory."""
        sections = self.sections_of(rank)
        borrowing = borrowing_seconds(rank, sections, self.times.memory, self.cluster)
        return self.updating(sections) + borrowing + self.gathering(rank) + self.offloading(sections)

    def updating(self, sections: Sequence[tuple[Section, int]]) -> float:
        """Seconds of the optimizer for sections, each with its number."""
        return sum(count * self.times.updating(section) for section, count in sections)

    def offloading(self, sections: Sequence[tuple[Section, int]]) -> float:
        """Seconds of fetching states from the host and returning them, one weight after the other, overlapped by
        nothing."""
        if not self.layout.offload:
            return 0.0
        states, device = self.times.memory.resting_states, self.cluster.device
        sizes = ((states(weight), count) for section, count in sections for weight in section.trained)
        return sum(2 * count * device.host_transfer(nbytes) for nbytes, count in sizes)

    def reducing(self, rank: int) -> float:
        """Exposed seconds of reducing a rank's gradients."""
        return sum(self.price(c).reduce - self._hidden(c) for c in chunks_of(rank, self.layout))

    def _hidden(self, c: int) -> float:
        """Seconds of a chunk's reductions that its last backward hides: after it all ranks but the first one's still
        send the gradient of their inputs."""
        price = self.price(c)
        return price.overlap_backward if c == 0 else min(price.overlap_backward, price.unawaited)

    def sections_of(self, rank: int) -> list[tuple[Section, int]]:
        """The sections of a rank, with the number of each."""
        return counted([self.chunks[c] for c in chunks_of(rank, self.layout)])

    def gathering(self, rank: int) -> float:
        """Seconds of gathering weights that were updated in shards."""
        if self.layout.zero not in (1, 2):
            return 0.0
        return self.times.in_buckets("all_gather", self.sections_of(rank), self.times.updated_bytes)

    def sharding(self, rank: int) -> float:
        """Exposed seconds of ZeRO-3's collectives for each microbatch."""
        return sum(sum(self.times.exposed_sharding(self.chunks[c])) for c in chunks_of(rank, self.layout))

    def edge(self, c: int) -> EdgePrice:
        """The messages between chunk ``c`` and the one before it; nothing where there is none, or both are on a
        rank."""
        if not 0 < c < len(self.chunks) or self.ranks[c - 1] == self.ranks[c]:
            return EdgePrice()
        ends = self.ranks[c - 1], self.ranks[c]
        if ends not in self._rates:
            self._rates[ends] = message_rate(self.cluster, *ends, self.layout.stage_devices)
        latency, bandwidth = self._rates[ends]
        return EdgePrice(float(self.sent_bytes(self.chunks[c])), bandwidth, latency)

    def sent_bytes(self, chunk: Chunk) -> int:
        """Bytes of a chunk's inputs, as they are sent: in shards if every tensor rank has all of them."""
        return chunk[0].entry // (1 if self.layout.sequence_parallel else self.layout.tensor)

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
        return busiest + (self.layout.pipeline - 1) * (middle.forward + middle.whole_backward - received)

    def simulated(self, microbatches: int) -> float:
        update = max(map(self.update, range(self.layout.pipeline)))
        if self.layout.chunks == 1:
            price = self.price(0)
            exposed = price.reduce - price.overlap_backward
            return microbatches * (price.forward + price.whole_backward) + exposed + update
        schedule = make_schedule(self.layout.schedule_name, self.layout.pipeline, microbatches, self.layout.interleave)
        return simulate(schedule, self.pipeline_prices(update)).seconds

    def pipeline_prices(self, update: float) -> PipelinePrices:
        """What the simulator takes; ``update``: seconds after the last backward."""
        cuts = (c for c in range(1, len(self.chunks)) if self.ranks[c - 1] != self.ranks[c])
        chunks = tuple(map(self.price, range(len(self.chunks))))
        return PipelinePrices(chunks, {(c - 1, c): self.edge(c) for c in cuts}, update, hides=self.cluster.overlaps)

    def busiest(self) -> tuple[float, float]:
        """Seconds of computation and of communication of the rank that is busy longest."""
        return max(map(self.of_rank, range(self.layout.pipeline)), key=sum)

    def of_rank(self, rank: int) -> tuple[float, float]:
        sections = self.sections_of(rank)
        compute = total = 0.0
        for section, count in sections:
            seconds = section.forward + section.backward + self.times.again(section)
            compute += count * (seconds.compute + self.times.adding_up(section))
            total += count * sum(self.times.times(section))
        updating = self.updating(sections)
        moved = self.update(rank) - updating + self.reducing(rank)
        # Rounding may leave less than nothing.
        waited = max(0.0, self.microbatches * (total + self.sharding(rank) - compute))
        return self.microbatches * compute + updating, waited + moved

    def parts(self) -> dict[str, float]:
        """The parts of a step, in seconds of the busiest rank."""
        rank = max(range(self.layout.pipeline), key=lambda r: sum(self.of_rank(r)))
        return self.parts_of(rank)

    def parts_of(self, rank: int) -> dict[str, float]:
        """The parts of a step on a rank, in seconds."""
        sections = self.sections_of(rank)
        offloading = self.offloading(sections)

        def summed(seconds: Callable[[Section], float]) -> float:
            return self.microbatches * sum(count * seconds(section) for section, count in sections)

        return {
            "forward": summed(lambda s: s.forward.compute),
            "backward": summed(lambda s: s.backward.compute),
            "again": summed(lambda s: self.times.again(s).compute),
            "tensor": summed(lambda s: (s.forward + s.backward + self.times.again(s)).communicate),
            "adding up": summed(self.times.adding_up),
            "exchange": summed(self.times.exchanges),
            "weights": self.microbatches * self.sharding(rank),
            "reduce": self.reducing(rank),
            "update": self.update(rank) - offloading,
            "offload": offloading,
        }
