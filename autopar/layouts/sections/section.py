"""A section of a model as layouts price it: seconds, bytes and weights of one microbatch on one device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from .expert_all_to_all import Block


@dataclass(frozen=True)
class Seconds:
    """Computing, communicating, and waiting for the host, which starts operations one by one."""

    compute: float = 0.0
    communicate: float = 0.0
    host: float = 0.0

    def __sub__(self, other: Seconds) -> Seconds:
        return self + Seconds(-other.compute, -other.communicate, -other.host)

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.compute + other.compute, self.communicate + other.communicate, self.host + other.host)

    @property
    def total(self) -> float:
        return self.compute + self.communicate + self.host


@dataclass(frozen=True)
class Weight:
    """A parameter on one device of the mesh (context, tensor): its elements there and its dtype's bytes; ``partial``
    axes are those over which its gradient is left as a sum to be taken. ``experts``: of a weight that has an entry of
    every expert, among how many ranks these are divided; 0 for any other. One that is not ``trained`` has neither
    gradient nor optimizer state; of one that is ``cast`` products take copies in fp8. A ``shared`` one is a weight of
    several sections. ``again``: what takes it once more in backward: what ``"selective"`` or
    ``"elementwise"`` recomputation computes again, or the modules that are ``"recomputed"`` by name."""

    path: str
    elements: int
    itemsize: int
    partial: tuple[int, ...]
    experts: int = 0
    trained: bool = True
    cast: bool = False
    shared: bool = False
    again: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Section:
    """One section for one microbatch, on one device.

    Attributes:
        inside: what of forward selective recomputation runs again.
        saved: bytes kept for backward. Of these ``saved_inside`` are not kept by selective recomputation, and
            ``saved_rematerialised`` are made again by elementwise operations in ``rematerialised`` seconds.
        entry: bytes of what comes in from the section before.
        saved_last: of ``saved``, what is made after the last layer and goes before layers run backward.
        working: the most bytes that are there for a moment beside ``saved`` (:mod:`.transient_memory`).
        flops: of products, of all devices together.
        blocks: of experts; they are not part of the other figures until :func:`.section_costs.with_experts` adds them,
            and puts the bytes that one device hands to each of their exchanges into ``exchanged``.
        kept: seconds of forward that are not spent again under ``recompute="operations"``, which takes ``saved_kept``
            bytes.
        again: what modules that :attr:`.Layout.recomputed` names take once more in backward, which has then
            ``saved_again`` bytes more than are kept.
        lent: weights that it takes too, but which rest, and are updated, in another section of its pipeline rank.
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
    kept: Seconds = Seconds()
    saved_kept: int = 0
    rematerialised: Seconds = Seconds()
    saved_rematerialised: int = 0
    again: Seconds = Seconds()
    saved_again: int = 0
    lent: tuple[Weight, ...] = ()

    @property
    def runs_backward(self) -> bool:
        """Whether anything comes back: of frozen layers that nothing trained comes before, nothing does."""
        return bool(self.saved or self.backward.total or self.blocks)

    @property
    def trained(self) -> tuple[Weight, ...]:
        """The weights that learn."""
        return tuple(weight for weight in self.weights if weight.trained)

    @cached_property
    def shared(self) -> tuple[Weight, ...]:
        """The weights that other sections have too. Found once: one section represents many layers of many layouts."""
        return tuple(weight for weight in self.weights if weight.shared)


@dataclass(frozen=True)
class Sections:
    """All sections: ``layers`` in order, each with the number of layers it represents."""

    before: Section
    layers: tuple[Section, ...]
    after: Section
    priced_as: tuple[int, ...] = field(default=())

    @property
    def every(self) -> tuple[Section, ...]:
        """The sections of the whole model, layers repeated."""
        return (self.before, *(self.layers[i] for i in self.priced_as), self.after)


def counted(sections: Iterable[Section]) -> list[tuple[Section, int]]:
    """Each section once, with how often it is among them: what represents equal layers is one object."""
    found: dict[int, tuple[Section, int]] = {}
    for section in sections:
        _, before = found.get(id(section), (section, 0))
        found[id(section)] = section, before + 1
    return list(found.values())
