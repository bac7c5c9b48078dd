"""The step of a layout: chunks of sections under a schedule, reductions over data ranks, the optimizer, memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from autopar.cost import collective_seconds, simulate
from autopar.cost.pipeline_prices import ChunkPrice, EdgePrice, PipelinePrices
from autopar.cost.point_to_point import message_rate

from .cluster import Cluster
from .layout import MASTER_BYTES, Layout
from .layout_cuts import computed_again, cut_into_chunks
from .layout_exchange import exchange_seconds
from .layout_exposed import at_once, waited
from .layout_hardware import check_hardware, check_host
from .layout_memory import Held, gradient_bytes, held_by
from .layout_precision import DTYPES
from .layout_section import Seconds, Section, Sections, Weight, counted
from .layout_update import offloading_seconds, updating_seconds
from .plan import Predicted
from .schedules import SCHEDULES, make_schedule

# Pieces in which a collective travels that overlaps with the product next to it: one of them is exposed.
PIECES = 4
# Microbatches beyond this many rounds of the pipeline repeat each other: the time of a round is extrapolated. Under
# schedules in V shape a round settles later. What is simulated in full takes as long, but for 0.04% where ranks have many
# times as many chunks as there are stages, and 0.2% in V shape.
ROUNDS = 2
ROUNDS_IN_V = 4


@dataclass(frozen=True)
class Priced:
    """A layout and what it was priced at: ``predicted`` as of a plan, its bytes those of the fullest pipeline rank;
    ``held`` the bytes of every rank; ``reserved`` those that libraries take and fragmentation loses; ``flops`` of
    products of a step, nothing computed again among them; ``parts`` of the step in seconds of the rank that is
    busiest."""

    layout: Layout
    batch: int
    cluster: str
    predicted: Predicted
    held: tuple[Held, ...]
    memory_limit: int
    reserved: int
    flops: float
    parts: dict[str, float]

    @property
    def fits(self) -> bool:
        return self.predicted.peak_bytes <= self.memory_limit

    @property
    def excess_bytes(self) -> int:
        """By how much the fullest device is over the limit; negative: what is left free."""
        return self.predicted.peak_bytes - self.memory_limit

    @property
    def flops_per_second(self) -> float:
        """FLOP/s of the model per device."""
        return self.flops / self.predicted.step_seconds / self.layout.devices


def price_sections(
    sections: Sections, layout: Layout, batch: int, cluster: Cluster, limit: int | None = None
) -> Priced:
    """The price of a layout whose sections are billed. Raises :class:`OptionsError` if layers, batch or devices do not
    divide so."""
    microbatches = layout.microbatches(batch)
    check_hardware(layout, cluster)
    chunks = cut_into_chunks(sections, layout)
    step = _Step(chunks, layout, microbatches, cluster)
    seconds = step.seconds()
    held = tuple(
        held_by(rank, [chunks[c] for c in _held(rank, layout)], layout, microbatches) for rank in range(layout.pipeline)
    )
    check_host(held, layout, cluster)
    fullest = max(held, key=lambda one: one.total + one.lost)
    reserved = cluster.device.reserve_bytes + fullest.lost
    flops = sum(section.flops for chunk in chunks for section in chunk) * microbatches * layout.data
    compute, communicate = step.busiest()
    peak = cluster.device.flops(DTYPES[layout.precision])
    predicted = Predicted(
        step_seconds=seconds,
        compute_seconds=compute,
        comm_seconds=communicate,
        bubble_seconds=_beyond(compute + communicate, seconds),
        peak_bytes=fullest.total,
        weight_bytes=fullest.weights,
        gradient_bytes=fullest.gradients,
        optimizer_bytes=fullest.optimizer,
        activation_bytes=fullest.activations,
        temporary_bytes=fullest.working,
        input_bytes=0,
        mfu=flops / (seconds * layout.devices * peak),
    )
    limit = limit or cluster.device.memory_bytes - reserved
    return Priced(layout, batch, cluster.name, predicted, held, limit, reserved, flops, dict(step.parts()))


@dataclass(frozen=True)
class Quick:
    """A layout's ``seconds`` at the least, and its ``peak`` bytes beside the ``limit`` of the device."""

    layout: Layout
    seconds: float
    peak: int
    limit: int


def quick_price(sections: Sections, layout: Layout, batch: int, cluster: Cluster) -> Quick:
    """A bound of the step without simulating it: the busiest rank, and filling and draining the pipeline. Raises
    :class:`OptionsError` as :func:`price_sections` does."""
    microbatches = layout.microbatches(batch)
    check_hardware(layout, cluster)
    chunks = cut_into_chunks(sections, layout)
    ends = sorted({0, layout.pipeline // 2, layout.pipeline - 1})
    held = [held_by(rank, [chunks[c] for c in _held(rank, layout)], layout, microbatches) for rank in ends]
    check_host(held, layout, cluster)
    step = _Step(chunks, layout, microbatches, cluster)
    fullest = max(held, key=lambda one: one.total + one.lost)
    allowed = cluster.device.memory_bytes - cluster.device.reserve_bytes - fullest.lost
    return Quick(layout, step.bound(), fullest.total, allowed)


def _held(rank: int, layout: Layout) -> list[int]:
    placement = SCHEDULES[layout.schedule_name].placement(layout.pipeline, layout.interleave)
    return [chunk for chunk, holder in enumerate(placement) if holder == rank]


def _beyond(busy: float, seconds: float) -> float:
    """What of a step is neither, rounding left out."""
    return seconds - busy if seconds > busy * (1 + 1e-9) else 0.0


def _by_group(sections: Iterable[tuple[Section, int]], nbytes: Callable[[Weight], float]) -> dict[int, float]:
    """Bytes of weights, ``nbytes`` of each, by the number of ranks among which their experts are divided."""
    found: dict[int, float] = {}
    for section, often in sections:
        for weight in section.weights:
            found[weight.experts] = found.get(weight.experts, 0.0) + often * nbytes(weight)
    return found


class _Step:
    """Prices of one step, kept while they are put together."""

    def __init__(
        self, chunks: Sequence[Sequence[Section]], layout: Layout, microbatches: int, cluster: Cluster
    ) -> None:
        self.chunks, self.layout, self.microbatches, self.cluster = chunks, layout, microbatches, cluster
        # One section stands for many layers: what it takes is worked out once.
        self._times: dict[int, tuple[float, float]] = {}
        self.edges = self._edges()
        self.prices = self._chunk_prices()

    def over_data(self, kind: str, sizes: Mapping[int, float]) -> float:
        """Seconds of collectives over the data and context ranks that have the same weights; ``sizes``: bytes by
        :attr:`Weight.experts`."""
        return sum(self.over_group(kind, experts, nbytes) for experts, nbytes in sizes.items() if nbytes)

    def over_group(self, kind: str, experts: int, nbytes: float) -> float:
        degree = max(1, experts)
        mesh = (self.layout.data * self.layout.context // degree, degree, self.layout.tensor)
        return collective_seconds(self.cluster, mesh, kind, (0,), nbytes)

    def exchange(self, section: Section) -> float:
        """Seconds of sending the rows of a section to their experts and back."""
        return sum(2 * exchange_seconds(self.cluster, self.layout, block) for block in section.blocks)

    def again(self, section: Section) -> Seconds:
        return computed_again(section, self.layout)

    def exchanges(self, section: Section) -> float:
        """Those of forward, of backward and of what is computed again."""
        often = 3 if section.is_layer and self.layout.recompute in ("full", "operations") else 2
        return often * self.exchange(section)

    def gradients(self, sections: Iterable[tuple[Section, int]]) -> dict[int, float]:
        return _by_group(sections, lambda weight: gradient_bytes(weight, self.layout))

    def reduced(self, sections: Iterable[tuple[Section, int]]) -> dict[int, float]:
        """Bytes of gradients as they travel."""
        if self.layout.reduction != "all-fp32":
            return self.gradients(sections)
        return _by_group(sections, lambda weight: weight.trained * weight.elements * MASTER_BYTES)

    def weights(self, sections: Iterable[tuple[Section, int]]) -> dict[int, float]:
        """Bytes of the weights that are updated."""
        return _by_group(sections, lambda weight: weight.trained * weight.elements * weight.itemsize)

    def times(self, section: Section) -> tuple[float, float]:
        """Seconds of forward and backward of one section, exchanges of rows and ZeRO-3's collectives included."""
        if id(section) not in self._times:
            self._times[id(section)] = self._times_of(section)
        return self._times[id(section)]

    def _times_of(self, section: Section) -> tuple[float, float]:
        exchange = self.exchange(section)
        again = self.exchanges(section) - 2 * exchange
        forward = self.exchanging(self.total(section.forward), exchange)
        backward = self.exchanging(self.total(section.backward + self.again(section)), exchange + again)
        backward += self.adding_up(section)
        if self.layout.zero < 3:
            return forward, backward
        gather = self.gather(section)
        scatter = self.over_data("reduce_scatter", self.gradients([(section, 1)]))
        if self.layout.gathers == "tensor" and self.again(section).compute:
            scatter += gather
        if "weight" in self.layout.overlap:
            return at_once(forward, gather), at_once(backward, gather + scatter)
        return forward + gather, backward + gather + scatter

    def gather(self, section: Section) -> float:
        """Seconds of gathering the weights of a section, together or one by one."""
        if self.layout.gathers == "tensor":
            sizes = ((weight.experts, weight.elements * weight.itemsize) for weight in section.weights)
            return sum(self.over_group("all_gather", experts, nbytes) for experts, nbytes in sizes if nbytes)
        return self.over_data("all_gather", _by_group([(section, 1)], lambda weight: weight.elements * weight.itemsize))

    def adding_up(self, section: Section) -> float:
        """Seconds of adding the gradients of a microbatch to those before it, by operations of their own."""
        if self.microbatches == 1 or not self.layout.adding:
            return 0.0
        moved = sum(w.elements * w.itemsize + 2 * gradient_bytes(w, self.layout) for w in section.trained)
        return moved / self.cluster.device.memory_bandwidth

    def exchanging(self, seconds: float, exchange: float) -> float:
        """Exchanges of rows after the rest, or beside that of another microbatch, from which they take processors."""
        if "expert" not in self.layout.overlap:
            return seconds + exchange
        return at_once(seconds, exchange)

    def total(self, seconds: Seconds) -> float:
        """Computing and communicating in turn, or piece by piece at once."""
        if "tensor" not in self.layout.overlap:
            return seconds.total
        both = (seconds.compute, seconds.communicate)
        return at_once(*both) + min(both) / PIECES + seconds.host

    def _chunk_prices(self) -> list[ChunkPrice]:
        """Of each chunk; those of the same sections between the same links are one."""
        found: dict[object, ChunkPrice] = {}
        prices = []
        for c, chunk in enumerate(self.chunks):
            standing = self.standing(c)
            key = tuple(map(id, chunk)), standing
            if key not in found:
                found[key] = self.chunk_price(chunk, *standing)
            prices.append(found[key])
        return prices

    def chunk_price(self, chunk: Sequence[Section], before: float, after: float) -> ChunkPrice:
        """``before``, ``after``: seconds of standing still for what comes in and for what goes out."""
        forward, backward = self.chunk_times(chunk)
        reduction = self.reduce(chunk, backward + before + after)
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

    def chunk_times(self, chunk: Sequence[Section]) -> tuple[float, float]:
        """Seconds of forward and backward of a chunk that stands still for nothing."""
        times = [(*self.times(section), often) for section, often in counted(chunk)]
        return sum(often * forth for forth, _, often in times), sum(often * back for _, back, often in times)

    def reduce(self, chunk: Sequence[Section], window: float) -> float:
        """Seconds of reducing a chunk's gradients, of a step or of one microbatch, that a backward does not hide."""
        if self.layout.zero >= 3:
            return 0.0
        divided = self.layout.zero and self.layout.reduction == "scatter"
        seconds = self.over_data("reduce_scatter" if divided else "all_reduce", self.reduced(counted(chunk)))
        return waited(window, seconds) if "gradient" in self.layout.overlap else seconds

    def update(self, rank: int) -> float:
        """Seconds of the optimizer, of gathering what it updated, and of bringing states that rest on the host."""
        sections = self.sections_of(rank)
        there = updating_seconds(sections, self.layout, self.cluster)
        return there + self.gathering(rank) + offloading_seconds(sections, self.layout, self.cluster)

    def reducing(self, rank: int) -> float:
        """Seconds of reducing a rank's gradients that nothing hides."""
        held = _held(rank, self.layout)
        if self.layout.reducing == "step":
            return sum(self.prices[c].reduce for c in held)
        alone = (self.chunk_times(self.chunks[c])[1] + sum(self.standing(c)) for c in held)
        return self.microbatches * (sum(self.prices[c].whole_backward for c in held) - sum(alone))

    def sections_of(self, rank: int) -> list[tuple[Section, int]]:
        """What a rank holds: so many of each section."""
        return counted(section for c in _held(rank, self.layout) for section in self.chunks[c])

    def gathering(self, rank: int) -> float:
        """Seconds of gathering the weights that were updated in shards."""
        if self.layout.zero not in (1, 2):
            return 0.0
        return self.over_data("all_gather", self.weights(self.sections_of(rank)))

    def standing(self, c: int) -> tuple[float, float]:
        """Seconds for which a rank stands still in forward, and again in backward, while what a chunk shares with the
        one before it and with the one after it travels, if nothing is computed meanwhile."""
        if "message" in self.layout.overlap:
            return 0.0, 0.0
        before, after = (self.edges.get(ends, EdgePrice()) for ends in ((c - 1, c), (c, c + 1)))
        return before.latency + before.nbytes / before.bandwidth, after.latency + after.nbytes / after.bandwidth

    def stands(self, rank: int) -> float:
        """Seconds for which a rank stands still for each microbatch."""
        return 2 * sum(sum(self.standing(c)) for c in _held(rank, self.layout))

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
        simulated = ROUNDS_IN_V if SCHEDULES[self.layout.schedule_name].v_shaped else ROUNDS
        rounds, round_size = self.microbatches / self.layout.pipeline, self.layout.pipeline
        if rounds <= simulated + 1:
            return self.simulated(self.microbatches)
        few = round_size * simulated + self.microbatches % round_size
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
        # Messages for which ranks stand still are in the prices of chunks.
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
            alone = section.forward + section.backward + self.again(section)
            compute += often * (alone.compute + alone.host + self.adding_up(section))
            total += often * sum(self.times(section))
        updating = updating_seconds(sections, self.layout, self.cluster)
        computed = self.microbatches * compute + updating
        moved = self.update(rank) - updating + self.reducing(rank)
        return computed, self.microbatches * (total + self.stands(rank) - compute) + moved

    def parts(self) -> dict[str, float]:
        rank = max(range(self.layout.pipeline), key=lambda r: sum(self.of_rank(r)))
        sections = self.sections_of(rank)
        offloading = offloading_seconds(sections, self.layout, self.cluster)

        def summed(seconds: Callable[[Section], float]) -> float:
            return self.microbatches * sum(often * seconds(section) for section, often in sections)

        return {
            "forward": summed(lambda s: s.forward.compute),
            "backward": summed(lambda s: s.backward.compute),
            "again": summed(lambda s: self.again(s).compute),
            "tensor": summed(lambda s: (s.forward + s.backward + self.again(s)).communicate),
            "adding up": summed(self.adding_up),
            "exchange": summed(self.exchanges),
            "host": summed(lambda s: (s.forward + s.backward + self.again(s)).host),
            "messages": self.microbatches * self.stands(rank),
            "reduce": self.reducing(rank),
            "update": self.update(rank) - offloading,
            "offload": offloading,
        }
