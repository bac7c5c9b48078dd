"""Decisions that one rank takes for all, and that all take alike."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from autopar.errors import PlanMismatchError
from autopar.runtime.comm.groups import AxisGroup

Made = TypeVar("Made")


def on_first_rank(ranks: AxisGroup, make: Callable[[], Made]) -> Made:
    """What the first of ``ranks`` makes, on every one of them; its error too. Collective."""
    if ranks.size == 1:
        return make()
    box: list[Any] = [None, None]
    if ranks.index == 0:
        try:
            box = [make(), None]
        except Exception as error:
            box = [None, error]
    dist.broadcast_object_list(box, group=ranks.group, group_src=0)
    if box[1] is not None:
        raise box[1]
    made: Made = box[0]
    return made


def everyones(ranks: AxisGroup, own: Any) -> list[Any]:
    """What each of ``ranks`` gives, anything that pickles. Collective."""
    if ranks.size == 1:
        return [own]
    received: list[Any] = [None] * ranks.size
    dist.all_gather_object(received, own, group=ranks.group)
    return received


def alike(ranks: AxisGroup, make: Callable[[], Made], text_of: Callable[[Made], str]) -> Made:
    """What each of ``ranks`` makes of its own model and call. Collective. A rank whose ``make`` raises does so; raises
    :class:`PlanMismatchError` on the others then, and on every rank if the texts of what they made differ."""
    if ranks.size == 1:
        return make()
    failure: Exception | None = None
    try:
        made = make()
        said = hashlib.sha256(text_of(made).encode()).hexdigest()
    except Exception as error:
        failure, said = error, f"{type(error).__name__}: {error}"
    everyone = everyones(ranks, (failure is not None, said))
    if failure is not None:
        raise failure
    failed = [(index, text) for index, (wrong, text) in enumerate(everyone) if wrong]
    if failed:
        raise PlanMismatchError(f"the model could not be traced on rank {failed[0][0]} of the mesh: {failed[0][1]}")
    others = [index for index, each in enumerate(everyone) if each != everyone[0]]
    if others:
        raise PlanMismatchError(
            f"the model does other operations on rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others))} of "
            "the mesh than on its rank 0: something that its forward reads (an attribute, a flag) differs between "
            "ranks. Set it alike on every rank"
        )
    return made
