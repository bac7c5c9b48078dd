"""Draws that take two integers as a tensor in place of the state of a step, for compiled code.

A draw of :mod:`.random` reads the state on the host and computes ``(start, gamma)`` there. In a compiled step
``autopar.streams`` does so once for all draws of a section, and each draw takes its own ``i64[2]`` on the device:

=========================== ===========================================================================
``autopar.streams``         of a state and of the place, the first element and the distance of each draw
``autopar.bernoulli_of``    a draw of a stream, with all its loops over positions
``autopar.uniform_of``
``autopar.random_bits_of``
=========================== ===========================================================================

They draw the same numbers, bit by bit: element ``(i, j, ...)`` of the loops is ``mix(start + (i s + j t + ...) gamma)``
in 64-bit arithmetic. Nothing reads a value on the host, and draws of equal layers are the same code.

:data:`TRACED_DRAWS` are written so that a compiler of graphs can fuse them with what reads the numbers. The indices of
a loop are multiplied by a value that is not known when code is made, so that they cannot be folded into positions,
which a compiler may count in 32 bits; a loop has less than 2^31 iterations.

The normal distribution is not among them: the inverse distribution function of another library has other bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from .random import Finish, bernoulli_bits, filled, integer_bits, loops_of, mix, started, uniform_bits

STREAMS = "autopar.streams"
# More do not fit into the 32-bit indices of compiled loops.
MOST_ITERATIONS = 1 << 31

_FINISHES: dict[str, Callable[..., Finish]] = {
    "uniform": uniform_bits,
    "bernoulli": bernoulli_bits,
    "random_bits": integer_bits,
}
STREAMED: dict[str, str] = {f"autopar.{name}.default": f"autopar.{name}_of" for name in _FINISHES}
"""By draw of :data:`.random.DRAWS`, the operation that draws the same from a stream."""


def streams(
    state: torch.Tensor, places: Sequence[int], firsts: Sequence[int], distances: Sequence[int], *, device: torch.device
) -> Any:
    """The stream of each of several draws, ``i64[2]`` on ``device``; of one draw the only one. ``state`` is on the
    processor; nothing waits for a GPU."""
    numbers = state.tolist()
    rows = [started(numbers, *draw) for draw in zip(places, firsts, distances, strict=True)]
    made = torch.tensor(rows, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    each = made.to(device, non_blocking=True).unbind()
    return each if len(each) > 1 else each[0]


def _draw_as_it_is(
    finish: Callable[..., Finish],
    stream: torch.Tensor,
    size: Sequence[int],
    *given: float,
    dtype: torch.dtype,
    device: torch.device,
    counts: Sequence[int],
    strides: Sequence[int],
) -> torch.Tensor:
    start, gamma = stream.tolist() if device.type == "cpu" else stream.unbind()
    return filled(finish(dtype, *given), (start, gamma), size, dtype, device, loops_of(counts, strides))


def _traced_draw(
    finish: Callable[..., Finish],
    stream: torch.Tensor,
    size: Sequence[int],
    *given: float,
    dtype: torch.dtype,
    device: torch.device,
    counts: Sequence[int],
    strides: Sequence[int],
) -> torch.Tensor:
    if not math.prod(size):
        return torch.empty(size, dtype=dtype, device=device)
    start, gamma = stream.unbind()
    loops = loops_of(counts, strides, MOST_ITERATIONS)
    bits = start
    for position, (count, stride) in enumerate(loops):
        shape = [count if index == position else 1 for index in range(len(loops))]
        bits = bits + torch.arange(count, device=device).view(shape) * (gamma * stride)
    return finish(dtype, *given)(mix(bits)).to(dtype).reshape(size)


STREAM_OPERATIONS: dict[str, Callable[..., Any]] = {
    STREAMS: streams,
    **{f"autopar.{name}_of": partial(_draw_as_it_is, finish) for name, finish in _FINISHES.items()},
}
"""The operations as they run uncompiled, by name."""
TRACED_DRAWS: dict[str, Callable[..., Any]] = {
    f"autopar.{name}_of": partial(_traced_draw, finish) for name, finish in _FINISHES.items()
}
"""The draws as a compiler traces them."""
