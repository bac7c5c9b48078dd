"""Prices of the parts of a pipeline: seconds and bytes of chunks, edges and the step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.errors import ScheduleError
from autopar.schedule.actions import Action


@dataclass(frozen=True, slots=True)
class ChunkPrice:
    """The price of one chunk on its device, for one microbatch; seconds and bytes.

    Attributes:
        backward: seconds of both halves at once; default: their sum.
        reduce: seconds to reduce the chunk's gradients, once a step.
        overlap_weight_gradient, overlap_backward: the part of ``reduce`` that overlaps the chunk's last computation, if
            that is a weight gradient or a whole backward.
        unawaited: the most of ``reduce`` that overlaps it if the rank has more to compute or to send afterwards, since
            it then waits for no message.
        until_input_gradient: bytes held from the start of forward to the end of the input gradient.
        until_weight_gradient: bytes held from the start of forward to the end of the weight gradient.
        between_gradients: bytes held from the start of the input gradient to the end of the weight gradient (the cost
            of delaying the weight gradient).
        static: bytes that are always held.
        receive_forward, receive_backward: seconds at the start of forward and of (input) backward for which the rank
            blocks while it receives operands; if it waits for them anyway, these seconds are part of the wait.
    """

    forward: float
    input_gradient: float
    weight_gradient: float
    backward: float | None = None
    reduce: float = 0.0
    overlap_weight_gradient: float = 0.0
    overlap_backward: float = 0.0
    unawaited: float = float("inf")
    until_input_gradient: float = 0.0
    until_weight_gradient: float = 0.0
    between_gradients: float = 0.0
    static: float = 0.0
    receive_forward: float = 0.0
    receive_backward: float = 0.0

    @property
    def whole_backward(self) -> float:
        return self.input_gradient + self.weight_gradient if self.backward is None else self.backward

    def seconds(self, action: Action) -> float:
        """Seconds of a computation of this chunk."""
        if action.kind == "forward":
            return self.forward
        if action.kind == "input_gradient":
            return self.input_gradient
        return self.weight_gradient if action.kind == "weight_gradient" else self.whole_backward

    def receive(self, action: Action) -> float:
        """The part of these seconds for which the rank only blocks to receive."""
        if action.kind == "weight_gradient":
            return 0.0
        return self.receive_forward if action.kind == "forward" else self.receive_backward


@dataclass(frozen=True, slots=True)
class EdgePrice:
    """The price of one microbatch's value along an edge: ``latency`` seconds, and ``nbytes`` at ``bandwidth`` bytes/s,
    for which it occupies its link. ``gradient_bytes``: bytes of the gradient that comes back; by default the same."""

    nbytes: float = 0.0
    bandwidth: float = float("inf")
    latency: float = 0.0
    gradient_bytes: float | None = None

    def bytes_of(self, direction: str) -> float:
        backward = direction == "backward" and self.gradient_bytes is not None
        return self.gradient_bytes if backward and self.gradient_bytes is not None else self.nbytes

    def seconds(self, direction: str) -> float:
        """Seconds of one message that has the link to itself."""
        return self.latency + self.bytes_of(direction) / self.bandwidth


@dataclass(frozen=True)
class SharedProcessors:
    """Ranks that share the processors of a host. ``hosts``: the host of each pipeline rank. While k ranks of a host
    compute, each is ``speeds[k - 1]`` times as fast as priced. A rank represents all devices of a stage; where stages
    have unequal numbers of them, ``devices``, it counts as so many."""

    hosts: tuple[int, ...]
    speeds: tuple[float, ...]
    devices: tuple[int, ...] = ()


@dataclass(frozen=True)
class PipelinePrices:
    """The prices of a schedule.

    Attributes:
        edges: by (source, target); an edge without an entry is free.
        step: seconds of each rank after all reductions, the same on all ranks.
        overlap: whether messages and reductions are sent while their ranks compute; if not, a rank blocks until
            what it sends or receives has arrived.
        hides: whether reductions overlap computation, and messages take no time of the ranks themselves; if not, each
            end is busy for half of a message's seconds.
        hides_reductions: whether reductions overlap computation, if messages do.
        buffered: whether a message may be sent before its receive is posted.
        links: by (sending rank, receiving rank), the name of a link that carries one message at a time. Pairs with the
            same name share a link; a pair without a name has a link of its own in each direction.
        shared: which ranks share processors; None if every rank has its own.
    """

    chunks: tuple[ChunkPrice, ...]
    edges: Mapping[tuple[int, int], EdgePrice] = field(default_factory=dict)
    step: float = 0.0
    overlap: bool = True
    hides: bool = True
    hides_reductions: bool = True
    buffered: bool = False
    links: Mapping[tuple[int, int], str] = field(default_factory=dict)
    shared: SharedProcessors | None = None

    @property
    def quickest(self) -> float:
        """The factor by which a rank computes at best faster than priced."""
        if self.shared is None:
            return 1.0
        # No rank computes with fewer devices than its own.
        return max(self.shared.speeds[min(self.shared.devices, default=1) - 1 :])

    def duration(self, action: Action, waited: float = 0.0) -> float:
        """Seconds of a computation whose rank ``waited`` for its operands."""
        price = self.chunks[action.chunk]
        return price.seconds(action) - min(waited, price.receive(action))

    @property
    def overlaps_reductions(self) -> bool:
        """Whether reductions overlap computations of their ranks."""
        return self.overlap and self.hides and self.hides_reductions

    def overlapped_reduction(self, last: Action, ends: bool = True) -> float:
        """Seconds of the reduction of a chunk's gradients that overlap ``last``, the computation that completes them.
        ``ends``: the rank has nothing to compute or to send afterwards."""
        if not self.overlaps_reductions:
            return 0.0
        price = self.chunks[last.chunk]
        most = price.overlap_backward if last.kind == "backward" else price.overlap_weight_gradient
        return most if ends else min(most, price.unawaited)

    def check(self, chunks: int) -> None:
        """Raises :class:`ScheduleError` unless these are valid prices of this number of ``chunks``."""
        if len(self.chunks) != chunks:
            raise ScheduleError(f"{len(self.chunks)} chunks are priced, the schedule has {chunks}")
        for chunk, price in enumerate(self.chunks):
            halves = price.input_gradient, price.weight_gradient
            if min(price.forward, *halves, price.whole_backward, price.reduce, price.unawaited) < 0:
                raise ScheduleError(f"chunk {chunk} takes negative time: {price}")
            receives = (
                (price.forward, price.receive_forward),
                (min(price.input_gradient, price.whole_backward), price.receive_backward),
            )
            if any(not 0 <= receive <= seconds for seconds, receive in receives):
                raise ScheduleError(f"chunk {chunk} receives longer than its computations take: {price}")
            overlaps = (
                (price.overlap_weight_gradient, price.weight_gradient),
                (price.overlap_backward, price.whole_backward),
            )
            if any(not 0 <= seconds <= min(price.reduce, most) * (1 + 1e-9) for seconds, most in overlaps):
                raise ScheduleError(f"chunk {chunk}: its reduction overlaps more than its last backward takes: {price}")
