"""Rows selected by values, in models that give each expert its tokens (``x[mask]``, ``torch.where(chosen == e)``,
``nonzero``), said without shapes that depend on values.

A selection represents all places with a mask. What is done with each selected row by itself is done with every row
(:mod:`.rowwise_proof` shows that it may be); putting rows back through the same selection changes only what is
selected; a sum over the rows is one over those that count. Where rows are not selected they are zeros, before and after
whatever could make of a finite number one that is not, so that no NaN of theirs reaches a result or a gradient. What
depends on how many rows there are in another way is an error.

An expert then works on all tokens, which is exact, drops nothing, and costs as many times the FLOPs as there are
experts for each that a token has: :class:`SelectedRows` counts, and the plan warns.

What only raises where values are bad (``assert good.all()``) is left out (:mod:`.assertions`).

A loop over the experts that some token chose (``for e in counts.nonzero()``) is one over all, and a branch taken only
if a selection has rows is always taken, if that changes nothing (:mod:`.branches`).
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
from .tensors import Known, Rows, Selection

_STATISTICS = {F.batch_norm, F.instance_norm}


class SelectedRows(TorchFunctionMode):
    """Takes over what selects rows by values and what is done with them. ``module`` says which module runs."""

    def __init__(self, module: Callable[[], str]) -> None:
        super().__init__()
        self._module = module
        self.restart()

    def restart(self) -> None:
        """Forgets what was done; torch runs the model more than once."""
        self.facts, self.regions = Facts(), Regions()
        self.taken: Counter[str] = Counter()
        self.checks: dict[str, None] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_flatten((args, kwargs))[0]
        has_rows = any(isinstance(leaf, Rows) for leaf in leaves)
        if any(isinstance(leaf, Known) for leaf in leaves):
            found = _of_known(self, func, args, kwargs)
            if found is not NotImplemented:
                return found
            args, kwargs = tree_map(lambda leaf: leaf.number if isinstance(leaf, Known) else leaf, (args, kwargs))
            return self.__torch_function__(func, types, args, kwargs) if has_rows else self._plain(func, args, kwargs)
        handler = CALLS.get(func)
        if handler is not None:
            result = handler(self, args, kwargs)
            if result is not NotImplemented:
                return result
        return each_row(func, args, kwargs) if has_rows else self._plain(func, args, kwargs)

    def _plain(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A call that has to do with no selected rows."""
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
        """What it costs, for people: per module, how often rows were taken; and the checks of values that are not in
        the graph."""
        checks = tuple(f"{place} checks values; a captured graph leaves the check out" for place in self.checks)
        return checks + tuple(
            f"{path or 'the model'} selects rows by values {times} times and works on all rows each time, with masks: "
            f"exact, but up to {times} times the work of running on each row once"
            for path, times in self.taken.items()
            if times > 1
        )

    def select(self, mask: Tensor) -> Selection:
        """The places where ``mask`` is not zero. What is written to it afterwards changes nothing."""
        fact = self.facts.of(mask)
        places = mask.clone() if mask.dtype is torch.bool else mask != 0
        return Selection(places, fact, self.regions)

    def left_out(self, truth: bool, check: str) -> bool:
        """``truth``, after noting that ``check`` (``file:line``) is not in the graph."""
        self.checks[check] = None
        return truth

    def take(self, x: Tensor, index: Index) -> Rows:
        """``x[index]``, counted."""
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


def _of_known(mode: SelectedRows, func: Any, args: Any, kwargs: Any) -> Any:
    """What is asked of the number of an expert."""
    name = getattr(func, "__name__", "")
    if func is Tensor.__getitem__ and isinstance(args[0], Tensor) and not isinstance(args[0], Known):
        index = args[1]
        if isinstance(index, Known) and index.rank:
            return mode._plain(func, (args[0], slice(index.number, index.number + 1)), {})
        return NotImplemented
    if not isinstance(args[0], Known):
        return NotImplemented
    known = args[0].__dict__
    number, rank = known["number"], known["rank"]
    if func is Tensor.__getitem__ and rank == 1 and args[1] in (0, -1):
        return Known.make(number, 0)
    if name in ("item", "__index__", "__int__", "tolist"):
        return [number] if name == "tolist" and rank else number
    if name == "__format__":
        return format(str([number]) if rank else number, args[1] if not rank else "")
    if name in ("squeeze", "view", "reshape", "flatten"):
        return Known.make(number, 0 if name == "squeeze" else 1)
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
