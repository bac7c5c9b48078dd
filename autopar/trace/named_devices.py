"""The devices that a model's code names, while it is traced on the processor."""

from __future__ import annotations

import re
from typing import Any

import torch
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
        given = {name: self._meant(value) for name, value in (kwargs or {}).items()}
        return func(*map(self._meant, args), **given)

    def _meant(self, value: Any) -> Any:
        is_named = isinstance(value, str) and self.named.fullmatch(value)
        own = isinstance(value, torch.device) and value.type == self.kind
        return _PROCESSOR if is_named or own else value
