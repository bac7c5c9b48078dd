"""Indices outside of what they index: token ids beyond the vocabulary, labels beyond the classes.

A device that raised in the middle of a program would leave the others waiting for it. So an operation that meets such
an index notes it (:func:`any_outside`) and computes on, with a result of nan (:func:`poisoned`); :func:`noted` gives
what was met, for the error that follows on every device. Only on processors: a GPU is not
waited for, and its kernels assert that indices are inside, as in eager execution.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import FrameType

import torch

# The file names that functions made of programs have.
PROGRAM_FILE = "<autopar "
_NOTED: list[OutOfRange] = []


@dataclass(frozen=True)
class OutOfRange:
    """An index that was not ``low <= value < high``, met by the line of a program, ``(file, line)``."""

    value: int
    low: int
    high: int
    place: tuple[str, int] | None = None


def noted() -> list[OutOfRange]:
    """What was met since this was last asked, once."""
    found = list(dict.fromkeys(_NOTED))
    _NOTED.clear()
    return found


def any_outside(index: torch.Tensor, low: int, high: int | None) -> bool:
    """Whether some element of ``index`` is outside of ``low <= i < high``, which is noted (``high`` None: nothing is
    known). On a GPU false, with an assertion that fails there."""
    if high is None or type(index) is not torch.Tensor or index.numel() == 0 or index.dtype == torch.bool:
        return False
    if index.device.type == "cuda":
        inside = ((index >= low) & (index < high)).all()
        torch.ops.aten._assert_async.msg(inside, f"an index is outside of [{low}, {high})")
        return False
    if index.device.type != "cpu":
        return False
    least, most = (int(value) for value in torch.aminmax(index))
    if low <= least and most < high:
        return False
    _NOTED.append(OutOfRange(most if most >= high else least, low, high, _place()))
    return True


def poisoned(result: torch.Tensor, bad: bool) -> torch.Tensor:
    """``result``, all nan if ``bad`` and if its dtype has one."""
    numbers = result.is_floating_point() or result.is_complex()
    return torch.full_like(result, float("nan")) if bad and numbers else result


def _place() -> tuple[str, int] | None:
    """The line of the program that is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(PROGRAM_FILE):
        frame = frame.f_back
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)
