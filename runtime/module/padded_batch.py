"""A batch of which token sequences are padded (:mod:`autopar.runtime.inputs.sequences`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from autopar.errors import OptionsError
from autopar.runtime.calls.kind import leaf_names
from autopar.runtime.inputs.sequences import SequencePadding, key_of
from autopar.torch_internals.trees import tree_flatten, tree_unflatten

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def _alone(record: bytes) -> list[bytes]:
    return [record]


def padded_batch(
    module: nn.Module,
    multiple: int | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    everyone: Callable[[bytes], list[bytes]] = _alone,
    named: bool = True,
) -> Inputs:
    """The inputs of a call of ``module`` with sequences as long as on all ranks and a ``multiple``, and a mask if one
    is wanted. ``everyone``: exchanges what ranks have to know of each other; ``named``: whether keywords may be added.
    Raises :class:`OptionsError` if a mask is needed and cannot be made."""
    padding, names = SequencePadding.of(module, multiple), leaf_names(module, args, kwargs)
    leaves, spec = tree_flatten((args, dict(sorted(kwargs.items()))))
    widths = padding.plan(everyone(padding.record(names, leaves)))
    if widths.wants_mask(names, leaves) and (named or (widths.pads and not padding.causal)):
        if not named:
            raise OptionsError(
                "sequences have to be padded, and a batch without names has no place for the attention_mask that "
                "says which positions are real: have the collate function give a dict"
            )
        args, kwargs = _with_mask(args, kwargs, names)
        names = leaf_names(module, args, kwargs)
        leaves, spec = tree_flatten((args, dict(sorted(kwargs.items()))))
        widths = widths.with_mask()
    if not widths.pads:
        return args, kwargs
    with torch.no_grad():
        longer = [widths.apply(name, leaf) for name, leaf in zip(names, leaves, strict=True)]
    positional, keywords = tree_unflatten(longer, spec)
    return tuple(positional), {name: keywords[name] for name in kwargs}


def _with_mask(args: tuple[Any, ...], kwargs: dict[str, Any], names: Sequence[str]) -> Inputs:
    """The inputs with a mask of all positions of the ids, instead of a None if there is one."""
    leaves, spec = tree_flatten((args, dict(sorted(kwargs.items()))))
    keys = [key_of(name) for name in names]
    mask = torch.ones_like(leaves[keys.index("input_ids")])
    if "attention_mask" not in keys:
        return args, {**kwargs, "attention_mask": mask}
    leaves[keys.index("attention_mask")] = mask
    positional, keywords = tree_unflatten(leaves, spec)
    return tuple(positional), {name: keywords[name] for name in kwargs}
