"""A model's loss: its own, or what a loss function computes from its output, the batch, and targets for it alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from autopar.errors import OptionsError, TraceError
from autopar.runtime.calls.kind import positional

LossFunction = Callable[..., Any]
# The keyword input that goes to the loss function rather than to the model.
TARGETS = "targets"


def check_loss(loss_fn: object) -> None:
    """Raises :class:`OptionsError` for a loss function that cannot be called."""
    if loss_fn is not None and not callable(loss_fn):
        raise OptionsError(
            f"loss_fn={loss_fn!r} cannot be called; give a function of the output and the targets, such as "
            "torch.nn.functional.mse_loss or torch.nn.CrossEntropyLoss()"
        )


def run_with_loss(
    model: nn.Module, loss_fn: LossFunction | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, torch.Tensor | None]:
    """Runs the model and ``loss_fn``, if there is one; returns the output and the loss.

    ``loss_fn`` is called as ``loss_fn(output)``; as ``loss_fn(output, targets)`` if the keyword input ``targets`` is
    given, which the model then does not receive; or else as ``loss_fn(output, batch)`` if it takes the batch: the
    arguments of the model, ``kwargs`` if there are no positional ones, else ``args``. An ``nn.Module`` such as
    ``nn.CrossEntropyLoss()`` is a loss function like any other.

    Raises:
        TraceError: the result is not a tensor with one element; or targets are given that nothing takes, or missing
            where ``loss_fn`` needs them.
    """
    if loss_fn is None:
        if TARGETS in kwargs and not _takes_targets(model):
            raise TraceError(
                f"{TARGETS}= is given, but {type(model).__name__}.forward takes no such input and there is no loss_fn "
                "to take it: pass loss_fn=, called as loss_fn(output, targets), to parallelize, plan or verify. With a "
                "loss_fn, step() hands it the targets; model(...) calls forward alone"
            )
        return model(*args, **kwargs), None
    if TARGETS in kwargs and not _goes_to_model(model, loss_fn):
        inputs = {key: value for key, value in kwargs.items() if key != TARGETS}
        _check_loss_module(loss_fn)
        output = model(*args, **inputs)
        return output, _checked(loss_fn(output, kwargs[TARGETS]))
    return (output := model(*args, **kwargs)), call_loss(loss_fn, output, args, kwargs)


def call_loss(loss_fn: LossFunction, output: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """``loss_fn(output)`` or ``loss_fn(output, batch)``, see :func:`run_with_loss`. Raises :class:`TraceError`."""
    _check_loss_module(loss_fn)
    if _needs_targets(loss_fn):
        raise TraceError(
            f"the loss function {_name(loss_fn)} compares the output with targets, but none are given: pass them to "
            "step(..., targets=...), and to plan, verify or parallelize(example_inputs=...) as targets= too"
        )
    batch = kwargs if kwargs and not args else args
    return _checked(loss_fn(output, batch) if _takes_batch(loss_fn) else loss_fn(output))


def _checked(loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        returned = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise TraceError(f"loss_fn returned {returned}; it must return a tensor with one element")
    return loss


def _name(loss_fn: LossFunction) -> str:
    return type(loss_fn).__name__ if isinstance(loss_fn, nn.Module) else getattr(loss_fn, "__name__", repr(loss_fn))


def _check_loss_module(loss_fn: LossFunction) -> None:
    """Raises :class:`TraceError` for a loss function with parameters: only the model's would be trained."""
    if isinstance(loss_fn, nn.Module):
        trainable = [name for name, parameter in loss_fn.named_parameters() if parameter.requires_grad]
        if trainable:
            raise TraceError(
                f"the loss function {_name(loss_fn)} has parameters of its own ({', '.join(trainable)}), which would "
                "not be trained: make it a part of the model, whose forward then returns the loss"
            )


def _takes_batch(loss_fn: LossFunction) -> bool:
    """Whether ``loss_fn`` must be given the batch as a second positional argument."""
    parameters = positional(loss_fn)
    return sum(p.default is p.empty for p in parameters) >= 2 or any(p.name == "batch" for p in parameters[1:])


def _needs_targets(loss_fn: LossFunction) -> bool:
    """Whether ``loss_fn`` needs a second argument that cannot be the batch, as torch's losses do."""
    second = positional(loss_fn)[1:2]
    if any(p.name == "batch" for p in second):
        return False
    named = isinstance(loss_fn, nn.Module) or any(p.name in ("target", TARGETS) for p in second)
    return named and any(p.default is p.empty for p in second)


def _takes_targets(model: nn.Module) -> bool:
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return True
    return any(p.name == TARGETS or p.kind is p.VAR_KEYWORD for p in parameters)


def _goes_to_model(model: nn.Module, loss_fn: LossFunction) -> bool:
    """Whether the input called targets belongs to the model although there is a loss function: one that takes the
    output alone, or the batch by that name. Raises :class:`TraceError` if nothing takes it."""
    parameters = positional(loss_fn)
    if not parameters or (len(parameters) > 1 and parameters[1].name != "batch"):
        return False
    if not _takes_targets(model):
        raise TraceError(
            f"{TARGETS}= is given, but the loss function {_name(loss_fn)} takes the output"
            f"{' and the batch' if len(parameters) > 1 else ' alone'}: give it a second parameter, as in "
            "loss_fn(output, targets)"
        )
    return True
