"""Replaces functions and settings of torch while a model is traced, and restores each afterwards.

:mod:`autopar.trace.patches` says why each is replaced, and by what.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch._decomp.decompositions as torch_decompositions
from torch import nn
from torch._higher_order_ops.effects import _get_effect, _register_effectful_op
from torch._higher_order_ops.flex_attention import math_attention
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributions import Distribution
from torch.nn.attention import flex_attention
from torch.nn.modules import transformer
from torch.utils import checkpoint

Replacement = Callable[..., Any]
# Kept from before it is replaced.
_rnn_helper = torch_decompositions._rnn_helper


@contextmanager
def checkpoint_replaced(call: Replacement, around: Replacement) -> Iterator[None]:
    """Runs ``call`` for a reentrant ``checkpoint``, and the generator ``around`` before and after the function of one
    that is not. Relies on ``CheckpointFunction`` and ``_checkpoint_without_reentrant_generator`` (2.11), which
    ``checkpoint`` calls under a name with ``_impl`` since 2.14."""
    generator = "_checkpoint_without_reentrant_generator"
    name = f"{generator}_impl" if hasattr(checkpoint, f"{generator}_impl") else generator
    with ExitStack() as stack:
        stack.enter_context(patch.object(checkpoint.CheckpointFunction, "apply", staticmethod(call)))
        stack.enter_context(patch.object(checkpoint, name, around))
        yield


def is_registered_derivative(cls: type) -> bool:
    """Whether ``torch.library`` made the ``autograd.Function`` ``cls`` from an operator's registered derivative. Relies
    on the module that defines it, ``torch._library.autograd`` (2.11)."""
    return cls.__module__ == "torch._library.autograd"


@contextmanager
def autograd_functions_replaced(call: Replacement) -> Iterator[None]:
    """Runs ``call(apply, cls, *args, **kwargs)`` for ``cls.apply`` of every ``autograd.Function`` that has no ``apply``
    of its own; ``apply(*args, **kwargs)`` is what it replaces. Relies on what ``Function`` holds as ``apply`` being a
    descriptor: a ``classmethod`` (2.11), one in C++ without ``__func__`` since 2.15."""
    replaced = inspect.getattr_static(torch.autograd.Function, "apply")

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        return call(replaced.__get__(None, cls), cls, *args, **kwargs)

    with patch.object(torch.autograd.Function, "apply", classmethod(apply)):
        yield


@contextmanager
def module_conversion_replaced(convert: Replacement) -> Iterator[None]:
    """Runs ``convert`` for ``Module.to`` and the like. Relies on ``nn.Module._apply``, which they call (2.11)."""
    with patch.object(nn.Module, "_apply", convert):
        yield


def convert_module(module: nn.Module, function: Replacement) -> None:
    """Does what ``Module.to`` and the like do to ``module``, or what replaces it now. Relies on ``nn.Module._apply``
    (2.11)."""
    module._apply(function)


@contextmanager
def causal_mask_detection_replaced(detect: Replacement) -> Iterator[None]:
    """Lets ``detect`` say whether the mask given to ``nn.Transformer`` is causal. Relies on ``_detect_is_causal_mask``
    (2.11)."""
    with patch.object(transformer, "_detect_is_causal_mask", detect):
        yield


def recurrent_layers(x: torch.Tensor, hidden: Sequence[Any], *options: Any) -> tuple[torch.Tensor, list[Any]]:
    """The output and the final states of recurrent layers, by torch's decompositions; final states have the shapes of
    those in ``hidden``. Relies on ``_decomp.decompositions._rnn_helper`` (2.11), which in 2.11 leaves a dim of 1 in
    those of an LSTM: it removes the dim of the batch instead, if that is 1."""
    output, final = _rnn_helper(x, hidden, *options)
    return output, [_of_rank(last, first) for last, first in zip(final, hidden, strict=True)]


def _of_rank(last: Any, first: Any) -> Any:
    if not isinstance(last, torch.Tensor):
        return tuple(map(_of_rank, last, first))
    return last.squeeze(0) if last.dim() > first.dim() else last


@contextmanager
def recurrent_layers_replaced(layers: Replacement) -> Iterator[None]:
    """Runs ``layers`` for :data:`recurrent_layers` in torch's decompositions. Relies on ``_rnn_helper`` (2.11)."""
    with patch.object(torch_decompositions, "_rnn_helper", layers):
        yield


@contextmanager
def without_distribution_checks() -> Iterator[None]:
    """Stops distributions from checking values. Relies on ``Distribution._validate_args``; the public
    ``set_default_validate_args`` does not return the setting before (2.11)."""
    with patch.object(Distribution, "_validate_args", False):
        yield


@contextmanager
def flex_attention_by_definition() -> Iterator[None]:
    """Runs ``flex_attention`` as the operations that define it, on every device and with gradients. Torch refuses
    gradients on the CPU for lack of a kernel, and compiles unless it is told not to. Relies on ``_validate_device``,
    ``_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG``, ``flex_attention_hop`` and ``math_attention`` (2.11)."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(flex_attention, "_validate_device", lambda *_tensors: None))
        stack.enter_context(patch.object(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True))
        stack.enter_context(patch.object(flex_attention, "flex_attention_hop", math_attention))
        yield


@contextmanager
def without_effect(operation: str) -> Iterator[None]:
    """Makes AOTAutograd treat ``operation`` as one without side effects. Relies on ``_get_effect`` and
    ``_register_effectful_op`` (2.11)."""
    before = _get_effect(operation)
    _register_effectful_op(operation, None)
    try:
        yield
    finally:
        _register_effectful_op(operation, before)


@contextmanager
def without_mkldnn() -> Iterator[None]:
    """Keeps operations from running on oneDNN. Relies on ``torch._C._set_mkldnn_enabled``: the public
    ``torch.backends.mkldnn.flags`` also changes precision and determinism (2.11)."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


@contextmanager
def exporting() -> Iterator[None]:
    """Makes ``torch.compiler.is_compiling()`` and ``is_exporting()`` true. Relies on the flags they read (2.11)."""
    flags = ("_is_compiling_flag", "_is_exporting_flag")
    saved = [getattr(torch.compiler, flag) for flag in flags]
    try:
        for flag in flags:
            setattr(torch.compiler, flag, True)
        yield
    finally:
        for flag, value in zip(flags, saved, strict=True):
            setattr(torch.compiler, flag, value)


@contextmanager
def functional_move_replaced(name: str, move: Replacement) -> Iterator[None]:
    """The method ``name`` (``cuda``) of tensors that AOTAutograd traces is ``move``: theirs asks for the current GPU.
    Relies on ``FunctionalTensor`` having its own ``cuda`` (2.11)."""
    if name not in vars(FunctionalTensor):
        yield
        return
    with patch.object(FunctionalTensor, name, move):
        yield
