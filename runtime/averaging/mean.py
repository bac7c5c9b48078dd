"""The mean of tensors over replicas: whole, or compressed with error feedback."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist

from autopar.runtime.comm.groups import AxisGroup
from autopar.sync import PowerSGD

from .codecs import Codec, codec_of, pack, unpack
from .pending import Pending, Sender, Values
from .power_sgd import PowerMean

Given = Mapping[str, torch.Tensor]


class Mean(Protocol):
    """A way to send: ``start`` begins, for tensors of the same names and shapes on all peers."""

    def start(self, values: Given) -> Sender:
        """Makes ``values`` ready, which stay as they are until they have been sent for the last time."""
        ...

    def state(self) -> dict[str, Any]:
        """What the next exchange depends on."""
        ...

    def load(self, state: Mapping[str, Any]) -> None:
        """Restores it."""
        ...


def mean_by(compression: object, repeats: bool) -> Mean:
    """The way that ``Options(sync=...(compression=))`` says. ``repeats``: senders may be called again."""
    if isinstance(compression, PowerSGD):
        return PowerMean(compression.rank, repeats)
    codec = codec_of(compression)
    return WholeMean() if codec is None else CodedMean(codec)


class WholeMean:
    """Sums by one all-reduce for each dtype."""

    def start(self, values: Given) -> Sender:
        shapes = {name: value.shape for name, value in values.items()}

        def send(peers: AxisGroup) -> Pending:
            if peers.size == 1 or not values:
                return Pending([], lambda: {name: value.clone() for name, value in values.items()})
            flats = [(names, torch.cat([values[n].reshape(-1) for n in names])) for names in _by_dtype(values)]
            works = [dist.all_reduce(flat, group=peers.group, async_op=True) for _, flat in flats]

            def finish() -> Values:
                means: Values = {}
                for names, flat in flats:
                    parts = flat.div_(peers.size).split([math.prod(shapes[name]) for name in names])
                    means |= {name: part.view(shapes[name]) for name, part in zip(names, parts, strict=True)}
                return means

            return Pending(works, finish)

        return send

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        pass


class CodedMean:
    """Every replica sends its own in a code to all others, and decodes theirs. ``residuals``: what a code lost, which
    is added to the next values."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self.residuals: dict[str, torch.Tensor] = {}

    def start(self, values: Given) -> Sender:
        names = list(values)
        flat = [self._with_residual(name, values[name]) for name in names]
        if not flat:
            return lambda _: Pending([], dict)
        message = pack(self._codec, flat)
        sent = unpack(self._codec, message, flat)
        self.residuals |= {n: value - own for n, value, own in zip(names, flat, sent, strict=True)}
        shapes = [values[name].shape for name in names]

        def send(peers: AxisGroup) -> Pending:
            received, works = [message], []
            if peers.size > 1:
                received = [torch.empty_like(message) for _ in range(peers.size)]
                works = [dist.all_gather(received, message, group=peers.group, async_op=True)]

            def finish() -> Values:
                # In the order of the replicas, so that the sum is the same on all.
                total = [torch.zeros_like(value) for value in flat]
                for each in received:
                    for value, part in zip(total, unpack(self._codec, each, flat), strict=True):
                        value.add_(part)
                means = (value.div_(peers.size).view(shape) for value, shape in zip(total, shapes, strict=True))
                return dict(zip(names, means, strict=True))

            return Pending(works, finish)

        return send

    def _with_residual(self, name: str, value: torch.Tensor) -> torch.Tensor:
        flat = value.reshape(-1)
        return flat + self.residuals[name] if name in self.residuals else flat.clone()

    def state(self) -> dict[str, Any]:
        return {"residuals": dict(self.residuals)}

    def load(self, state: Mapping[str, Any]) -> None:
        self.residuals = dict(state["residuals"])


def _by_dtype(values: Given) -> list[list[str]]:
    groups: dict[torch.dtype, list[str]] = {}
    for name, value in values.items():
        groups.setdefault(value.dtype, []).append(name)
    return list(groups.values())
