"""Functions of torch on tensors of a class of ours, as if they were plain."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch


def plain_calls() -> AbstractContextManager[None]:
    """Inside, ``__torch_function__`` of subclasses is not called, and results are plain. Relies on
    ``torch._C.DisableTorchFunctionSubclass`` (2.11), which torch's notes on extending it describe."""
    return torch._C.DisableTorchFunctionSubclass()
