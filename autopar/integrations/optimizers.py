"""Optimizers and schedulers that were made before the model became parallel."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from autopar.errors import AutoparError
from autopar.runtime.module.parallel_module import ParallelModule


def over_parallel(optimizer: torch.optim.Optimizer, models: Sequence[ParallelModule]) -> torch.optim.Optimizer:
    """``optimizer`` anew, over the parameters of the one of ``models`` that has its parameters, with its groups and
    their options. Raises :class:`AutoparError` if none has, or if it has stepped."""
    if optimizer.state:
        raise AutoparError(
            f"this {type(optimizer).__name__} has stepped: its state is for whole parameters. Prepare it before it "
            "steps, and load what was saved afterwards"
        )
    known = inspect.signature(type(optimizer).__init__).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    defaults = {key: value for key, value in optimizer.defaults.items() if takes_all or key in known}
    groups = [{key: value for key, value in group.items() if key != "param_names"} for group in optimizer.param_groups]
    failure: AutoparError | None = None
    for model in models:
        try:
            return model.optimizer(type(optimizer), params=groups, **defaults)
        except AutoparError as error:
            failure = error
    raise failure or AutoparError("an optimizer is prepared together with its model, or after it")


def point_to(scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
    """Has ``scheduler`` set the rates of ``optimizer``, which replaces its own, and so have those
    that it is made of (``SequentialLR``, ``ChainedScheduler``)."""
    rates = [group["lr"] for group in optimizer.param_groups]
    # A scheduler marks the step of its optimizer, by which it later sees whether it was called.
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    _redirect(scheduler, optimizer)


def _redirect(scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
    scheduler.optimizer = optimizer
    for inner in getattr(scheduler, "_schedulers", ()):
        _redirect(inner, optimizer)
