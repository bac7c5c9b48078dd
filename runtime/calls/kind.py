"""Kinds of calls: two calls of the same kind run the same program. Also describes how two kinds differ."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from autopar.ir.node import TensorType
from autopar.torch_internals.module_walk import Walk
from autopar.torch_internals.trees import keystr, tree_flatten, tree_flatten_with_path

from .compiled import OutputsWanted
from .module_hooks import Hook, hooks_inside

# Read from hundreds of objects at every call, without a Python loop.
_TRAINING, _REQUIRES_GRAD = attrgetter("training"), attrgetter("requires_grad")


@dataclass(frozen=True)
class Leaf:
    """One input: a tensor by its type (``value`` is None), anything else by the repr of its ``value``.
    ``requires_grad`` is False unless gradients of inputs are needed."""

    type: type
    shape: torch.Size | None = None
    dtype: torch.dtype | None = None
    requires_grad: bool = False
    value: str | None = None

    @classmethod
    def of(cls, leaf: object, grad: bool) -> Leaf:
        if isinstance(leaf, torch.Tensor):
            return cls(torch.Tensor, leaf.shape, leaf.dtype, grad and leaf.requires_grad)
        return cls(type(leaf), value=repr(leaf))

    def __str__(self) -> str:
        if self.shape is None or self.dtype is None:
            return str(self.value)
        return f"{TensorType(tuple(self.shape), self.dtype)}{' with a gradient' if self.requires_grad else ''}"


@dataclass(frozen=True)
class CallKind:
    """The kind of a call. ``modes``: for each module whether it is in training mode; ``wanted``: for each parameter
    whether it requires a gradient; ``around``: the global state of torch that a trace reads (autocast, default dtype);
    ``hooks``: the hooks of its modules."""

    structure: str
    leaves: tuple[Leaf, ...]
    modes: tuple[bool, ...]
    wanted: tuple[bool, ...]
    around: tuple[object, ...]
    grad: bool
    outputs: OutputsWanted
    hooks: tuple[Hook, ...] = ()

    @property
    def circumstances(self) -> tuple[object, ...]:
        """The properties of the model and of torch, as opposed to inputs."""
        return self.modes, self.wanted, self.around, self.hooks


def kind_of(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    grad: bool,
    outputs: OutputsWanted,
    walk: Walk | None = None,
) -> CallKind:
    """The kind of the call ``model(*args, **kwargs)``, whatever the order of its keywords. ``walk``: one of ``model``,
    if the caller has one."""
    leaves, spec = tree_flatten((args, dict(sorted(kwargs.items()))))
    walk = walk or Walk(model)  # This runs at every call.
    parts = walk.modules()
    with_inputs = grad and outputs != "loss"
    return CallKind(
        str(spec),
        tuple(Leaf.of(leaf, with_inputs) for leaf in leaves),
        tuple(map(_TRAINING, parts)),
        tuple(map(_REQUIRES_GRAD, walk.parameters())),
        _around(),
        grad,
        outputs,
        hooks_inside(model, parts),
    )


def _around() -> tuple[object, ...]:
    casts = tuple(
        (device, torch.get_autocast_dtype(device)) for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)
    )
    return torch.get_default_dtype(), casts


def named_leaves(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], kind: CallKind) -> dict[str, Leaf]:
    """The leaves of a call by their names for the user: positional inputs have the names that ``forward`` gives
    them."""
    return dict(zip(leaf_names(model, args, kwargs), kind.leaves, strict=True))


def leaf_names(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """The names of the leaves of a call, in the order of :class:`CallKind`."""
    names = [parameter.name for parameter in positional(model)]
    return [_path_name(path, names) for path, _ in tree_flatten_with_path((args, dict(sorted(kwargs.items()))))[0]]


def name_of(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], leaf: object) -> str:
    """The user's name of one of a call's leaves."""
    leaves = tree_flatten((args, dict(sorted(kwargs.items()))))[0]
    names = zip(leaf_names(model, args, kwargs), leaves, strict=True)
    return next((name for name, candidate in names if candidate is leaf), "given")


def positional(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The positional parameters of a function, or of a module's forward. Empty if it has no signature."""
    called = function.forward if isinstance(function, nn.Module) else function
    try:
        parameters = inspect.signature(called).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _path_name(path: tuple[Any, ...], names: list[str]) -> str:
    side, first = path[0].idx, path[1]
    if side == 1:
        return f"{first.key}{keystr(path[2:])}"
    return f"{names[first.idx] if first.idx < len(names) else f'args[{first.idx}]'}{keystr(path[2:])}"


@dataclass(frozen=True)
class Difference:
    """One way in which two calls differ, in words. ``subject``: the input that differs, if it is one; ``value``:
    whether a plain Python value differs instead of a tensor's type."""

    text: str
    subject: str | None = None
    value: bool = False


def differences(
    model: nn.Module, old: CallKind, new: CallKind, before: Mapping[str, Leaf], after: Mapping[str, Leaf]
) -> Iterator[Difference]:
    """How a call of kind ``new``, whose leaves are ``after``, differs from one of kind ``old``."""
    yield from _leaf_differences(before, after)
    if old.structure != new.structure and before == after:
        yield Difference("inputs are passed in another form (by position, by keyword, in other containers)")
    modules = [name or "the model" for name, _ in model.named_modules()]
    yield from _flags(modules, old.modes, new.modes, "in training mode", "in evaluation mode")
    parameters = [name for name, _ in model.named_parameters()]
    yield from _flags(parameters, old.wanted, new.wanted, "to be trained", "frozen")
    if old.grad != new.grad:
        yield Difference("gradients are wanted" if new.grad else "no gradients are wanted")
    if old.outputs != new.outputs:
        yield Difference("only the loss is wanted" if new.outputs == "loss" else "all outputs are wanted")
    for hook in (*old.hooks, *new.hooks):
        if (hook in old.hooks) != (hook in new.hooks):
            yield Difference(f"{hook.text} was {'removed' if hook in old.hooks else 'registered'}")
    if old.around != new.around:
        yield Difference(f"torch's default dtype and autocast were {old.around} and are {new.around}")


def _leaf_differences(before: Mapping[str, Leaf], after: Mapping[str, Leaf]) -> Iterator[Difference]:
    for name in dict.fromkeys((*before, *after)):
        old, new = before.get(name), after.get(name)
        if old == new:
            continue
        if old is None:
            yield Difference(f"the input {name!r} was not given and is {new}")
        elif new is None:
            yield Difference(f"the input {name!r} was {old} and is not given")
        else:
            text = f"the input {name!r} was {old} and is {new}"
            yield Difference(text, name, old.value is not None and new.value is not None)


def _flags(names: list[str], old: tuple[bool, ...], new: tuple[bool, ...], yes: str, no: str) -> Iterator[Difference]:
    if len(names) != len(new) or len(old) != len(new):
        return
    for to in (True, False):
        changed = [name for name, was, now in zip(names, old, new, strict=True) if was != now and now is to]
        if changed:
            rest = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            yield Difference(f"{changed[0]}{rest} {'are' if rest else 'is'} now {yes if to else no}")
