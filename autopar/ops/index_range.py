"""Indices out of range: token ids beyond the vocabulary, labels beyond the classes.

A device that raised in the middle of a program would leave the others waiting for it. So an operation that meets such
an index records it (:func:`any_outside`) and goes on, with a result of nan (:func:`poisoned`);
:func:`take_out_of_range` returns the recorded indices, for the error that every device raises afterwards. Indices are
recorded on CPUs only: a GPU is not synchronised with, and its kernels assert that indices are inside, as in eager
execution.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import FrameType

import torch

# How the file names of functions generated from programs begin.
PROGRAM_FILE = "<autopar "
_NOTED: list[OutOfRange] = []


@dataclass(frozen=True)
class OutOfRange:
    """An index that was not ``low <= value < high``, and the line of the program that met it, ``(file, line)``."""

    value: int
    low: int
    high: int
    place: tuple[str, int] | None = None


def take_out_of_range() -> list[OutOfRange]:
    """Returns the indices recorded since the last call, each once, and clears the record."""
    indices = list(dict.fromkeys(_NOTED))
    _NOTED.clear()
    return indices


def any_outside(index: torch.Tensor, low: int, high: int | None) -> bool:
    """Whether some element of ``index`` is outside of ``low <= i < high`` (``high`` None: the range is unknown); such
    an element is recorded. On a GPU false, with an assertion that fails there."""
    if high is None or type(index) is not torch.Tensor or index.numel() == 0 or index.dtype == torch.bool:
        return False
    if index.device.type == "cuda":
        inside = ((index >= low) & (index < high)).all()
        torch.ops.aten._assert_async.msg(inside, f"an index is outside of [{low}, {high})")
        return False
    if index.device.type != "cpu":
        return False
    least, most = _extremes(index)
    if low <= least and most < high:
        return False
    _NOTED.append(OutOfRange(most if most >= high else least, low, high, _place()))
    return True


def is_outside(index: torch.Tensor, low: int, high: int) -> bool:
    """:func:`any_outside` of an index on a CPU, without a record."""
    if index.numel() == 0 or index.dtype == torch.bool:
        return False
    least, most = _extremes(index)
    return least < low or most >= high


def _extremes(index: torch.Tensor) -> tuple[int, int]:
    least, most = torch.aminmax(index)
    return int(least), int(most)


def poisoned(result: torch.Tensor, bad: bool) -> torch.Tensor:
    """``result``, or nan everywhere if ``bad`` and if its dtype has nan."""
    numbers = result.is_floating_point() or result.is_complex()
    return torch.full_like(result, float("nan")) if bad and numbers else result


def _place() -> tuple[str, int] | None:
    """The line of the program that is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(PROGRAM_FILE):
        frame = frame.f_back
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)
