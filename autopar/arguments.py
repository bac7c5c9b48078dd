"""The model and the batch as users give them, and the arguments of the call that a batch is."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autopar.ir.module_paths import did_you_mean
from autopar.plans.plan import Plan
from autopar.runtime.module.unwrapped import check_plain
from autopar.runtime.torch_internals.hooks import forward_pre_hooks
from autopar.trace.loss import TARGETS

from .errors import OptionsError
from .options import Options

Batch = torch.Tensor | Sequence[Any] | Mapping[str, Any]
# Chosen: by it `autopar run --plan` tells the script's processes which plan to train under.
PLAN_VARIABLE = "AUTOPAR_PLAN"
# Letters of a name, where forward takes any names, of which one may be wrong.
# Chosen: short names that differ in one letter are mostly two inputs (xs, ys).
LEAST_LETTERS = 5


def split_batch(batch: Batch, targets: Any = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Splits a batch into positional and keyword inputs: a mapping has keyword inputs, a sequence positional ones, and
    anything else is the only input. ``targets``, if any, are the keyword input of that name. Raises
    :class:`OptionsError` if they are given twice."""
    kwargs = {} if targets is None else {TARGETS: targets}
    if isinstance(batch, Mapping):
        if kwargs.keys() & batch.keys():
            raise OptionsError(f"the batch has an input {TARGETS!r}, and {TARGETS}= is given too: give one of them")
        return (), {**batch, **kwargs}
    if isinstance(batch, (tuple, list)):
        return tuple(batch), kwargs
    return (batch,), kwargs


def check_model(model: object) -> None:
    """Raises :class:`OptionsError` for a model that is none, and for one that is parallel or wrapped already."""
    if isinstance(model, type):
        raise OptionsError(f"the model is the class {model.__name__}: give an instance of it, {model.__name__}(...)")
    if not isinstance(model, nn.Module):
        raise OptionsError(f"the model is a {type(model).__name__} and no torch.nn.Module, which has parameters")
    check_plain(model)


def given_plan(plan: object) -> Plan | None:
    """The plan that is given, read if it is a path or URL. Raises :class:`OptionsError` for what is no plan."""
    if isinstance(plan, (str, os.PathLike)):
        return Plan.load(plan)
    if plan is None or isinstance(plan, Plan):
        return plan
    raise OptionsError(f"plan={plan!r} is not an autopar.Plan; give one, or the path or URL of its file")


def given_options(options: object) -> Options:
    """The options that are given; the defaults for None. Raises :class:`OptionsError` for what is no options."""
    if options is None or isinstance(options, Options):
        return options or Options()
    raise OptionsError(f"options={options!r} is not autopar.Options; give options=autopar.Options(...)")


def check_names(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises :class:`OptionsError` for a keyword input that ``model.forward`` does not take, with the parameter that
    resembles it. Where forward takes any names, for one that resembles a parameter which is not given."""
    if any(takes_names for _, takes_names in forward_pre_hooks(model)):
        return  # They may rename inputs.
    try:
        # A decorator may take more than what it wraps.
        signatures = [inspect.signature(model.forward, follow_wrapped=follow) for follow in (True, False)]
    except (TypeError, ValueError):
        return
    parameters = [parameter for signature in signatures for parameter in signature.parameters.values()]
    taken = list(dict.fromkeys(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)))
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    absent = [name for name in taken if name not in (*kwargs, *list(signatures[0].parameters)[: len(args)])]
    for name in kwargs:
        if name in (*taken, TARGETS) or (takes_any and not any(_is_slip(name, each) for each in absent)):
            continue
        hint = did_you_mean(name, absent) or f"; it takes {', '.join(map(repr, taken)) or 'none by name'}"
        raise OptionsError(f"the batch has an input {name!r}, which {type(model).__name__}.forward does not take{hint}")


def _is_slip(name: str, meant: str) -> bool:
    """Whether ``name`` is ``meant`` but for a letter that is missing, wrong or too many, or two that changed places.
    Names that differ in more are of other inputs, like ``encoder_attention_mask`` and ``decoder_attention_mask``, and
    so are those that differ in a number or in their words."""
    if min(len(name), len(meant)) < LEAST_LETTERS or name.count("_") != meant.count("_"):
        return False
    start = _same_letters(name, meant)
    one, other = name[start:], meant[start:]
    end = _same_letters(one[::-1], other[::-1])
    one, other = one[: len(one) - end], other[: len(other) - end]
    swapped = len(one) == 2 and one == other[::-1]
    return (swapped or max(len(one), len(other)) == 1) and not any(map(str.isdecimal, one + other))


def _same_letters(one: str, other: str) -> int:
    """How many letters of two texts are the same before the first that differs."""
    differing = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differing, min(len(one), len(other)))
