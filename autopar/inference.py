"""Plans for inference: what is traced, and with which inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from autopar.planner.prepare import Prepared, prepare
from autopar.planner.timings import Timings
from autopar.runtime.generation.cache import CacheInputs, hold_all_tokens
from autopar.runtime.generation.one_token import check_generates, one_token
from autopar.torch_internals.hugging_face import cache_name

from .errors import OptionsError
from .options import Options

Mode = Literal["training", "inference"]
Call = tuple[tuple[Any, ...], dict[str, Any]]


def in_mode(options: Options, mode: Mode | None) -> Options:
    """``options`` in ``mode``, if one is given. Raises :class:`OptionsError` for options of inference under
    training."""
    options = options if mode is None else replace(options, mode=mode)
    for name, default in (("objective", "latency"), ("cache_length", None)):
        if options.mode == "training" and getattr(options, name) != default:
            raise OptionsError(f'{name}={getattr(options, name)!r} is for inference: add mode="inference"')
    return options


def check_no_loss(loss_fn: object, targets: object) -> None:
    """Raises :class:`OptionsError` for what only training has."""
    for name, value in (("loss_fn", loss_fn), ("targets", targets)):
        if value is not None:
            raise OptionsError(f'{name}= is for training: leave it out with mode="inference"')


def planned_call(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], options: Options) -> Call:
    """The call that a plan for inference is made for: the batch as it is or, with ``cache_length``, one token for each
    of its sequences. Raises :class:`AutoparError` for a model that has no cache."""
    if options.cache_length is None:
        return args, dict(kwargs)
    from transformers import StaticCache

    check_generates(model)
    given = [value for value in (kwargs.get("input_ids"), *args) if isinstance(value, torch.Tensor)]
    if not given:
        raise OptionsError(
            f"cache_length={options.cache_length} plans generation, whose batch is input_ids, a tensor [rows, length]"
        )
    rows = int(given[0].shape[0])
    cache = StaticCache(config=model.config, max_cache_len=options.cache_length)
    hold_all_tokens(cache)
    return (), {**one_token(model, rows, cache), cache_name(model): CacheInputs.of(cache, model, rows)}


def prepare_inference(
    model: nn.Module, call: Call, device: torch.device, options: Options, timings: Timings
) -> Prepared:
    """The model traced for a call, forward alone. Raises :class:`TraceError`."""
    args, kwargs = call
    precision = options.precision
    base = prepare(
        model,
        args,
        kwargs,
        device=device,
        loss_fn=None,
        training=False,
        grad=False,
        precision=precision,
        timings=timings,
    )
    return base.without_loss()
