"""The space of layouts that a search tries: every way to divide devices into tensor, pipeline and data ranks, experts
among data ranks, and the batch into microbatches and chunks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

from autopar.errors import OptionsError
from autopar.layout import Layout, divisors

# Samples of a microbatch, and chunks per stage, that are tried.
# Chosen: larger ones take memory; of others a published layout is named by --compare.
MICROBATCHES = (1, 2, 4)
# Chosen: small numbers and divisors of usual numbers of layers; not measured.
CHUNKS = (1, 2, 3, 4, 6, 8)
# What layouts recompute, and recipes: the second ``"elementwise"``.
Recompute = Literal["none", "selective", "elementwise", "full"]
ONE = Layout()
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "elementwise", "full")


@dataclass(frozen=True)
class Space:
    """The values that are tried of each field of a layout.

    An empty field means the defaults: tensor ranks within a node, stages and data ranks that divide the devices,
    :data:`MICROBATCHES`, :data:`CHUNKS`, every recomputation, ZeRO-1 over data ranks (planning itself searches
    :data:`PLANNED`), and the sequence divided among tensor ranks. ``microbatches`` is how many of them a data rank
    computes in a step."""

    tensor: tuple[int, ...] = ()
    pipeline: tuple[int, ...] = ()
    data: tuple[int, ...] = ()
    expert: tuple[int, ...] = ()
    microbatch: tuple[int, ...] = ()
    microbatches: tuple[int, ...] = ()
    interleave: tuple[int, ...] = ()
    recompute: tuple[Recompute, ...] = ()
    sequence_parallel: tuple[bool, ...] = ()
    zero: tuple[Literal[0, 1, 2, 3], ...] = ()


ANY = Space()
# What planning tries: also ZeRO-3, which shards weights and gathers them for every use.
PLANNED = Space(zero=(1, 3))


def expert_degrees(experts: int, tensor: int, data: int) -> list[int]:
    """The numbers of ``data`` ranks among which ``experts`` can be divided, where each tensor rank has its own."""
    held = experts // tensor if experts % tensor == 0 else experts
    return divisors(math.gcd(held, data)) if held else [1]


def candidates(
    devices: int, batch: int, layers: int, node: int, experts: int = 0, like: Layout = ONE, space: Space = ANY
) -> Iterator[Layout]:
    """The layouts of ``space`` on so many devices.

    Args:
        batch: samples of a step.
        layers: the model's layers, which bound the number of stages.
        node: devices of a node, which bound the tensor degree.
        experts: experts of each of the model's blocks, divided in every way; 0 if it has none.
        like: supplies every field that is not searched.

    Skips values that cannot be combined with ``like``. Raises :class:`OptionsError` if none can.
    """
    refused, any_fits = list[OptionsError](), False
    for values in _Fields(devices, batch, layers, node, experts, like, space).every():
        try:
            layout = replace(like, **values)
        except OptionsError as error:
            refused = refused or [error]
            continue
        any_fits = True
        yield layout
    if refused and not any_fits:
        raise refused[0]


@dataclass(frozen=True)
class _Fields:
    """The values of the searched fields, of each layout; the arguments are those of :func:`candidates`."""

    devices: int
    batch: int
    layers: int
    node: int
    experts: int
    like: Layout
    space: Space

    def every(self) -> Iterator[dict[str, Any]]:
        for tensor, pipeline, data in self._degrees():
            sharing = data * self.like.context
            for microbatch in self._microbatches(data):
                for expert in self.space.expert or expert_degrees(self.experts, tensor, data):
                    if sharing % expert == 0:
                        degrees = {"tensor": tensor, "pipeline": pipeline, "data": data, "expert": expert}
                        count = self.batch // (data * microbatch)
                        for variant in self._variants(tensor, pipeline, sharing, count):
                            yield {**degrees, "microbatch": microbatch, **variant}

    def _degrees(self) -> Iterator[tuple[int, int, int]]:
        """Tensor, pipeline and data ranks that use all devices, in addition to the context ranks."""
        ranks = self.devices // self.like.context
        for tensor in self.space.tensor or (t for t in divisors(ranks) if self.node % t == 0):
            for pipeline in self.space.pipeline or self._stages(ranks):
                data = ranks // (tensor * pipeline)
                takes_all = data * tensor * pipeline * self.like.context == self.devices
                if takes_all and (not self.space.data or data in self.space.data):
                    yield tensor, pipeline, data

    def _stages(self, ranks: int) -> list[int]:
        """Numbers of stages: each has at least one layer."""
        return [p for p in divisors(ranks) if p <= max(1, self.layers)]

    def _microbatches(self, data: int) -> list[int]:
        """The sizes of microbatches into which each of ``data`` ranks divides its part of the batch."""
        if self.batch % data:
            return []
        samples, counts = self.batch // data, self.space.microbatches
        sizes = self.space.microbatch or (divisors(samples) if counts else MICROBATCHES)
        return [s for s in sizes if samples % s == 0 and (not counts or samples // s in counts)]

    def _variants(self, tensor: int, pipeline: int, sharing: int, count: int) -> Iterator[dict[str, Any]]:
        """The other fields where ``sharing`` ranks have the same weights and compute ``count`` microbatches each."""
        space = self.space
        divides = (space.sequence_parallel or (True,)) if tensor > 1 else (False,)
        zeros = (space.zero or (1,)) if sharing > 1 else (0,)
        for interleave in space.interleave or CHUNKS:
            # The first chunk may consist of the embedding alone, the last of the head.
            chunked = pipeline > 1 and pipeline * interleave <= self.layers + 2 and count >= pipeline
            if interleave > 1 and not chunked:
                continue
            for recompute, sequence, zero in product(space.recompute or RECOMPUTE, divides, zeros):
                yield {
                    "interleave": interleave,
                    "recompute": recompute,
                    "sequence_parallel": sequence,
                    "zero": zero,
                }
