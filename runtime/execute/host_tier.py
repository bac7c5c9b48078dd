"""Tensors in host memory: saved activations, copied there once they are computed and back before backward uses them,
and weights, which rest there and are copied for their uses in forward, and again in backward.

A GPU copies on a stream of its own in each direction, to and from pinned memory, while it goes on computing. On a
processor, whose memory is the host's, the copies are real ones, made where they are asked for. The copy is read back
with the strides of the original, so that kernels see the same tensor.

No program has run on a GPU yet (docs/gpu.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from autopar.runtime.comm.collectives import Handle
from autopar.torch_internals.fake_tensors import FakeTensor


@dataclass(eq=False)
class HostCopy:
    """A tensor in host memory. ``shape``, ``stride``, ``dtype``: of the original; ``data``: None where there are no
    numbers; ``done``: the event of a GPU after which ``data`` is there."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    data: torch.Tensor | None = None
    done: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes in host memory."""
        return self.shape.numel() * self.dtype.itemsize


class HostTier:
    """The host memory of ``device``."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @cached_property
    def _out(self) -> Any:
        return torch.cuda.Stream(self.device)

    @cached_property
    def _back(self) -> Any:
        return torch.cuda.Stream(self.device)

    def store(self, tensor: torch.Tensor) -> HostCopy:
        """Copies ``tensor`` to host memory; on a GPU the copy is under way when this returns."""
        copy = HostCopy(tensor.shape, _dense_strides(tensor), tensor.dtype)
        if _has_no_numbers(tensor):
            return copy
        on_gpu = tensor.device.type == "cuda"
        copy.data = torch.empty_strided(copy.shape, copy.stride, dtype=copy.dtype, pin_memory=on_gpu)
        if not on_gpu:
            copy.data.copy_(tensor)
            return copy
        self._out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._out):
            copy.data.copy_(tensor, non_blocking=True)
            copy.done = self._out.record_event()
        # The allocator may hand out the memory of ``tensor`` only when it was copied.
        tensor.record_stream(self._out)
        return copy

    def rest(self, tensor: torch.Tensor | HostCopy) -> HostCopy:
        """A stored weight that rests in host memory, a processor's own: nothing is copied. In a rehearsal, which counts
        the device's memory, it is a copy already."""
        if isinstance(tensor, HostCopy):
            return tensor
        data = None if _has_no_numbers(tensor) else tensor.detach()
        return HostCopy(tensor.shape, _dense_strides(tensor), tensor.dtype, data)

    def fetch(self, copy: HostCopy) -> Handle:
        """Starts to copy back; the handle's ``wait`` returns the tensor on the device."""
        if copy.data is None or self.device.type != "cuda":
            tensor = torch.empty_strided(copy.shape, copy.stride, dtype=copy.dtype, device=self.device)
            if copy.data is not None:
                tensor.copy_(copy.data)
            return Handle(lambda: tensor)
        with torch.cuda.stream(self._back):
            self._back.wait_event(copy.done)
            back = copy.data.to(self.device, non_blocking=True)
            arrived = self._back.record_event()
        return Handle(lambda: self._arrived(back, arrived, copy))

    def _arrived(self, tensor: torch.Tensor, arrived: Any, copy: HostCopy) -> torch.Tensor:
        """Makes the computing stream wait. ``copy`` lives until here: pinned memory may be reused once it is freed, and
        torch's allocator of it knows of the stream that reads it."""
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(arrived)
        tensor.record_stream(stream)
        return tensor


def _dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides of ``tensor``, or if it has gaps or overlaps those of a contiguous one."""
    expected = 1
    dims = [(stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    for stride, size in sorted(dims):
        if stride != expected:
            return contiguous_strides(tensor.shape)
        expected *= size
    return tensor.stride()


def contiguous_strides(shape: torch.Size) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(math.prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape)))


def _has_no_numbers(tensor: torch.Tensor) -> bool:
    """Whether this is a rehearsal."""
    return tensor.device.type == "meta" or isinstance(tensor, FakeTensor)
