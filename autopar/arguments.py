"""The model and the batch as users give them, and the arguments of the call that a batch is."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autopar.plans.plan import Plan
from autopar.runtime.module.unwrapped import check_plain
from autopar.trace.loss import TARGETS

from .errors import OptionsError

Batch = torch.Tensor | Sequence[Any] | Mapping[str, Any]
# Chosen: by it `autopar run --plan` tells the script's processes which plan to train under.
PLAN_VARIABLE = "AUTOPAR_PLAN"


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
