"""Facts about tensors that select rows, while a model is traced: where they can be nonzero.

A *key* identifies a set of nonzero places: tensors with equal keys are nonzero at the same places. ``within`` are keys;
if the set of any of them is empty, this tensor is all zero. They are its own key, those of the tensors it is a part of,
and those of the factors of a conjunction. This proves that a write through one mask does nothing if another is empty.

Keys are made from the operations that computed a tensor; any other tensor has a unique key. Writing to a tensor in
place invalidates all keys of its dtype, since views are not tracked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Key = Hashable


@dataclass(frozen=True)
class Fact:
    """Facts about one tensor. ``not_negative``: no element is negative; ``distinct``: no number occurs twice along the
    last dim; ``single``: at most one element along the last dim is not zero. ``reduces``: for a reduction, the key of
    its operand and the dims that remain; ``is_count``: whether it counts nonzero elements (or sums elements that are
    not negative) rather than saying whether there is any."""

    key: Key
    within: frozenset[Key]
    not_negative: bool = False
    distinct: bool = False
    single: bool = False
    reduces: tuple[Key, tuple[int, ...]] | None = None
    is_count: bool = False


_COMPARISONS = {
    name: {getattr(Tensor, f"__{name}__"), getattr(Tensor, name), getattr(torch, name)}
    for name in ("eq", "ne", "gt", "ge", "lt", "le")
}
_COMPARISONS["gt"] |= {torch.greater, Tensor.greater}
_AND = {
    Tensor.__and__, Tensor.__mul__, Tensor.mul, torch.mul, torch.logical_and, Tensor.logical_and, torch.bitwise_and,
    Tensor.bitwise_and, Tensor.__rmul__, Tensor.__rand__,
}  # fmt: skip
_CASTS = {
    Tensor.to, Tensor.long, Tensor.int, Tensor.float, Tensor.bool, Tensor.contiguous, Tensor.clone, Tensor.type_as,
    Tensor.detach,
}  # fmt: skip
_VIEWS = {
    Tensor.permute, torch.permute, Tensor.transpose, torch.transpose, Tensor.squeeze, torch.squeeze, Tensor.unsqueeze,
    torch.unsqueeze, Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten, Tensor.t, torch.t,
    Tensor.select, torch.select, Tensor.__getitem__,
}  # fmt: skip
_COUNTS = {Tensor.sum, torch.sum, Tensor.count_nonzero, torch.count_nonzero}
_ANYS = {Tensor.any, torch.any}
# For comparisons of a count with a number: whether they say that there is any (True), or none (False).
_SAYS: dict[tuple[str, int], bool] = {
    ("gt", 0): True, ("ge", 1): True, ("ne", 0): True, ("eq", 0): False, ("le", 0): False, ("lt", 1): False,
}  # fmt: skip


def says_any(comparison: str, number: Any) -> bool | None:
    """What ``count <comparison> number`` says: that there is any, that there is none, or (None) something else."""
    return _SAYS.get((comparison, number)) if type(number) is int else None


class Facts:
    """The facts of the tensors of one trace."""

    def __init__(self) -> None:
        self._facts: dict[int, tuple[Tensor, int, Fact]] = {}
        self._epochs: Counter[torch.dtype] = Counter()

    def written(self, tensor: Tensor) -> None:
        """Records that ``tensor``, or a view of it, was changed in place."""
        self._epochs[tensor.dtype] += 1

    def of(self, tensor: Tensor) -> Fact:
        """The facts about ``tensor``."""
        epoch = self._epochs[tensor.dtype]
        entry = self._facts.get(id(tensor))
        if entry is None or entry[0] is not tensor or entry[1] != epoch:
            key = ("leaf", id(tensor), epoch)
            entry = tensor, epoch, Fact(key, frozenset((key,)), tensor.dtype is torch.bool)
            self._facts[id(tensor)] = entry  # Kept alive, so that its id is not reused.
        return entry[2]

    def learn(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Records the facts that follow about the ``result`` of a call."""
        if func in (torch.topk, Tensor.topk) and len(args) < 3 and kwargs.get("dim", -1) == -1:
            self._set(result[1], replace(self.of(result[1]), distinct=True))
            return
        if not isinstance(result, Tensor) or not (args and isinstance(args[0], Tensor)):
            return
        if func is F.one_hot:
            self._set(result, replace(self.of(result), not_negative=True))
        fact = self._derived(func, args, kwargs, result)
        if fact is not None:
            self._set(result, replace(fact, not_negative=fact.not_negative or result.dtype is torch.bool))

    def _set(self, tensor: Tensor, fact: Fact) -> None:
        self._facts[id(tensor)] = tensor, self._epochs[tensor.dtype], fact

    def _static(self, arg: Any) -> Key:
        if isinstance(arg, Tensor):
            return self.of(arg).key
        if isinstance(arg, (tuple, list)):
            return tuple(map(self._static, arg))
        return repr(arg)

    def _derived(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> Fact | None:
        first = self.of(args[0])
        arguments = self._static((*args[1:], *sorted(kwargs.items())))
        if func in _CASTS:
            exact = not args[0].is_floating_point() or result.is_floating_point()
            narrow = result.dtype not in (args[0].dtype, torch.bool, torch.int64, torch.float32, torch.float64)
            return first if exact and not narrow else None
        if func in _VIEWS:
            return self._view(func, first, args, arguments, result)
        if func in _AND and isinstance(args[1], Tensor) and not result.is_floating_point():
            second = self.of(args[1])
            key = ("and", first.key, second.key)
            fact = Fact(key, frozenset((key,)) | first.within | second.within)
            return replace(fact, not_negative=first.not_negative and second.not_negative)
        if func in _ANYS | _COUNTS and (func in _ANYS or first.not_negative or "count_nonzero" in func.__name__):
            return self._reduction(func, first, args, kwargs)
        name = next((name for name, functions in _COMPARISONS.items() if func in functions), None)
        return None if name is None or len(args) != 2 else self._comparison(name, first, args, result)

    def _view(self, func: Any, first: Fact, args: tuple[Any, ...], arguments: Key, result: Tensor) -> Fact:
        key: Key = (func.__name__, first.key, arguments)
        dim, place = _selected(func, args)
        if place is not None:
            key = ("select", first.key, dim, place)
            if isinstance(args[1] if func is Tensor.__getitem__ else 0, slice):
                key = ("narrow", key)
        parts = {key, key[1]} if isinstance(key, tuple) and key[0] == "narrow" else {key}
        same = bool(result.dim() and args[0].dim()) and func in (Tensor.view, Tensor.reshape, torch.reshape)
        last = same and _static_equal(result.shape[-1], args[0].shape[-1])
        return Fact(
            key,
            first.within | parts,
            first.not_negative,
            distinct=first.distinct and last,
            single=first.single and last,
        )

    def _reduction(self, func: Any, first: Fact, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Fact | None:
        dims = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis"))
        keep = kwargs.get("keepdim", False) or len(args) > 2
        rank = args[0].dim()
        reduced = (
            range(rank) if dims is None else [d % rank for d in (dims if isinstance(dims, (tuple, list)) else (dims,))]
        )
        if keep and dims is not None:
            return None
        remaining = tuple(d for d in range(rank) if d not in reduced)
        key: Key = ("any", first.key, remaining)
        return Fact(key, first.within | {key}, True, reduces=(first.key, remaining), is_count=func in _COUNTS)

    def _comparison(self, name: str, first: Fact, args: tuple[Any, ...], result: Tensor) -> Fact:
        key: Key = (name, first.key, self._static(args[1]))
        fact = Fact(key, frozenset((key,)), True)
        if name == "eq" and first.distinct and not isinstance(args[1], Tensor):
            fact = replace(fact, single=True)
        if first.reduces and first.is_count and says_any(name, args[1]):
            fact = replace(fact, reduces=first.reduces, within=fact.within | first.within)
        return fact


def _selected(func: Any, args: tuple[Any, ...]) -> tuple[int, int | None]:
    """The dim and the index that ``select``, ``[e]`` or ``[e:e + 1]`` takes."""
    if func in (Tensor.select, torch.select) and len(args) == 3:
        return args[1] % args[0].dim(), args[2]
    if func is Tensor.__getitem__:
        index = args[1]
        if type(index) is int and index >= 0:
            return 0, index
        if isinstance(index, slice) and type(index.start) is int and index.stop == index.start + 1:
            return 0, index.start
    return 0, None


def _static_equal(first: Any, second: Any) -> bool:
    return type(first) is int and type(second) is int and first == second
