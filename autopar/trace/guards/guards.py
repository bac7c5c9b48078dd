"""What a graph assumes about the Python objects that its model read, see :mod:`autopar.trace.guards.reads`.

A graph contains the values that attributes had when the model was traced. Eager execution reads them again at each
call, so a program is used only as long as its guards hold.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from operator import is_
from typing import Any, Protocol

import torch
from torch import nn

from autopar.errors import TraceError
from autopar.torch_internals.modules import BUFFERS, CHILDREN, PARAMETERS, buffers_of, children_of, parameters_of

from .owners import Owner
from .reads import Reads
from .values import MISSING, Expected, Tensor, freeze, sentence, shown, within
from .variables import is_own_code


class Namespace(Protocol):
    """Anything that maps names to values."""

    def get(self, name: Any, default: Any, /) -> Any:
        """The value of ``name``, or ``default``."""


@dataclass(frozen=True, slots=True)
class Guard:
    """``key`` in the namespace ``space`` had ``value``; messages call it ``label`` (``model.drop.p``)."""

    label: str
    space: Namespace
    key: str
    value: object
    expected: Expected

    def changed(self) -> str | None:
        """Says what the value is now, if it is another one."""
        now = self.space.get(self.key, MISSING)
        if now is self.value and self.expected.immutable:
            return None
        return self.expected.difference(now, self.label)


@dataclass(frozen=True, slots=True)
class Members:
    """The modules and parameters that a module is made of, by identity, and its buffers by type."""

    label: str
    modules: dict[str, Any]
    parameters: dict[str, Any]
    buffers: dict[str, Any]
    had_modules: tuple[tuple[str, Any], ...]
    had_parameters: tuple[tuple[str, Any], ...]
    had_buffers: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, module: nn.Module, label: str) -> Members:
        kinds = children_of(module), parameters_of(module), buffers_of(module)
        return cls(label, *kinds, *(tuple(kind.items()) for kind in kinds))

    def changed(self) -> str | None:
        """Says what has been replaced; None if nothing has."""
        for now, before, is_same in (
            (self.modules, self.had_modules, is_),
            (self.parameters, self.had_parameters, is_),
            (self.buffers, self.had_buffers, _is_alike),
        ):
            if len(now) == len(before) and all(map(is_, now.values(), (value for _, value in before))):
                continue
            change = self._difference(now, dict(before), is_same)
            if change is not None:
                return change
        return None

    def _difference(
        self, now: Mapping[str, Any], before: Mapping[str, Any], is_same: Callable[[Any, Any], bool]
    ) -> str | None:
        for name in {**before, **now}:
            old, new = before.get(name, MISSING), now.get(name, MISSING)
            if not is_same(old, new):
                return sentence(f"{self.label}.{name}", shown(old), shown(new))
        if list(now) != list(before):
            return sentence(f"{self.label}", f"made of {', '.join(before)}", f"made of {', '.join(now)}")
        return None


def _is_alike(old: object, new: object) -> bool:
    """Whether two buffers have the same type. They are inputs of a program, so another of the same type may replace
    one."""
    if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
        return (old.shape, old.dtype) == (new.shape, new.dtype)
    return old is new


@dataclass(frozen=True)
class Guards:
    """Guards of the attributes that were read, and of the modules that the model consists of."""

    read: tuple[Guard, ...] = ()
    members: tuple[Members, ...] = ()
    _fast: SameObjects = field(init=False, repr=False, compare=False)
    _slow: tuple[Guard, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        fast = [guard for guard in self.read if isinstance(guard.space, dict) and guard.expected.immutable]
        object.__setattr__(self, "_fast", SameObjects.of(fast, self.members))
        fast_ids = set(map(id, fast))
        object.__setattr__(self, "_slow", tuple(guard for guard in self.read if id(guard) not in fast_ids))

    def changed(self, module: nn.Module | None = None) -> str | None:
        """Says what has changed since the model was traced (``model.drop.p was 0.1 when traced and is 0.9``); None if
        nothing has. ``module`` is the traced model, whose objects these guards already refer to."""
        is_unchanged = self._fast.holds()
        for guard in self._slow if is_unchanged else self.read:
            change = guard.changed()
            if change is not None:
                return change
        if is_unchanged:
            return None
        return next(filter(None, (members.changed() for members in self.members)), None)


@dataclass(frozen=True)
class SameObjects:
    """Checks quickly, without a Python loop, whether dicts still have the identical objects."""

    spaces: tuple[dict[str, Any], ...]
    keys: tuple[str, ...]
    values: tuple[object, ...]
    full: tuple[dict[str, Any], ...]
    empty: tuple[dict[str, Any], ...]
    members: tuple[object, ...]

    @classmethod
    def of(cls, read: Sequence[Guard], members: Sequence[Members]) -> SameObjects:
        """Checks of the attributes that were read, and of the members of modules."""
        spaces = tuple(guard.space for guard in read if isinstance(guard.space, dict))
        kinds = [kind for part in members for kind in (part.modules, part.parameters, part.buffers)]
        full = tuple(kind for kind in kinds if kind)
        empty = tuple(kind for kind in kinds if not kind)
        values = tuple(chain.from_iterable(kind.values() for kind in full))
        return cls(spaces, tuple(g.key for g in read), tuple(g.value for g in read), full, empty, values)

    def holds(self) -> bool:
        """Whether every object is the same."""
        if any(self.empty) or sum(map(len, self.full)) != len(self.members):
            return False
        read = map(dict.get, self.spaces, self.keys, repeat(MISSING))
        members = chain.from_iterable(map(dict.values, self.full))
        return all(map(is_, read, self.values)) and all(map(is_, members, self.members))


def guards_of(model: nn.Module, reads: Reads) -> Guards:
    """The guards of what was read. Their values are the current ones, which are those from before the trace."""
    modules = [*model.named_modules()]
    inputs = frozenset(id(tensor) for _, module in modules for tensor in _tensors(module))
    places: list[tuple[str, Namespace, str]] = [(v.label, v, v.name) for v in reads.variables.values()]
    for identity, name in reads.read:
        owner = reads.owners[identity]
        if reads.is_reachable(owner):
            places += _places(owner, name, identity in reads.tree)
    guards: dict[tuple[int, str], Guard] = {}
    for label, space, name in places:
        value = space.get(name, MISSING)
        guards.setdefault((id(space), name), Guard(label, space, name, value, freeze(value, inputs)))
    _check_parameters(guards.values())
    members = tuple(Members.of(module, f"model.{path}" if path else "model") for path, module in modules)
    return Guards(tuple(guards.values()), members)


def _check_parameters(guards: Iterable[Guard]) -> None:
    """Raises :class:`TraceError` for parameters in lists and the like, which a graph would turn into constants, and
    warns of those that the model does not register."""
    for guard in guards:
        if _is_learnt(guard.value) and isinstance(guard.expected, Tensor):
            warnings.warn(
                f"{guard.label} is a parameter that the model does not register, so a graph takes it for a constant "
                "and gives it no gradient; make what it belongs to a module of the model, or freeze it "
                "(requires_grad_(False))",
                stacklevel=4,
            )
        for place, item in within(guard.value):
            if _is_learnt(item):
                raise TraceError(
                    f"{guard.label}{place} is a parameter in a {type(guard.value).__name__}, which a graph would take "
                    "for a constant, without a gradient; read it where it is registered (self.weight), or keep it in "
                    "an nn.ParameterList"
                )


def _is_learnt(value: object) -> bool:
    return isinstance(value, nn.Parameter) and value.requires_grad


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    for kind in (parameters_of(module), buffers_of(module)):
        yield from (tensor for tensor in kind.values() if tensor is not None)


def _places(owner: Owner, name: str, is_of_model: bool) -> Iterator[tuple[str, Namespace, str]]:
    """Yields where an attribute of that name is, or would be: its label, the namespace, and its name there."""
    label, own = f"{owner.label}.{name}", owner.members
    if isinstance(owner.value, nn.Module):
        for part in (PARAMETERS, BUFFERS, CHILDREN):
            if name in own[part]:
                if not is_of_model:
                    yield label, own[part], name
                return
    kind = None if name in own else next((kind for kind in type(owner.value).__mro__ if name in vars(kind)), None)
    if kind is nn.Module:
        return
    attribute = MISSING if kind is None else vars(kind)[name]
    is_computed = kind is None and _is_computed(owner, name)
    if isinstance(attribute, types.MemberDescriptorType) or is_computed or not owner.has_members:
        yield label, _Attribute(owner.value), name
        return
    if not isinstance(attribute, property):
        yield label, own, name
    if kind is not None and not _is_installed(attribute):
        yield f"{kind.__qualname__}.{name}", vars(kind), name


def _is_computed(owner: Owner, name: str) -> bool:
    """Whether an object computes the attribute: neither it nor its class stores it under that name. Never for a module,
    whose attributes are its members, or are read elsewhere."""
    if name in owner.members or isinstance(owner.value, nn.Module):
        return False
    return _Attribute(owner.value).get(name, MISSING) is not MISSING


def _is_installed(attribute: object) -> bool:
    """Whether a class attribute is code that no user changes."""
    function = getattr(attribute, "__func__", attribute.fget if isinstance(attribute, property) else attribute)
    if isinstance(function, types.FunctionType):
        return not is_own_code(function.__code__)
    return isinstance(function, (types.BuiltinFunctionType, types.WrapperDescriptorType, types.GetSetDescriptorType))


@dataclass(frozen=True)
class _Attribute:
    """Reads attributes through the object itself: slots, and names that its class computes."""

    owner: Any

    def get(self, name: str, default: Any) -> Any:
        try:
            return getattr(self.owner, name, default)
        except Exception:  # Treated as missing; the model meets the same error where it reads the attribute.
            return default
