"""The devices that a model's code names, while it is traced on the processor."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_PROCESSOR = torch.device("cpu")


class OnProcessor(TorchFunctionMode):
    """Makes each ``device="cuda"``, ``.to("cuda:0")`` and ``.cuda()`` (of the kind given) mean the processor."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.named = re.compile(rf"{re.escape(kind)}(:\d+)?")
        self.moves = {getattr(torch.Tensor, kind, None), getattr(torch.nn.Module, kind, None)} - {None}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.moves:
            return args[0]
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        given = {name: self._meant(value, name == "device") for name, value in (kwargs or {}).items()}
        placed = [self._meant(value, func is torch.Tensor.to) for value in args]
        if func is F.scaled_dot_product_attention:
            with _any_fused_kernel():
                return func(*placed, **given)
        return func(*placed, **given)

    def _meant(self, value: Any, is_device: bool) -> Any:
        """``value``, or the processor if it names the device. A number does (``.to(0)``) where ``is_device``."""
        is_named = isinstance(value, str) and self.named.fullmatch(value)
        own = isinstance(value, torch.device) and value.type == self.kind
        return _PROCESSOR if is_named or own or (is_device and type(value) is int) else value


@contextmanager
def _any_fused_kernel() -> Iterator[None]:
    """A model that allows only kernels of GPUs (``sdpa_kernel``) means the processor's fused one."""
    cuda = torch.backends.cuda
    flash = cuda.flash_sdp_enabled()
    cuda.enable_flash_sdp(flash or cuda.mem_efficient_sdp_enabled() or cuda.cudnn_sdp_enabled())
    try:
        yield
    finally:
        cuda.enable_flash_sdp(flash)


@contextmanager
def autocast_on_processor(kind: str) -> Iterator[None]:
    """Within, ``torch.autocast("cuda", ...)`` (of the ``kind`` given) in a model's code is that of the processor."""
    enter = torch.autocast.__init__

    def begin(self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any) -> None:
        own = device_type == kind
        enter(
            self,
            "cpu" if own else device_type,
            dtype or (torch.get_autocast_dtype(kind) if own else None),
            *args,
            **kwargs,
        )

    with patch.object(torch.autocast, "__init__", begin):
        yield
