"""Measures how unevenly a model's routers use experts, for ``Options(imbalance=...)``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from autopar.arguments import split_batch
from autopar.errors import OptionsError
from autopar.layout import degrees
from autopar.trace.moe_blocks import recorded_choices


def expert_imbalance(model: nn.Module, batch: Any, devices: int) -> float:
    """The rows of the busiest of ``devices`` devices that share the experts of a block, relative to their mean: the
    mean over the model's blocks, each of which waits for its own busiest device.

    Runs forward once, without gradients, in the mode that the model is in and on the device where it is.

    Args:
        model: a mixture of experts of transformers, with the weights whose routing is of interest: those of a new model
            use experts less evenly than trained ones do under a loss that balances them.
        batch: as for :func:`autopar.plan`: a tuple of positional or a dict of keyword inputs; the tokens of a step.
        devices: among which the experts of every block are divided, neighbours first.

    Returns:
        At least 1; 1 if all devices get as many rows.

    Raises:
        OptionsError: no block of experts ran, or ``devices`` does not divide the experts of one.
    """
    args, kwargs = split_batch(batch)
    with recorded_choices() as chosen, torch.no_grad():
        model(*args, **kwargs)
    if not chosen:
        raise OptionsError(
            f"{type(model).__name__} ran no block of experts whose choices can be read: those of mixtures "
            "of experts of transformers can"
        )
    paths = {module: path for path, module in model.named_modules()}
    found = [busiest(ids, _count(block, paths.get(block, ""), devices), devices) for block, ids in chosen.items()]
    return sum(found) / len(found)


def busiest(ids: Iterable[Tensor], count: int, devices: int) -> float:
    """Rows of the busiest of ``devices`` devices relative to the mean; ``ids`` are the choices [T, k] of ``count``
    experts."""
    flat = torch.cat([each.reshape(-1) for each in ids])
    rows = torch.bincount(flat, minlength=count)[:count].view(devices, count // devices).sum(1)
    return float(rows.max() * devices / rows.sum()) if int(rows.sum()) else 1.0


def _count(block: nn.Module, path: str, devices: int) -> int:
    """The experts of a block."""
    count = int(block.num_experts)  # type: ignore[arg-type]
    if type(devices) is not int or devices < 1 or count % devices:
        raise OptionsError(
            f"devices={devices!r}: {path or type(block).__name__} has {count} experts, which do not divide among them; "
            f"{degrees('devices', count, devices if type(devices) is int and devices > 0 else 1)}"
        )
    return count
