"""Whether a module would run the same code on the same Python values as another one, which has run.

Two modules are alike if, all the way down, their parts have the same classes and modes, no hooks, and tensors of the
same types, and if every attribute that the first one's code has read is the same object, or a plain value that is
equal. Attributes that nothing has read, such as the number of a layer that looks it up only for its cache, may differ.
:class:`~autopar.trace.guards.reads.Reads` knows what was read.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from autopar.torch_internals.modules import BUFFERS, CHILDREN, PARAMETERS, STATE_DICT_HOOKS, children_of
from autopar.trace.guards.reads import MACHINERY, Reads
from autopar.trace.guards.values import MISSING, PLAIN

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_HOOKS = tuple(name for name in sorted(MACHINERY) if name.endswith("hooks") and name not in STATE_DICT_HOOKS)
_TENSORS = (PARAMETERS, BUFFERS)
_FIXED = (tuple, frozenset, torch.Size)

# The parts of two modules that correspond, from the outermost.
Parts = tuple[tuple[nn.Module, nn.Module], ...]


def members_of(part: nn.Module) -> dict[str, Any]:
    """The attributes of a module itself. Reading them is not recorded as something that the model does."""
    members: dict[str, Any] = object.__getattribute__(part, "__dict__")
    return members


def elements_of_lists(model: nn.Module) -> frozenset[int]:
    """The ids of the modules in lists: of which a model may have many that are equal."""
    return frozenset(
        id(child)
        for module in model.modules()
        if isinstance(module, _LISTS)
        for child in children_of(module).values()
        if child is not None
    )


def corresponding_parts(first: nn.Module, second: nn.Module) -> Parts | None:
    """The parts of two modules that correspond to each other; None if there is one without a counterpart of its class,
    in its mode, or with a hook."""
    pairs: dict[tuple[int, int], tuple[nn.Module, nn.Module]] = {}
    waiting = [(first, second)]
    while waiting:
        a, b = waiting.pop()
        own, other = members_of(a), members_of(b)
        if type(a) is not type(b) or own["training"] is not other["training"]:
            return None
        if any(own.get(name) or other.get(name) for name in _HOOKS):
            return None
        if list(own[CHILDREN]) != list(other[CHILDREN]):
            return None
        if (id(a), id(b)) not in pairs:
            pairs[id(a), id(b)] = a, b
            children = list(zip(own[CHILDREN].values(), other[CHILDREN].values(), strict=True))
            if any((x is None) is not (y is None) for x, y in children):
                return None
            waiting += [(x, y) for x, y in children if x is not None]
    return tuple(pairs.values())


def corresponding_tensors(parts: Parts) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
    """The parameters, buffers and plain tensors of parts that correspond; None if one has no counterpart."""
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for a, b in parts:
        tables = [(members_of(a)[name], members_of(b)[name]) for name in _TENSORS]
        plain = [{k: v for k, v in members_of(p).items() if isinstance(v, torch.Tensor)} for p in (a, b)]
        for own, other in (*tables, (plain[0], plain[1])):
            if list(own) != list(other):
                return None
            for x, y in zip(own.values(), other.values(), strict=True):
                if (x is None) is not (y is None):
                    return None
                if x is not None:
                    found.append((x, y))
    return found


def has_equal_attributes(parts: Parts, reads: Reads | None = None) -> bool:
    """Whether whatever was read of the first ones' attributes is equal in the second ones; without ``reads``, whether
    all of them are."""
    for a, b in parts:
        own, other = members_of(a), members_of(b)
        for name in {**own, **other}:
            was_read = reads is None or (id(a), name) in reads.read
            if was_read and name not in MACHINERY and not _are_equal(own.get(name, MISSING), other.get(name, MISSING)):
                return False
    return True


def are_alike(first: nn.Module, second: nn.Module) -> bool:
    """Whether two modules are alike in all but their tensors: whatever else their code reads."""
    parts = corresponding_parts(first, second)
    return parts is not None and has_equal_attributes(parts)


def _are_equal(first: object, second: object) -> bool:
    """Whether two values are one object, or equal and plain. Tensors are compared by :func:`corresponding_tensors`, and
    modules by :func:`corresponding_parts`."""
    if first is second or (isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)):
        return True
    if isinstance(first, partial) and isinstance(second, partial):
        return (
            first.func is second.func
            and _are_equal(first.args, second.args)
            and _are_equal(tuple(first.keywords.items()), tuple(second.keywords.items()))
        )
    if isinstance(first, nn.Module) or type(first) is not type(second):
        return False
    if isinstance(first, (*_FIXED, list)) and isinstance(second, (*_FIXED, list)):
        pairs = zip(first, second, strict=False)
        return len(first) == len(second) and all(_are_equal(x, y) for x, y in pairs)
    return isinstance(first, PLAIN) and repr(first) == repr(second)


def read_alike(parts: Parts, reads: Reads) -> None:
    """Records as read of the second ones what was read of the first ones, by reading it."""
    counterparts = {id(a): b for a, b in parts}
    for identity, name in reads.of(counterparts):
        part = counterparts[identity]
        with suppress(AttributeError):  # A child, or a tensor, which Python asks for in another way.
            type(part).__getattribute__(part, name)
