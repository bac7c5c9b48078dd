"""Restores parameters and buffers from a checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autopar.errors import CheckpointError
from autopar.ir.module_paths import did_you_mean
from autopar.runtime.module.parallel_module import ParallelModule

from .fill import Target, check_shape
from .opened import Opened
from .snapshot import MODEL
from .sources import Source
from .tree_json import from_json

# The number of names that an error lists. Chosen: a line of text.
_LISTED = 6


@dataclass
class Matched:
    """``targets``: the model's tensors with their names in the source; ``others``: its other state."""

    targets: list[Target] = field(default_factory=list)
    others: dict[str, Any] = field(default_factory=dict)


def source_of(opened: Opened) -> Source:
    """The parameters and buffers of a checkpoint."""
    return Source(opened.store, opened.index, opened.state["model"]["tied"], MODEL)


def match_model(opened: Opened, model: nn.Module) -> Matched:
    """Which tensor of ``model`` is which of the checkpoint. Raises :class:`CheckpointError` for other names or
    shapes."""
    matched = match_tensors(source_of(opened), model, skip=opened.state["model"]["others"])
    names = model.state_dict(keep_vars=True)
    for name, encoded in opened.state["model"]["others"].items():  # get_extra_state and the like.
        if name in names:
            matched.others[name] = from_json(encoded, opened.whole)
    return matched


def match_tensors(source: Source, model: nn.Module, skip: Collection[str] = ()) -> Matched:
    """Which tensor of ``model`` is which of ``source``, tied ones by any of their names. Raises
    :class:`CheckpointError` for tensors that only one of them has (but for names in ``skip``), or other shapes."""
    matched, missing, known = Matched(), [], set()
    for names, tensor in tensors_of(model):
        found = [stored for name in names if (stored := source.find([name])) is not None]
        known.update(found)
        if found:
            check_shape(source.index, found[0], tensor)
            matched.targets.append((found[0], tensor))
        else:
            missing.append(names[0])
    unexpected = [name for name in source.names if name not in known]
    if missing or unexpected:
        raise CheckpointError(_differing(source, missing, unexpected, list(model.state_dict(keep_vars=True))))
    return matched


def tensors_of(model: nn.Module) -> list[tuple[list[str], torch.Tensor]]:
    """Each parameter and persistent buffer with all its names."""
    named: dict[int, tuple[list[str], torch.Tensor]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor):
            named.setdefault(id(value), ([], value))[0].append(name)
    return list(named.values())


def _differing(source: Source, missing: list[str], unexpected: list[str], own: list[str]) -> str:
    parts = []
    if missing:
        parts.append(f"{source} has no {_list(missing)}, which the model has")
    if unexpected:
        bare = [name.removeprefix(source.prefix) for name in unexpected]
        parts.append(f"the model has no {_list(bare)}, which {source} has{did_you_mean(bare[0], own)}")
    return "; ".join(parts) + ": load into the model that was saved"


def _list(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def restore_model(source: Source, model: nn.Module, matched: Matched) -> None:
    """Fills the tensors of ``model``: now, or those on the meta device when its first batch places them."""
    waiting = [name for name, tensor in matched.targets if tensor.is_meta]
    if waiting:
        _check_can_wait(model, waiting)
        assert isinstance(model, ParallelModule)
        model.autopar_parts.weights.take_values(source)
    source.fill_all((name, tensor) for name, tensor in matched.targets if not tensor.is_meta)
    if matched.others:
        model.load_state_dict(matched.others, strict=False)


def _check_can_wait(model: nn.Module, names: Iterable[str]) -> None:
    if not isinstance(model, ParallelModule) or model.autopar_parts.weights.is_placed:
        raise CheckpointError(
            f"{min(names)} is on the meta device: load into a parallel model, or into one with memory "
            "(model.to_empty(device='cpu'))"
        )
