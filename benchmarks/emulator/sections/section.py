"""The costs of a section of a model under a layout: seconds, bytes and weights of one microbatch on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from .expert_all_to_all import Block

Result = TypeVar("Result")


@dataclass(frozen=True)
class Seconds:
    """Seconds of computation and of communication."""

    compute: float = 0.0
    communicate: float = 0.0

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.compute + other.compute, self.communicate + other.communicate)

    @property
    def total(self) -> float:
        return self.compute + self.communicate


@dataclass(frozen=True)
class Weight:
    """A parameter on one device of the mesh (context, tensor).

    Attributes:
        elements: elements on the device; ``whole``: of the unsharded parameter.
        itemsize: bytes of its dtype.
        partial: mesh axes over which its gradient has yet to be summed.
        experts: if it has an entry for each expert, among how many ranks these are divided; else 0.
        trained: whether it has a gradient and optimizer state.
        shared: whether several sections use it.
        owner: the pipeline rank that stores and updates it, if not the one that has it.
    """

    path: str
    elements: int
    whole: int
    itemsize: int
    partial: tuple[int, ...]
    experts: int = 0
    trained: bool = True
    shared: bool = False
    owner: int | None = None


@dataclass(frozen=True)
class Section:
    """One section for one microbatch, on one device.

    Attributes:
        inside: the part of forward that selective recomputation repeats.
        saved: bytes saved for backward. Selective recomputation does not save ``saved_inside`` of these; elementwise
            operations can recompute ``saved_rematerialised`` of them in ``rematerialised`` seconds.
        entry: bytes of the inputs from the section before.
        saved_last: bytes of ``saved`` that are computed after the last layer and freed before layers run backward.
        working: the most transient bytes in addition to ``saved`` (:mod:`.transient_memory`).
        flops: FLOPs of products, summed over all devices.
        blocks: blocks of experts. :func:`.section_costs.with_experts` adds their costs to the other fields, and sets
            ``exchanged`` to the bytes that one device sends in each of their exchanges.
        accumulating: seconds in which gradients of a microbatch are added to those of earlier ones.
        lent: weights that it uses, but that another section of its pipeline rank stores and updates.
    """

    forward: Seconds = Seconds()
    backward: Seconds = Seconds()
    inside: Seconds = Seconds()
    saved: int = 0
    saved_inside: int = 0
    saved_last: int = 0
    entry: int = 0
    working: int = 0
    flops: float = 0.0
    weights: tuple[Weight, ...] = ()
    is_layer: bool = False
    blocks: tuple[Block, ...] = ()
    exchanged: tuple[float, ...] = ()
    rematerialised: Seconds = Seconds()
    saved_rematerialised: int = 0
    accumulating: float = 0.0
    lent: tuple[Weight, ...] = ()

    def once(self, key: object, compute: Callable[[], Result]) -> Result:
        """What ``compute`` returns, computed once for each ``key``: one section represents many layers of many
        layouts."""
        if key not in self._known:
            self._known[key] = compute()
        found: Result = self._known[key]
        return found

    @cached_property
    def _known(self) -> dict[object, Any]:
        return {}

    @property
    def runs_backward(self) -> bool:
        """Whether it has a backward pass: frozen layers after nothing that is trained have none."""
        return bool(self.saved or self.backward.total or self.blocks)

    @cached_property
    def whole_sizes(self) -> tuple[int, ...]:
        """Bytes of each weight before it is divided."""
        return tuple(weight.whole * weight.itemsize for weight in self.weights)

    @cached_property
    def trained(self) -> tuple[Weight, ...]:
        """The weights that are trained."""
        return tuple(weight for weight in self.weights if weight.trained)

    @cached_property
    def exchanged_elements(self) -> int:
        """Elements of the gradients of the weights that it stores, before they are divided."""
        return sum(weight.whole for weight in self.trained if weight.owner is None)

    @cached_property
    def shared(self) -> tuple[Weight, ...]:
        """The weights that other sections use too."""
        return tuple(weight for weight in self.weights if weight.shared)


@dataclass(frozen=True)
class Sections:
    """All sections: ``layers`` in order, each with the number of layers it represents. ``cuts``: the chunks into which
    they were cut so far."""

    before: Section
    layers: tuple[Section, ...]
    after: Section
    priced_as: tuple[int, ...] = field(default=())
    cuts: dict[object, list[Chunk]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def every(self) -> tuple[Section, ...]:
        """The sections of the whole model, layers repeated."""
        return (self.before, *(self.layers[i] for i in self.priced_as), self.after)


class Chunk(tuple[Section, ...]):
    """Sections that run one after another on a pipeline rank."""

    @cached_property
    def counted(self) -> list[tuple[Section, int]]:
        """Each distinct section with its number: equal layers share one object."""
        return summed((section, 1) for section in self)

    @cached_property
    def key(self) -> tuple[int, ...]:
        """The same for chunks of the same sections."""
        return tuple(map(id, self))


def summed(sections: Iterable[tuple[Section, int]]) -> list[tuple[Section, int]]:
    """Each distinct section, with the sum of its numbers."""
    counts: dict[int, tuple[Section, int]] = {}
    for section, more in sections:
        _, count = counts.get(id(section), (section, 0))
        counts[id(section)] = section, count + more
    return list(counts.values())


def counted(chunks: Sequence[Chunk]) -> list[tuple[Section, int]]:
    """Each distinct section of several chunks, with its number."""
    return summed(pair for chunk in chunks for pair in chunk.counted)
