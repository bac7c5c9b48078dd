"""How a tensor is sent in fewer bytes. What is lost is added to what is sent next (*error feedback*)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from autopar.errors import OptionsError
from autopar.sync import TopK

# The largest code of int8: symmetric, so that -x has the code of x negated.
_LARGEST = 127.0


class Codec(Protocol):
    """A tensor as bytes, of a number that depends on its number of elements alone."""

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """The flat ``values`` as uint8."""
        ...

    def decode(self, data: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The ``numel`` values that ``data`` says."""
        ...

    def size(self, numel: int) -> int:
        """The bytes of so many values."""
        ...


class Bf16:
    """Rounds to bfloat16: two bytes each."""

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(torch.bfloat16).view(torch.uint8)

    def decode(self, data: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return data.view(torch.bfloat16).to(dtype)

    def size(self, numel: int) -> int:
        return 2 * numel


class Int8:
    """Whole multiples of a 127th of the largest magnitude: a byte each, and a scale of four."""

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        scale = (values.abs().amax() / _LARGEST).to(torch.float32) if values.numel() else values.new_zeros(())
        step = torch.where(scale > 0, scale, torch.ones_like(scale)).to(values.dtype)
        codes = (values / step).round().clamp(-_LARGEST, _LARGEST).to(torch.int8)
        return torch.cat([scale.float().reshape(1).view(torch.uint8), codes.view(torch.uint8)])

    def decode(self, data: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
        scale = data[:4].clone().view(torch.float32).to(dtype)
        return data[4:].view(torch.int8).to(dtype) * scale

    def size(self, numel: int) -> int:
        return 4 + numel


@dataclass(frozen=True)
class Largest:
    """The elements of the largest magnitude, ``fraction`` of them: a value and an index, eight bytes."""

    fraction: float

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        places = values.abs().topk(self._count(values.numel()), sorted=False).indices.to(torch.int32)
        return torch.cat([places.view(torch.uint8), values[places.long()].float().view(torch.uint8)])

    def decode(self, data: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
        half = 4 * self._count(numel)
        places, sent = data[:half].clone().view(torch.int32), data[half:].clone().view(torch.float32)
        return torch.zeros(numel, dtype=dtype, device=data.device).index_copy(0, places.long(), sent.to(dtype))

    def size(self, numel: int) -> int:
        return 8 * self._count(numel)

    def _count(self, numel: int) -> int:
        if numel > torch.iinfo(torch.int32).max:
            raise OptionsError(
                f"TopK sends 32-bit indices, and a shard has {numel} elements: shard it further, or take 'int8'"
            )
        return min(numel, max(1, math.ceil(self.fraction * numel)))


def codec_of(compression: object) -> Codec | None:
    """The codec of ``Options(sync=...(compression=))``; None if values are sent whole."""
    if isinstance(compression, TopK):
        return Largest(compression.fraction)
    codecs: dict[str, Codec] = {"bf16": Bf16(), "int8": Int8()}
    return codecs.get(str(compression))


def pack(codec: Codec, values: Sequence[torch.Tensor]) -> torch.Tensor:
    """All flat ``values`` in one message."""
    return torch.cat([codec.encode(each) for each in values])


def unpack(codec: Codec, message: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What :func:`pack` packed, with the numbers of elements and dtypes of ``like``."""
    parts = message.split([codec.size(each.numel()) for each in like])
    # Cloned, since a view of bytes as a larger type has to begin at a multiple of its size.
    return [codec.decode(p.clone(), v.numel(), v.dtype) for p, v in zip(parts, like, strict=True)]
