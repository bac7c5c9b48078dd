"""What the parts of a pipeline cost: seconds and bytes of chunks, edges and the step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.errors import ScheduleError
from autopar.schedule.actions import Action


@dataclass(frozen=True, slots=True)
class ChunkPrice:
    """One chunk on its device, for one microbatch; seconds and bytes.

    Attributes:
        backward: both halves at once; default: their sum.
        reduce: reducing the chunk's gradients, once a step.
        beside_weight_gradient, beside_backward: of ``reduce``, what overlaps with the chunk's last computation, if
            that is a weight gradient or a whole backward.
        unawaited: the most that is sent so if the rank has more to compute or to send, since it then waits for no
            message.
        until_input_gradient: bytes held from the start of forward to the end of the input gradient.
        until_weight_gradient: bytes held from the start of forward to the end of the weight gradient.
        between_gradients: bytes held from the start of the input gradient to the end of the weight gradient (what
            delaying it costs).
        static: bytes held always.
        receive_forward, receive_backward: seconds at the start of forward and of (input) backward for which the rank
            blocks while its operands come in; where it waits for them anyway, these pass while it waits.
    """

    forward: float
    input_gradient: float
    weight_gradient: float
    backward: float | None = None
    reduce: float = 0.0
    beside_weight_gradient: float = 0.0
    beside_backward: float = 0.0
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
        """Of a computation of this chunk."""
        if action.kind == "forward":
            return self.forward
        if action.kind == "input_gradient":
            return self.input_gradient
        return self.weight_gradient if action.kind == "weight_gradient" else self.whole_backward

    def receive(self, action: Action) -> float:
        """Of these, for which its rank only blocks to receive."""
        if action.kind == "weight_gradient":
            return 0.0
        return self.receive_forward if action.kind == "forward" else self.receive_backward


@dataclass(frozen=True, slots=True)
class EdgePrice:
    """One microbatch's value along an edge: ``latency`` seconds, and ``nbytes`` at ``bandwidth`` bytes/s for which its
    link is taken. ``gradient_bytes``: what comes back, default as much."""

    nbytes: float = 0.0
    bandwidth: float = float("inf")
    latency: float = 0.0
    gradient_bytes: float | None = None

    def bytes_of(self, direction: str) -> float:
        backward = direction == "backward" and self.gradient_bytes is not None
        return self.gradient_bytes if backward and self.gradient_bytes is not None else self.nbytes

    def seconds(self, direction: str) -> float:
        """Of one message, with the link to itself."""
        return self.latency + self.bytes_of(direction) / self.bandwidth


@dataclass(frozen=True)
class SharedProcessors:
    """Ranks that share the processors of a host. ``hosts``: that of each pipeline rank. While k ranks of one compute,
    each runs ``speeds[k - 1]`` times as fast as priced; a rank is as many devices as a stage has."""

    hosts: tuple[int, ...]
    speeds: tuple[float, ...]


@dataclass(frozen=True)
class PipelinePrices:
    """The prices of a schedule.

    Attributes:
        edges: by (source, target); an edge without an entry is free.
        step: seconds per rank after all reductions, the same on all ranks.
        overlap: whether messages and reductions are sent while their ranks compute; if not, a rank blocks until
            what it sends or receives has arrived.
        hides: whether reductions are sent so, and messages take none of the ranks' own time; if not, each end is busy
            for half of what a message takes.
        hides_reductions: whether reductions are sent while ranks compute, where messages do.
        buffered: whether a message may be sent before its receive is posted.
        links: by (sending rank, receiving rank) the name of a link that carries one message at a time. Pairs with one
            name share it; a pair without a name has one of its own in each direction.
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
        """How many times as fast as priced a rank computes at best."""
        return 1.0 if self.shared is None else max(self.shared.speeds)

    def duration(self, action: Action, waited: float = 0.0) -> float:
        """Seconds of a computation whose rank ``waited`` for what it takes."""
        price = self.chunks[action.chunk]
        return price.seconds(action) - min(waited, price.receive(action))

    @property
    def reduces_beside(self) -> bool:
        """Whether reductions are sent while their ranks compute."""
        return self.overlap and self.hides and self.hides_reductions

    def beside(self, last: Action, ends: bool = True) -> float:
        """Seconds of reducing a chunk's gradients that overlap with ``last``, the computation that makes them;
        ``ends``: its rank has nothing to compute or to send after it."""
        if not self.reduces_beside:
            return 0.0
        price = self.chunks[last.chunk]
        most = price.beside_backward if last.kind == "backward" else price.beside_weight_gradient
        return most if ends else min(most, price.unawaited)

    def check(self, chunks: int) -> None:
        """Raises :class:`ScheduleError` unless these are prices of so many chunks."""
        if len(self.chunks) != chunks:
            raise ScheduleError(f"{len(self.chunks)} chunks are priced, the schedule has {chunks}")
        for chunk, price in enumerate(self.chunks):
            halves = price.input_gradient, price.weight_gradient
            if min(price.forward, *halves, price.whole_backward, price.reduce, price.unawaited) < 0:
                raise ScheduleError(f"chunk {chunk} takes negative time: {price}")
            before = (
                (price.forward, price.receive_forward),
                (min(price.input_gradient, price.whole_backward), price.receive_backward),
            )
            if any(not 0 <= receive <= whole for whole, receive in before):
                raise ScheduleError(f"chunk {chunk} receives longer than its computations take: {price}")
            beside = (
                (price.beside_weight_gradient, price.weight_gradient),
                (price.beside_backward, price.whole_backward),
            )
            if any(not 0 <= seconds <= min(price.reduce, most) * (1 + 1e-9) for seconds, most in beside):
                raise ScheduleError(f"chunk {chunk} reduces longer beside its last backward than that takes: {price}")
