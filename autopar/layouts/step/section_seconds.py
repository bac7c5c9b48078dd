"""Seconds of one microbatch in a section of a layout, and of the collectives over data ranks for its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from autopar.cluster.description import Cluster
from autopar.cost import collective_seconds
from autopar.layout import MASTER_BYTES, Layout
from autopar.layouts.sections.expert_all_to_all import exchange_seconds
from autopar.layouts.sections.exposed_communication import at_once, waited
from autopar.layouts.sections.section import Seconds, Section, Weight, counted

from .chunks import recompute_seconds
from .memory import gathered_bytes, gradient_bytes, offloaded_bytes

# The number of pieces of a collective that overlaps the product next to it: one of them is exposed.
# Chosen: Transformer Engine's default num_splits where it overlaps by pieces; not fitted.
PIECES = 4


def _by_group(sections: Iterable[tuple[Section, int]], nbytes: Callable[[Weight], float]) -> dict[int, float]:
    """Bytes of weights, ``nbytes`` of each, by the number of ranks among which their experts are divided."""
    sizes: dict[int, float] = {}
    for section, count in sections:
        for weight in section.weights:
            sizes[weight.experts] = sizes.get(weight.experts, 0.0) + count * nbytes(weight)
    return sizes


class SectionTimes:
    """Seconds of sections under a layout; ``microbatches``: how many a data rank computes in a step."""

    def __init__(self, layout: Layout, microbatches: int, cluster: Cluster) -> None:
        self.layout, self.microbatches, self.cluster = layout, microbatches, cluster
        # One section represents many layers, so its seconds are cached.
        self._times: dict[int, tuple[float, float]] = {}

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
        return recompute_seconds(section, self.layout)

    def exchanges(self, section: Section) -> float:
        """Seconds of the exchanges of forward, of backward and of recomputation."""
        passes = 3 if section.is_layer and self.layout.recompute in ("full", "operations") else 2
        return passes * self.exchange(section)

    def gradients(self, sections: Iterable[tuple[Section, int]]) -> dict[int, float]:
        return _by_group(sections, lambda weight: gradient_bytes(weight, self.layout))

    def reduced(self, sections: Iterable[tuple[Section, int]]) -> dict[int, float]:
        """Bytes of gradients in the dtype in which they are sent."""
        if self.layout.reduction != "all-fp32":
            return self.gradients(sections)
        return _by_group(sections, lambda weight: weight.trained * weight.elements * MASTER_BYTES)

    def weights(self, sections: Iterable[tuple[Section, int]]) -> dict[int, float]:
        """Bytes of the updated weights in the dtype in which they are sent."""
        return _by_group(sections, lambda weight: weight.trained * gathered_bytes(weight, self.layout))

    def times(self, section: Section) -> tuple[float, float]:
        """Seconds of forward and backward of one section, exchanges of rows and ZeRO-3's collectives included."""
        if id(section) not in self._times:
            self._times[id(section)] = self._times_of(section)
        return self._times[id(section)]

    def _times_of(self, section: Section) -> tuple[float, float]:
        exchange = self.exchange(section)
        forward = self.exchanging(self.total(section.forward), exchange)
        back = self.exchanges(section) - exchange
        backward = self.exchanging(self.total(section.backward + self.again(section)), back)
        backward += self.adding_up(section)
        if self.layout.zero < 3:
            return forward, backward
        gather = self.gather(section)
        again = gather if section.runs_backward else 0.0
        scatter = self.over_data("reduce_scatter", self.gradients([(section, 1)]))
        if self.layout.gathers == "tensor":
            scatter += self.gather_again(section)
        if "weight" in self.layout.overlap:
            return at_once(forward, gather), at_once(backward, again + scatter)
        return forward + gather, backward + again + scatter

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
        section = replace(section, weights=(*section.weights, *section.lent))
        if self.layout.gathers == "tensor":
            sizes = ((weight.experts, gathered_bytes(weight, self.layout)) for weight in section.weights)
            return sum(self.over_group("all_gather", experts, nbytes) for experts, nbytes in sizes if nbytes)
        return self.over_data(
            "all_gather", _by_group([(section, 1)], lambda weight: gathered_bytes(weight, self.layout))
        )

    def adding_up(self, section: Section) -> float:
        """Seconds in which separate operations add the gradients of a microbatch to those of earlier ones."""
        if self.microbatches == 1 or self.layout.gradient_accumulation_fusion:
            return 0.0
        moved = sum(w.elements * w.itemsize + 2 * gradient_bytes(w, self.layout) for w in section.trained)
        return moved / self.cluster.device.memory_bandwidth

    def exchanging(self, seconds: float, exchange: float) -> float:
        """Seconds with exchanges of rows, which follow the rest of the section, or overlap that of another microbatch
        and occupy some of its processors."""
        if "expert" not in self.layout.overlap:
            return seconds + exchange
        return at_once(seconds, exchange)

    def total(self, seconds: Seconds) -> float:
        """Seconds of computation and communication in turn, or overlapped piece by piece."""
        if "tensor" not in self.layout.overlap:
            return seconds.total
        both = (seconds.compute, seconds.communicate)
        return at_once(*both) + min(both) / PIECES + seconds.host

    def chunk_times(self, chunk: Sequence[Section]) -> tuple[float, float]:
        """Seconds of forward and backward of a chunk, without blocking for messages."""
        forward, backward = self._alone(chunk)
        forward_waits, backward_waits = self.fetching(chunk)
        return forward + forward_waits, backward + backward_waits

    def _alone(self, chunk: Sequence[Section]) -> tuple[float, float]:
        times = [(*self.times(section), count) for section, count in counted(chunk)]
        return sum(count * forward for forward, _, count in times), sum(
            count * backward for _, backward, count in times
        )

    def fetching(self, chunk: Sequence[Section]) -> tuple[float, float]:
        """Seconds for which forward and backward of a chunk wait for saved activations in host memory."""
        offloaded, _ = offloaded_bytes(chunk, self.layout)
        if not offloaded:
            return 0.0, 0.0
        transfer = offloaded / self.cluster.device.host_bandwidth
        forward, backward = (max(0.0, transfer - alone) for alone in self._alone(chunk))
        return forward, backward

    def reduce(self, chunk: Sequence[Section], window: float) -> float:
        """Exposed seconds of reducing a chunk's gradients, of a step or of one microbatch, under ``window`` seconds of
        backward."""
        if self.layout.zero >= 3:
            return 0.0
        divided = self.layout.zero and self.layout.reduction == "scatter"
        seconds = self.over_data("reduce_scatter" if divided else "all_reduce", self.reduced(counted(chunk)))
        return waited(window, seconds) if "gradient" in self.layout.overlap else seconds
