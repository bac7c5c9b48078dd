"""Checks that what a plan says of memory is what its mesh and placements leave on a device: one check of
:mod:`.validate`. A mesh that somebody changed in the file alone does not pass it."""

from __future__ import annotations

import math
from collections.abc import Iterator

from autopar.ir.assignment import ParameterPlacement
from autopar.ir.node import TensorType
from autopar.ir.placements import Placements, largest_local_shape, short
from autopar.ir.plan_record import PlanRecord, ResidentTensor
from autopar.optimizers import optimizer_bytes

from .moves import types_of


def resting(plan: PlanRecord) -> Iterator[str]:
    """The weights, optimizer state and inputs whose bytes are not those of their shards. Where devices differ, in their
    shares of rows or as stages of unequal meshes, what the fullest one holds depends on more than the file says."""
    if plan.shares or plan.device_limits or not plan.stage_meshes.are_equal:
        return
    placed = _placed_parameters(plan)
    for position, held in enumerate(plan.holdings):
        types = types_of(plan.nodes[held.name].type)
        if held.kind in ("weight", "optimizer") and plan.nodes[held.name].op == "param" and types:
            places, sizes = placed[plan.nodes[held.name].target], _weights if held.kind == "weight" else _state
            possible = {size for place in places for size in sizes(plan, types, place)}
            where = " or ".join(dict.fromkeys(short(place.optimizer) for place in places))
        elif held.kind == "input" and plan.nodes[held.name].op == "input" and types:
            place = plan.strategies[held.name].outputs[0]
            possible, where = {_local_bytes(plan, types[0], place)}, short(place)
        else:
            continue
        if held.bytes not in possible:
            yield _problem(plan, position, held, where, possible)


def _problem(plan: PlanRecord, position: int, held: ResidentTensor, where: str, possible: set[int]) -> str:
    kind = plan.nodes[held.name].type
    return (
        f"holdings[{position}] has {held.bytes} bytes of {held.kind} {held.name!r}, but {kind} in {where} on the mesh "
        f"{plan.mesh} takes {' or '.join(map(str, sorted(possible)))}"
    )


def _placed_parameters(plan: PlanRecord) -> dict[str, list[ParameterPlacement]]:
    """By path, how a parameter rests in its stages."""
    placed = {path: [place] for path, place in plan.parameters.items()}
    for (_, path), place in plan.pipeline.borrowed.items() if plan.pipeline is not None else ():
        placed[path].append(place)
    return placed


def _weights(plan: PlanRecord, types: list[TensorType], place: ParameterPlacement) -> Iterator[int]:
    """Bytes of a weight: of what is stored, and of a working copy that is placed otherwise or of another dtype, which
    is all that a stage has of a weight that another one on its devices stores."""
    has_copy = place.weight != place.optimizer or len(types) > 1
    stored, copy = (_local_bytes(plan, types[-1], place.optimizer), _local_bytes(plan, types[0], place.weight))
    yield stored + copy * has_copy
    yield copy * has_copy


def _state(plan: PlanRecord, types: list[TensorType], place: ParameterPlacement) -> Iterator[int]:
    """Bytes of a parameter's optimizer state."""
    shape = tuple(map(int, types[-1].shape))
    shard = TensorType(largest_local_shape(shape, place.optimizer, plan.mesh), types[-1].dtype)
    yield int(optimizer_bytes(plan.optimizer, shard))


def _local_bytes(plan: PlanRecord, kind: TensorType, place: Placements) -> int:
    shape = tuple(map(int, kind.shape))
    return math.prod(largest_local_shape(shape, place, plan.mesh)) * kind.dtype.itemsize
