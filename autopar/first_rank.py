"""Decisions that one rank takes for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from autopar.runtime.groups import AxisGroup

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
