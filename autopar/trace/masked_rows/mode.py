"""Traces rows selected by values, without shapes that depend on values, in models that give each expert its tokens
(``x[mask]``, ``torch.where(chosen == e)``, ``nonzero``).

A selection represents all places with a mask. A function that treats each selected row by itself runs on all rows
(:mod:`.rowwise_proof` proves that it does). Putting rows back through the same selection changes only selected rows,
and a sum over the rows counts only these. Rows that are not selected are zeros before and after any operation that
could turn a finite number into one that is not finite, so that no NaN of theirs reaches a result or a gradient. Any
other dependence on the number of rows is an error.

An expert then works on all tokens, which is exact and drops nothing. It costs (number of experts) / (experts per token)
times the FLOPs: :class:`SelectedRows` counts, and the plan warns.

Checks that only raise for bad values (``assert good.all()``) are left out (:mod:`.assertions`).

A loop over the experts that some token chose (``for e in counts.nonzero()``) becomes one over all, and a branch taken
only if a selection has rows is always taken, if that changes nothing (:mod:`.branches`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from autopar.torch_internals.trees import tree_flatten, tree_map

from . import ctc_loss as _ctc  # noqa: F401  (registers)
from . import reductions as _sums  # noqa: F401
from .branches import Regions
from .functions import CALLS
from .gather_scatter import Index, gather
from .mask_facts import Facts
from .rowwise import each_row
from .tensors import ExpertNumber, Rows, Selection

_STATISTICS = {F.batch_norm, F.instance_norm}


class SelectedRows(TorchFunctionMode):
    """Intercepts functions that select rows by values, and functions of these rows. ``module`` returns the path of the
    running module."""

    def __init__(self, module: Callable[[], str]) -> None:
        super().__init__()
        self._module = module
        self.restart()

    def restart(self) -> None:
        """Clears all records; torch runs the model more than once."""
        self.facts, self.regions = Facts(), Regions()
        self.taken: Counter[str] = Counter()
        self.checks: dict[str, None] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_flatten((args, kwargs))[0]
        has_rows = any(isinstance(leaf, Rows) for leaf in leaves)
        if any(isinstance(leaf, ExpertNumber) for leaf in leaves):
            answer = _of_expert_number(self, func, args, kwargs)
            if answer is not NotImplemented:
                return answer
            args, kwargs = tree_map(
                lambda leaf: leaf.number if isinstance(leaf, ExpertNumber) else leaf, (args, kwargs)
            )
            return self.__torch_function__(func, types, args, kwargs) if has_rows else self._plain(func, args, kwargs)
        handler = CALLS.get(func)
        if handler is not None:
            result = handler(self, args, kwargs)
            if result is not NotImplemented:
                return result
        return each_row(func, args, kwargs) if has_rows else self._plain(func, args, kwargs)

    def _plain(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs a call without selected rows."""
        if func is Tensor.__getitem__ or (func is torch.where and len(args) == 1):
            handler = CALLS[func]
            result = handler(self, args, kwargs)
            if result is not NotImplemented:
                return result
        name = getattr(func, "__name__", "")
        if _writes(name, kwargs) or func in _STATISTICS:
            self.regions.check_write(frozenset(), f"a write to a tensor by {name}")
        result = func(*args, **kwargs)
        if _writes(name, kwargs) and args and isinstance(args[0], Tensor):
            self.facts.written(args[0])
        self.facts.learn(func, args, kwargs, result)
        return result

    def notes(self) -> tuple[str, ...]:
        """Notes for people: how often each module selected rows, and the checks of values that the graph leaves
        out."""
        checks = tuple(f"{place} checks values; a captured graph leaves the check out" for place in self.checks)
        return checks + tuple(
            f"{path or 'the model'} selects rows by values {times} times and works on all rows each time, with masks: "
            f"exact, but up to {times} times the work of running on each row once"
            for path, times in self.taken.items()
            if times > 1
        )

    def select(self, mask: Tensor) -> Selection:
        """The places where ``mask`` is not zero. Later writes to ``mask`` do not affect the selection."""
        fact = self.facts.of(mask)
        places = mask.clone() if mask.dtype is torch.bool else mask != 0
        return Selection(places, fact, self.regions)

    def skip_check(self, truth: bool, check: str) -> bool:
        """Records that the graph leaves out ``check`` (``file:line``), and returns ``truth``."""
        self.checks[check] = None
        return truth

    def take(self, x: Tensor, index: Index) -> Rows:
        """Computes ``x[index]`` and counts it."""
        self.taken[self._module()] += bool(x.is_floating_point() and x.dim() > len(index.dims))
        return gather(x, index)


def _writes(name: str, kwargs: dict[str, Any]) -> bool:
    in_place = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    operators = (
        name.startswith("__i")
        and name.endswith("__")
        and name not in ("__invert__", "__index__", "__int__", "__iter__")
    )
    return (
        in_place or operators or name == "__setitem__" or bool(kwargs.get("inplace")) or kwargs.get("out") is not None
    )


def _of_expert_number(mode: SelectedRows, func: Any, args: Any, kwargs: Any) -> Any:
    """Handles a function of an expert's number; NotImplemented for one that it does not know."""
    name = getattr(func, "__name__", "")
    if func is Tensor.__getitem__ and isinstance(args[0], Tensor) and not isinstance(args[0], ExpertNumber):
        index = args[1]
        if isinstance(index, ExpertNumber) and index.rank:
            return mode._plain(func, (args[0], slice(index.number, index.number + 1)), {})
        return NotImplemented
    if not isinstance(args[0], ExpertNumber):
        return NotImplemented
    members = args[0].__dict__
    number, rank = members["number"], members["rank"]
    if func is Tensor.__getitem__ and rank == 1 and args[1] in (0, -1):
        return ExpertNumber.make(number, 0)
    if name in ("item", "__index__", "__int__", "tolist"):
        return [number] if name == "tolist" and rank else number
    if name == "__format__":
        return format(str([number]) if rank else number, args[1] if not rank else "")
    if name in ("squeeze", "view", "reshape", "flatten"):
        return ExpertNumber.make(number, 0 if name == "squeeze" else 1)
    if name in ("to", "long", "detach", "cpu", "clone"):
        return args[0]
    if name in ("__repr__", "__str__"):
        return f"tensor({[number] if rank else number})"
    if name == "__hash__":
        return hash(id(args[0]))
    if name == "dim" or name == "ndimension":
        return rank
    if name in ("__eq__", "eq", "__ne__", "ne") and not isinstance(args[1], Tensor):
        return (number == args[1]) == (name.strip("_") == "eq")
    return NotImplemented
