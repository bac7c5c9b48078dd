"""Decisions that one rank makes for all, and checks that all ranks agree."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from autopar.errors import PlanMismatchError
from autopar.runtime.comm.groups import AxisGroup
from autopar.runtime.comm.minority import minority, named

Result = TypeVar("Result")


def on_first_rank(ranks: AxisGroup, make: Callable[[], Result]) -> Result:
    """Runs ``make`` on the first of ``ranks``; its result or error is that of every rank. Collective."""
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
    result: Result = box[0]
    return result


def gather_objects(ranks: AxisGroup, own: Any) -> list[Any]:
    """The ``own`` object of each of ``ranks``, anything that pickles. Collective."""
    if ranks.size == 1:
        return [own]
    received: list[Any] = [None] * ranks.size
    dist.all_gather_object(received, own, group=ranks.group)
    return received


def same_on_all_ranks(ranks: AxisGroup, make: Callable[[], Result], text_of: Callable[[Result], str]) -> Result:
    """Runs ``make`` on each of ``ranks`` and checks that ``text_of`` the results is the same. Collective. If ``make``
    raises on a rank, that rank raises its error and the others :class:`PlanMismatchError`; every rank raises
    :class:`PlanMismatchError` if the texts differ."""
    if ranks.size == 1:
        return make()
    failure: Exception | None = None
    try:
        result = make()
        outcome = hashlib.sha256(text_of(result).encode()).hexdigest()
    except Exception as error:
        failure, outcome = error, f"{type(error).__name__}: {error}"
    everyone = gather_objects(ranks, (failure is not None, outcome))
    if failure is not None:
        raise failure
    failed = [(index, text) for index, (wrong, text) in enumerate(everyone) if wrong]
    if failed:
        raise PlanMismatchError(f"the model could not be traced on rank {failed[0][0]} of the mesh: {failed[0][1]}")
    odd, others = minority(everyone)
    if odd:
        raise PlanMismatchError(
            f"the model runs other operations on {named(odd)} of the mesh than on its {named(others)}: something that "
            "its forward reads (an attribute, a flag) differs between ranks. Set it to the same value on every rank"
        )
    return result
