"""The price of a step of a recipe: messages that block, gradients that are reduced with every microbatch."""

from __future__ import annotations

from dataclasses import replace

from autopar.cost.pipeline.prices import ChunkPrice, PipelinePrices
from benchmarks.emulator.sections.section import Chunk
from benchmarks.emulator.step.pipeline_ranks import chunks_of
from benchmarks.emulator.step.step import LayoutStep

from .recipe import Recipe
from .section import of_recipe
from .times import RecipeTimes


class RecipeStep(LayoutStep):
    """The prices of one step."""

    times: RecipeTimes
    layout: Recipe

    def price(self, c: int) -> ChunkPrice:
        """Chunks of the same sections between the same links share one."""
        chunk, idle = self.chunks[c], self._idle_seconds(c)
        key = chunk.key, idle
        if key not in self._prices:
            self._prices[key] = _blocking(self.chunk_price(chunk), *idle)
        return self._prices[key]

    def chunk_price(self, chunk: Chunk) -> ChunkPrice:
        price = super().chunk_price(chunk)
        if self.layout.reducing == "step":
            return price
        half = price.input_gradient + (price.reduce - price.overlap_backward) / 2
        return ChunkPrice(price.forward, half, half)

    def _idle_seconds(self, c: int) -> tuple[float, float]:
        """Seconds for which a rank blocks in forward, and again in backward, for messages between a chunk and the ones
        before and after it; 0 if messages overlap computation."""
        if "message" in self.layout.overlap:
            return 0.0, 0.0
        before, after = self.edge(c), self.edge(c + 1)
        return before.latency + before.nbytes / before.bandwidth, after.latency + after.nbytes / after.bandwidth

    def reducing(self, rank: int) -> float:
        if self.layout.reducing == "step":
            return super().reducing(rank)
        held = chunks_of(rank, self.layout)
        alone = (self.times.chunk_times(self.chunks[c])[1] + sum(self._idle_seconds(c)) for c in held)
        return self.microbatches * (sum(self.price(c).whole_backward for c in held) - sum(alone))

    def _idle(self, rank: int) -> float:
        """Seconds for which a rank blocks for each microbatch."""
        return 2 * sum(sum(self._idle_seconds(c)) for c in chunks_of(rank, self.layout))

    def _fetching(self, rank: int) -> float:
        """Seconds for which each microbatch waits for saved activations in host memory."""
        return sum(sum(self.times.fetching(self.chunks[c])) for c in chunks_of(rank, self.layout))

    def sent_bytes(self, chunk: Chunk) -> int:
        return super().sent_bytes(chunk) if self.layout.scatter else chunk[0].entry

    def pipeline_prices(self, update: float) -> PipelinePrices:
        """If ranks block for messages, the prices of chunks include them."""
        prices, overlap = super().pipeline_prices(update), self.layout.overlap
        edges = prices.edges if "message" in overlap else {}
        return replace(prices, edges=edges, hides_reductions="gradient" in overlap)

    def of_rank(self, rank: int) -> tuple[float, float]:
        computing, communicating = super().of_rank(rank)
        return computing, communicating + self.microbatches * (self._idle(rank) + self._fetching(rank))

    def parts_of(self, rank: int) -> dict[str, float]:
        """What the device waits for the host is apart from what it computes."""
        parts, hosts = super().parts_of(rank), {"forward": 0.0, "backward": 0.0, "again": 0.0}
        for section, count in self.sections_of(rank):
            forward, backward = of_recipe(section).hosts
            waited = {"forward": forward, "backward": backward, "again": self.times.again_host(section)}
            hosts = {name: seconds + self.microbatches * count * waited[name] for name, seconds in hosts.items()}
        offloading = parts["offload"] + self.microbatches * self._fetching(rank)
        return {
            **parts,
            **{name: parts[name] - seconds for name, seconds in hosts.items()},
            "host": sum(hosts.values()),
            "messages": self.microbatches * self._idle(rank),
            "offload": offloading,
        }


def _blocking(price: ChunkPrice, before: float, after: float) -> ChunkPrice:
    """The price of a chunk whose rank blocks for the messages at its two ends, so many seconds each time."""
    both = before + after
    return replace(
        price,
        forward=price.forward + both,
        input_gradient=price.input_gradient + both,
        backward=price.whole_backward + both,
        receive_forward=before,
        receive_backward=after,
    )
