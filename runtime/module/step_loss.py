"""The loss that :meth:`~autopar.runtime.ParallelModule.step` returns: a detached tensor, of which ``backward()``, also
of a multiple of it, says what has been done already."""

from __future__ import annotations

import copy
from typing import Any, NoReturn

import torch

from autopar.errors import AutoparError
from autopar.runtime.torch_internals.plain_calls import plain_calls

# What a loop does to a loss before backward(): of these the result is still a loss of the step.
_NAMES = ("mul", "div", "true_divide", "add", "sub", "mean", "sum")
_OPERATORS = ("__mul__", "__rmul__", "__truediv__", "__add__", "__radd__", "__sub__")
_SCALED = frozenset(getattr(torch.Tensor, name) for name in (*_NAMES, *_OPERATORS))


class StepLoss(torch.Tensor):
    """A tensor in all else: copies, files and what functions compute from it are plain tensors, except its multiples
    and sums with numbers, as long as nothing in them requires a gradient."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with plain_calls():
            result = func(*args, **(kwargs or {}))
        return differentiated(result) if func in _SCALED and _is_detached(result) else result

    def backward(self, *_: Any, **__: Any) -> NoReturn:
        raise AutoparError(
            "step() has run backward already and left the gradients on the parameters: leave backward() out and call "
            "optimizer.step(). A factor of the loss is step(..., scale=1 / 4). For a loss of your own: "
            "loss = model(...), which (loss / 4).backward() may follow"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return copy.deepcopy(self.as_subclass(torch.Tensor), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """What pickles and files hold needs nothing of autopar."""
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self.as_subclass(torch.Tensor))


def _is_detached(result: Any) -> bool:
    return type(result) is torch.Tensor and not result.requires_grad and result.numel() == 1


def differentiated(loss: torch.Tensor) -> torch.Tensor:
    """``loss`` itself as a :class:`StepLoss`."""
    return loss.as_subclass(StepLoss)
