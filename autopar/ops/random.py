"""Random numbers that depend only on their position.

Element ``i`` of draw ``place`` of a model is a function of (seed, stream, step, place, i), with ``i`` counted over the
whole tensor: any device can draw its part of it, in any order and repeatedly, and all plans see the same numbers.

The function is SplitMix64 (Steele, Lea, Flood, *Fast splittable pseudorandom number generators*, OOPSLA 2014): element
``i`` is ``mix(start + (i + 1) * gamma)`` in 64-bit arithmetic, ``mix`` being Stafford's variant 13 of the murmur
finaliser. Each draw has its own ``start`` and odd ``gamma``, as splitting does there, taken from a BLAKE2b digest;
``gamma`` is repaired as in the paper if its bits change too rarely.

Operations take the state of the step first: ``i64[4]`` on the CPU, (seed, stream, step, piece).

========================= ==============================================================
``autopar.random_state``  that state; only while a model is traced
``autopar.uniform``       uniform in [0, 1): 53, 24, 11 or 8 bits by dtype
``autopar.bernoulli``     1 with probability ``p``, else 0
``autopar.normal``        standard normal: the inverse distribution function of a uniform
``autopar.random_bits``   integers, uniform in [0, 2^63)
========================= ==============================================================

Elements are counted with samples outermost, so that the numbers of a sample do not depend on how many there are:
``samples = (dim, each)`` says that ``dim`` counts samples (or equally many rows of each) and that a sample has ``each``
elements; it is empty where no dim does. Where a batch is run in pieces, ``each`` is the distance between the first
elements of two consecutive pieces (0 if all draw the same), and ``state[3]`` is the piece; else it is 0.
A part of the tensor is described by its ``first`` element and, for each loop over the part from the outermost
in, its number of iterations (``counts``) and its stride (``strides``); without counts it is the whole tensor.

What a draw takes from the state are two integers, its *stream*: ``start`` of its first element, and ``gamma``. In
compiled code draws take them as a tensor (:mod:`.random_streams`).
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

# 64 bits.
_MASK = (1 << 64) - 1
# Stafford's variant 13, as in SplitMix64 (see the module docstring).
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
# Bits of the significand, the leading one included (IEEE 754; bfloat16).
_DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
# Elements drawn at a time: the passes over them stay in the cache of a core, or fill a larger device.
# Chosen: 256 KiB of 64-bit integers.
_BLOCK = {"cpu": 1 << 15}
# Chosen: 128 MiB of 64-bit integers, which bound the temporary memory of a draw.
_LARGE_BLOCK = 1 << 24
# (seed, stream, step, piece), see the module docstring.
STATE_SHAPE = (4,)

Finish = Callable[[torch.Tensor], torch.Tensor]


def _signed(number: int) -> int:
    """The same 64 bits as a signed integer."""
    number &= _MASK
    return number - (1 << 64) if number >> 63 else number


def stream(seed: int, kind: int, step: int, place: int) -> tuple[int, int]:
    """``(start, gamma)`` of the sequence of one draw, as signed integers.

    >>> stream(0, 0, 0, 0) == stream(0, 0, 0, 0) != stream(0, 0, 1, 0)
    True
    """
    digest = hashlib.blake2b(struct.pack("<4q", seed, kind, step, place), digest_size=16).digest()
    start, gamma = struct.unpack("<2Q", digest)
    gamma |= 1
    if (gamma ^ (gamma >> 1)).bit_count() < 24:
        gamma ^= 0xAAAAAAAAAAAAAAAA
    return _signed(start), _signed(gamma)


def _shifted(bits: torch.Tensor, count: int) -> torch.Tensor:
    """A logical shift to the right: torch's repeats the sign."""
    return (bits >> count).bitwise_and_((1 << (64 - count)) - 1)


def mix(bits: torch.Tensor) -> torch.Tensor:
    """SplitMix64's ``mix``, in place."""
    bits.bitwise_xor_(_shifted(bits, 30)).mul_(_signed(_MULTIPLIERS[0]))
    bits.bitwise_xor_(_shifted(bits, 27)).mul_(_signed(_MULTIPLIERS[1]))
    return bits.bitwise_xor_(_shifted(bits, 31))


def position_strides(size: Sequence[Any], samples: Sequence[Any]) -> tuple[Any, ...]:
    """The stride of each dim of a whole tensor, as elements are counted: row-major, with the dim of samples outermost.

    >>> position_strides((2, 3, 4), ()), position_strides((2, 3, 4), (1, 8))
    ((12, 4, 1), (4, 8, 1))
    """
    order = sorted(range(len(size)), key=lambda dim: (dim != samples[0] if samples else False, dim))
    strides, step = [1] * len(size), 1
    for dim in reversed(order):
        strides[dim], step = step, step * size[dim]
    return tuple(strides)


def loops_of(counts: Sequence[int], strides: Sequence[int], most: float = math.inf) -> list[tuple[int, int]]:
    """The loops without those of one iteration; adjacent loops that form one of less than ``most`` iterations are
    merged. At least one loop."""
    loops: list[tuple[int, int]] = []
    for count, stride in zip(counts, strides, strict=True):
        if count == 1:
            continue
        if loops and loops[-1][1] == count * stride and loops[-1][0] * count < most:
            loops[-1] = (loops[-1][0] * count, stride)
        else:
            loops.append((count, stride))
    return loops or [(1, 1)]


def _times(gamma: Any, count: int) -> Any:
    """``count * gamma`` of 64-bit integers, of which ``gamma`` may be a tensor."""
    return _signed(count * gamma) if isinstance(gamma, int) else gamma * _signed(count)


def _blocks(loops: list[tuple[int, int]], start: Any, gamma: Any, device: torch.device) -> Iterator[torch.Tensor]:
    """Yields the mixed bits of a part, block after block in the order of its elements. ``start`` and ``gamma`` are
    integers, or tensors of one on the device."""
    limit = _BLOCK.get(device.type, _LARGE_BLOCK)
    count, stride = loops[-1]
    is_number = isinstance(start, int)
    outer = torch.full((1,), start, dtype=torch.int64, device=device) if is_number else start.reshape(1)
    for turns, step in loops[:-1]:
        moves = torch.arange(turns, device=device).mul_(_times(gamma, step))
        outer = (outer[:, None] + moves).flatten()
    width = min(count, limit)
    rows = max(1, limit // width) if width == count else 1
    for row in range(0, len(outer), rows):
        for column in range(0, count, width):
            inner = torch.arange(column, min(column + width, count), device=device).mul_(_times(gamma, stride))
            yield mix(outer[row : row + rows, None] + inner).flatten()


def _draw(
    finish: Finish,
    state: torch.Tensor,
    size: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    place: int,
    samples: Sequence[int],
    part: tuple[int, Sequence[int], Sequence[int]],
) -> torch.Tensor:
    first, counts, strides = part if part[1] else (0, size, position_strides(size, samples))
    start, gamma = started(state.tolist(), place, first, samples[1] if samples else 0)
    return filled(finish, (start, gamma), size, dtype, device, loops_of(counts, strides))


def started(state: list[int], place: int, first: int, distance: int) -> tuple[int, int]:
    """``start`` of the first element of a part, and ``gamma``. ``distance``: of consecutive pieces."""
    seed, kind, step, piece = state
    begin, gamma = stream(seed, kind, step, place)
    return _signed(begin + (first + piece * distance + 1) * gamma), gamma


def filled(
    finish: Finish,
    start_and_gamma: tuple[Any, Any],
    size: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    loops: list[tuple[int, int]],
) -> torch.Tensor:
    """The numbers that ``finish`` makes of the bits of all ``loops``. ``start_and_gamma``: as for :func:`_blocks`."""
    result = torch.empty(size, dtype=dtype, device=device)
    if not result.numel():
        return result
    flat, done = result.view(-1), 0
    for bits in _blocks(loops, *start_and_gamma, device):
        flat[done : done + bits.numel()].copy_(finish(bits))
        done += bits.numel()
    return result


def uniform_bits(dtype: torch.dtype) -> Finish:
    """Makes uniform numbers of bits: as many as the dtype has."""
    digits = _DIGITS[dtype]
    exact = torch.float64 if digits > 24 else torch.float32
    return lambda bits: _shifted(bits, 64 - digits).to(exact).mul_(2**-digits)


def _normal(dtype: torch.dtype) -> Finish:
    return lambda bits: torch.special.ndtri(_shifted(bits, 11).to(torch.float64).add_(0.5).mul_(2**-53))


def bernoulli_bits(dtype: torch.dtype, p: float) -> Finish:
    """Makes of bits what is true with probability ``p``."""
    threshold = math.ceil(p * 2**53)
    return lambda bits: _shifted(bits, 11) < threshold


def integer_bits(dtype: torch.dtype) -> Finish:
    """Makes integers of bits, none negative."""
    return lambda bits: _shifted(bits, 1)


def _no_state() -> torch.Tensor:
    raise RuntimeError("autopar.random_state is a placeholder of graphs and holds no numbers by itself")


_library = torch.library.Library("autopar", "FRAGMENT")
_library.define("random_state() -> Tensor")
_library.impl("random_state", _no_state, "CompositeExplicitAutograd")


def _fake_state() -> torch.Tensor:
    return torch.empty(STATE_SHAPE, dtype=torch.int64, device="cpu")


torch.library.register_fake("autopar::random_state", _fake_state, lib=_library)


def _define(name: str, finish: Callable[..., Finish], own: str = "") -> Any:
    """The operation ``name``; ``own`` are its arguments after the size, which ``finish`` takes after the dtype."""
    part = "int place=0, SymInt[] samples=[], int first=0, int[] counts=[], int[] strides=[]"
    _library.define(f"{name}(Tensor state, SymInt[] size{own}, *, ScalarType dtype, Device device, {part}) -> Tensor")

    def run(
        state: torch.Tensor,
        size: Sequence[int],
        *given: float,
        dtype: torch.dtype,
        device: torch.device,
        place: int = 0,
        samples: Sequence[int] = (),
        first: int = 0,
        counts: Sequence[int] = (),
        strides: Sequence[int] = (),
    ) -> torch.Tensor:
        part = (first, counts, strides)
        return _draw(finish(dtype, *given), state, size, dtype, device, place, samples, part)

    def fake(state: torch.Tensor, size: Sequence[int], *given: float, **options: Any) -> torch.Tensor:
        return torch.empty(size, dtype=options["dtype"], device=options["device"])

    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"autopar::{name}", fake, lib=_library)
    return getattr(torch.ops.autopar, name).default


STATE_OP = "autopar.random_state.default"
_FINISHES = (
    ("uniform", uniform_bits, ""),
    ("normal", _normal, ""),
    ("bernoulli", bernoulli_bits, ", float p"),
    ("random_bits", integer_bits, ""),
)
DRAWS: dict[str, Any] = {f"autopar.{name}.default": _define(name, finish, own) for name, finish, own in _FINISHES}
"""The operations that draw, by the names that graphs and programs use."""
