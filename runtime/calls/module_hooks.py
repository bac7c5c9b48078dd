"""Hooks on modules: a compiled program contains only their effects on tensors.

Hooks on the model itself run at every ``model(...)``, on real inputs and outputs; those registered before
``parallelize`` are moved to the parallel module (:func:`take_over`). Modules inside run only while a program is
compiled. The effect of a forward hook there on tensors is part of the program, and a new program is compiled when hooks
are added or removed. Its other effects happen only then, which raises a warning. Backward hooks there are refused.
Torch's and Hugging Face's own hooks, such as those of ``weight_norm`` and of recorded outputs, affect only tensors.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from autopar.errors import AutoparError
from autopar.runtime.torch_internals.hooks import (
    BACKWARD_KINDS,
    FORWARD_KINDS,
    KINDS,
    forward_pre_hooks,
    have_hooks,
    hooks_on_all_modules,
    module_hooks,
    move_hook_settings,
    move_hooks,
)

# Libraries whose hooks are known to affect only tensors.
_LIBRARIES = ("torch.", "transformers.", "autopar.")
# A number for each hook, by identity, as long as the hook exists. Numbers are not reused, so that ranks that register
# the same hooks count alike, whenever each of them drops one.
_numbers: dict[int, int] = {}
_count = itertools.count()
_held: list[Any] = []


@dataclass(frozen=True)
class Hook:
    """A hook; ``text``: what it is and where; ``number``: distinguishes hooks with the same text."""

    text: str
    backward: bool
    library: bool
    number: int


def hooks_inside(module: nn.Module, parts: Sequence[nn.Module] | None = None) -> tuple[Hook, ...]:
    """The hooks of ``module``, of the modules inside it, and of every module. ``parts``: ``module.modules()``, if the
    caller has them; most models have no hooks, and then need no second walk for the paths."""
    hooks = list(hooks_everywhere())
    if parts is not None and not have_hooks(parts):
        return tuple(hooks)
    for path, part in module.named_modules():
        if have_hooks((part,)):
            hooks += _of(part, f"of {path or 'the model'} ({type(part).__name__})")
    return tuple(hooks)


def _of(part: nn.Module, where: str) -> Iterator[Hook]:
    for kind in KINDS:
        for hook in module_hooks(part, kind).values():
            yield _described(hook, kind, where)


def hooks_everywhere() -> Iterator[Hook]:
    """The user's hooks on all modules. Torch's own, such as those of its counters, come and go at every call."""
    for kind in KINDS:
        for hook in hooks_on_all_modules(kind):
            if not _only_changes_tensors(hook):
                yield _described(hook, kind, "of every module")


def _described(hook: Any, kind: str, where: str) -> Hook:
    library = _only_changes_tensors(hook)
    number = -1 if library else _number(hook)
    name = getattr(hook, "__qualname__", type(hook).__qualname__)
    text = f"the {kind.strip('_').removesuffix('s').replace('_', ' ')} {name} {where}"
    return Hook(text, kind in BACKWARD_KINDS, library, number)


def _number(hook: Any) -> int:
    if id(hook) not in _numbers:
        _numbers[id(hook)] = next(_count)
        try:
            weakref.finalize(hook, _numbers.pop, id(hook), None).atexit = False
        except TypeError:  # No weak reference to it: held, so that no other object takes its identity.
            _held.append(hook)
    return _numbers[id(hook)]


def _only_changes_tensors(hook: Any) -> bool:
    home = getattr(hook, "__module__", None) or type(hook).__module__
    return str(home).startswith(_LIBRARIES)


def check_hooks(hooks: tuple[Hook, ...], told: set[int]) -> None:
    """Warns of the user's forward hooks, except those in ``told``. Raises :class:`AutoparError` for a backward hook."""
    for hook in hooks:
        if hook.backward:
            raise AutoparError(
                f"{hook.text} would not run: the backward pass is compiled. Use register_hook on a parameter, a "
                "torch.autograd.Function in forward, or a backward hook on the parallel model itself"
            )
        if not hook.library and hook.number not in told:
            told.add(hook.number)
            warnings.warn(
                f"{hook.text} runs only while a program is compiled. Its effect on tensors is part of the program; "
                "other effects (storing an activation, printing, counting) happen only then, on tensors without "
                "values. To see a value at every call, return it from forward; a hook on the parallel model itself "
                "runs at every model(...)",
                stacklevel=2,
            )


def take_over(parallel: nn.Module, module: nn.Module) -> None:
    """Moves the hooks that users registered on ``module`` to ``parallel``, which represents it. The dicts themselves
    are moved, so that the hooks' handles still remove them."""
    for kind in KINDS:
        hooks = module_hooks(module, kind)
        of_libraries = OrderedDict((key, hook) for key, hook in hooks.items() if _only_changes_tensors(hook))
        for key in of_libraries:
            del hooks[key]
        move_hooks(module, parallel, kind, of_libraries)
    move_hook_settings(module, parallel)


def before_step(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Applies the forward pre-hooks of ``model`` to the inputs of a step. Raises :class:`AutoparError` if it has hooks
    on its output, since a step returns only the loss."""
    for kind in (FORWARD_KINDS[0], *BACKWARD_KINDS):
        for hook in module_hooks(model, kind).values():
            raise AutoparError(
                f"step() computes the loss alone, but {_described(hook, kind, 'of the parallel model').text} is for "
                "its outputs: run out = model(...) and loss.backward() instead, or remove the hook"
            )
    for hook, takes_kwargs in forward_pre_hooks(model):
        if takes_kwargs:
            args, kwargs = hook(model, args, kwargs) or (args, kwargs)
        else:
            result = hook(model, args)
            args = args if result is None else result if isinstance(result, tuple) else (result,)
    return args, kwargs
