"""A section of a model as layouts price it: seconds, bytes and weights of one microbatch on one device."""

from __future__ import annotations

from dataclasses import dataclass, field

from .layout_exchange import Block


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
    """A trained parameter on one device of the mesh (context, tensor): its elements there and its dtype's bytes;
    ``partial`` axes are those over which its gradient is left as a sum to be taken. ``experts``: of a weight that has
    an entry of every expert, among how many ranks these are divided; 0 for any other."""

    path: str
    elements: int
    itemsize: int
    partial: tuple[int, ...]
    experts: int = 0


@dataclass(frozen=True)
class Section:
    """One section for one microbatch. ``inside`` is what of forward selective recomputation runs again; ``saved`` the
    bytes kept for backward, ``saved_inside`` those of them that selective recomputation does not keep, ``entry`` those
    of what comes in from the section before; ``working`` the most that one kernel makes. ``flops``: of products, all
    devices together. ``blocks`` of experts are not in these until :func:`with_experts` puts them there, and the bytes
    that one device hands to each of their exchanges into ``exchanged``. ``kept``: seconds of forward that are not spent
    again where all but attention and every other product is, which takes ``saved_kept`` bytes. ``saved_remade``: of
    ``saved`` what elementwise operations make again in ``remade`` seconds."""

    forward: Seconds = Seconds()
    backward: Seconds = Seconds()
    inside: Seconds = Seconds()
    saved: int = 0
    saved_inside: int = 0
    entry: int = 0
    working: int = 0
    flops: float = 0.0
    weights: tuple[Weight, ...] = ()
    is_layer: bool = False
    blocks: tuple[Block, ...] = ()
    exchanged: tuple[float, ...] = ()
    kept: Seconds = Seconds()
    saved_kept: int = 0
    remade: Seconds = Seconds()
    saved_remade: int = 0


@dataclass(frozen=True)
class Sections:
    """All sections: ``layers`` in order, each with the number of layers it stands for."""

    before: Section
    layers: tuple[Section, ...]
    after: Section
    standing: tuple[int, ...] = field(default=())

    @property
    def every(self) -> tuple[Section, ...]:
        """The sections of the whole model, layers repeated."""
        return (self.before, *(self.layers[i] for i in self.standing), self.after)
