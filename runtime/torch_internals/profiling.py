"""Ranges in the traces of ``torch.profiler``."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.profiler import record_function


def profiling() -> bool:
    """Whether a profiler of torch records this thread; takes 50 ns. Relies on ``torch.autograd._profiler_enabled``
    (2.11)."""
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


def span(name: object) -> AbstractContextManager[object]:
    """A range called ``name`` in the trace, if one is recorded. Relies on :func:`profiling` (2.11)."""
    return record_function(str(name)) if profiling() else nullcontext()
