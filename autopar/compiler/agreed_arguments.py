"""Checks that all ranks pass the same options and the same model: otherwise those of the first rank would be used in
silence, or ranks would fail in ways that say nothing of the cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from hashlib import sha256

from torch import nn

from autopar.errors import OptionsError, PlanMismatchError
from autopar.ir.node import TensorType
from autopar.options import Options
from autopar.runtime.comm.groups import AxisGroup
from autopar.runtime.comm.minority import minority, named

from .rank_zero import gather_objects

# How many differences of models a message lists.
# Chosen: enough to see where they begin.
_LISTED = 4
_NONE = "none"


def check_same_arguments(model: nn.Module, options: Options, names: Sequence[int], ranks: AxisGroup) -> None:
    """Compares what the ranks, called ``names``, pass to ``parallelize``. Collective. On every rank raises
    :class:`OptionsError` that names options that differ, or :class:`PlanMismatchError` that names parameters, buffers
    and modules that only some have, or have with another shape or dtype."""
    if ranks.size == 1:
        return
    own = {field.name: repr(_plain(getattr(options, field.name))) for field in fields(options) if field.compare}
    parts = _parts(model)
    digest = sha256(repr(list(parts.items())).encode()).hexdigest()
    everyone = gather_objects(ranks, (own, digest))
    lines = _differences([each for each, _ in everyone], names, len(own))
    if lines:
        listed = "".join(f"\n  {line}" for line in lines)
        raise OptionsError(f"ranks pass different autopar.Options:{listed}\nPass the same on every rank")
    hashes = [each for _, each in everyone]
    if len(set(hashes)) > 1:
        odd, others = ([names[place] for place in places] for places in minority(hashes))
        listed = "".join(f"\n  {line}" for line in _differences(gather_objects(ranks, parts), names, _LISTED))
        raise PlanMismatchError(
            f"{named(odd)} {'has' if len(odd) == 1 else 'have'} another model than {named(others)}:{listed}\nBuild the "
            "same model on every rank: autopar takes each rank's part of it"
        )


def _parts(model: nn.Module) -> dict[str, str]:
    """The modules, parameters and buffers of ``model`` by path, in words. Their values are rank 0's."""
    parts = {path: type(module).__name__ for path, module in model.named_modules() if path}
    for path, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers()):
        parts[path] = str(TensorType(tuple(tensor.shape), tensor.dtype))
    return parts


def _differences(everyone: Sequence[Mapping[str, str]], names: Sequence[int], most: int) -> list[str]:
    """For each key whose values differ, which ranks have which; the first ``most``."""
    lines = []
    for key in dict.fromkeys(key for each in everyone for key in each):
        groups: dict[str, list[int]] = {}
        for rank, each in zip(names, everyone, strict=True):
            groups.setdefault(each.get(key, _NONE), []).append(rank)
        if len(groups) > 1:
            fewest_first = sorted(groups.items(), key=lambda entry: len(entry[1]))
            lines.append(f"{key}: " + "; ".join(f"{value} on {named(own)}" for value, own in fewest_first))
    return lines[:most] + ([f"and {len(lines) - most} more"] if len(lines) > most else [])


def _plain(value: object) -> object:
    return dict(value) if isinstance(value, Mapping) else value
