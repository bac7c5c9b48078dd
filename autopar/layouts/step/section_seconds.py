"""Seconds of one microbatch in a section of a layout, and of the collectives over data ranks that its weights need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from autopar.cluster.description import Cluster
from autopar.cost import collective_seconds
from autopar.layout import MASTER_BYTES, Layout
from autopar.layouts.sections.expert_all_to_all import exchange_seconds
from autopar.layouts.sections.exposed_communication import at_once, waited
from autopar.layouts.sections.section import Seconds, Section, Weight, counted

from .chunks import computed_again
from .memory import gathered_bytes, gradient_bytes, offloaded_bytes

# Pieces in which a collective is sent that overlaps with the product next to it: one of them is exposed.
# Chosen: Transformer Engine's default num_splits where it overlaps by pieces; not fitted.
PIECES = 4


def _by_group(sections: Iterable[tuple[Section, int]], nbytes: Callable[[Weight], float]) -> dict[int, float]:
    """Bytes of weights, ``nbytes`` of each, by the number of ranks among which their experts are divided."""
    found: dict[int, float] = {}
    for section, often in sections:
        for weight in section.weights:
            found[weight.experts] = found.get(weight.experts, 0.0) + often * nbytes(weight)
    return found


class SectionTimes:
    """Seconds of sections under a layout; a data rank computes so many ``microbatches`` in a step."""

    def __init__(self, layout: Layout, microbatches: int, cluster: Cluster) -> None:
        self.layout, self.microbatches, self.cluster = layout, microbatches, cluster
        # One section represents many layers: what it takes is worked out once.
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
        return computed_again(section, self.layout)

    def exchanges(self, section: Section) -> float:
        """Those of forward, of backward and of what is computed again."""
        often = 3 if section.is_layer and self.layout.recompute in ("full", "operations") else 2
        return often * self.exchange(section)

    def gradients(self, sections: Iterable[tuple[Section, int]]) -> dict[int, float]:
        return _by_group(sections, lambda weight: gradient_bytes(weight, self.layout))

    def reduced(self, sections: Iterable[tuple[Section, int]]) -> dict[int, float]:
        """Bytes of gradients as they are sent."""
        if self.layout.reduction != "all-fp32":
            return self.gradients(sections)
        return _by_group(sections, lambda weight: weight.trained * weight.elements * MASTER_BYTES)

    def weights(self, sections: Iterable[tuple[Section, int]]) -> dict[int, float]:
        """Bytes of the weights that are updated, as they are sent."""
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
        """Seconds of gathering weights one by one for what backward computes again: of whole layers all, else those
        that what is computed again takes."""
        if not self.again(section).compute:
            return 0.0
        if section.is_layer and self.layout.recompute in ("full", "operations"):
            return self.gather(section)
        ways = {"recomputed", self.layout.recompute if section.is_layer else "none"}
        taken = tuple(weight for weight in (*section.weights, *section.lent) if weight.again & ways)
        return self.gather(replace(section, weights=taken, lent=()))

    def gather(self, section: Section) -> float:
        """Seconds of gathering the weights that a section takes, together or one by one."""
        section = replace(section, weights=(*section.weights, *section.lent))
        if self.layout.gathers == "tensor":
            sizes = ((weight.experts, gathered_bytes(weight, self.layout)) for weight in section.weights)
            return sum(self.over_group("all_gather", experts, nbytes) for experts, nbytes in sizes if nbytes)
        return self.over_data("all_gather", _by_group([(section, 1)], lambda one: gathered_bytes(one, self.layout)))

    def adding_up(self, section: Section) -> float:
        """Seconds of adding the gradients of a microbatch to those before it, by operations of their own."""
        if self.microbatches == 1 or self.layout.gradient_accumulation_fusion:
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

    def chunk_times(self, chunk: Sequence[Section]) -> tuple[float, float]:
        """Seconds of forward and backward of a chunk that never blocks."""
        forth, back = self._alone(chunk)
        forth_waits, back_waits = self.fetching(chunk)
        return forth + forth_waits, back + back_waits

    def _alone(self, chunk: Sequence[Section]) -> tuple[float, float]:
        times = [(*self.times(section), often) for section, often in counted(chunk)]
        return sum(often * forth for forth, _, often in times), sum(often * back for _, back, often in times)

    def fetching(self, chunk: Sequence[Section]) -> tuple[float, float]:
        """Seconds for which forward and backward of a chunk wait for what its layers keep on the host."""
        offloaded, _ = offloaded_bytes(chunk, self.layout)
        if not offloaded:
            return 0.0, 0.0
        travels = offloaded / self.cluster.device.host_bandwidth
        forth, back = (max(0.0, travels - alone) for alone in self._alone(chunk))
        return forth, back

    def reduce(self, chunk: Sequence[Section], window: float) -> float:
        """Seconds of reducing a chunk's gradients, of a step or of one microbatch, that a backward does not hide."""
        if self.layout.zero >= 3:
            return 0.0
        divided = self.layout.zero and self.layout.reduction == "scatter"
        seconds = self.over_data("reduce_scatter" if divided else "all_reduce", self.reduced(counted(chunk)))
        return waited(window, seconds) if "gradient" in self.layout.overlap else seconds
