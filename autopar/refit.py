"""Carries a choice over to the same graph at another batch size."""

from __future__ import annotations

from .assignment import Assignment
from .errors import PlanMismatchError
from .graph import Graph
from .spec import Strategy, is_shard, shard_before, shard_dim, short


def refit(assignment: Assignment, known: Graph, other: Graph) -> Assignment:
    """The assignment of the annotated graph ``known`` for ``other``: the same model, annotated for the same mesh, at
    another batch size.

    Each node takes the strategy that is alike but for sizes inside placements; if several are, the one at the same
    position.

    Raises:
        PlanMismatchError: a dim that was divided evenly no longer is, or a strategy is not to be had at the new size;
            names both shapes and a batch size that works.
    """
    _check_inputs(assignment, known, other)
    strategies = {}
    for name, chosen in assignment.strategies.items():
        before, after = known.strategies[name], other.strategies.get(name, ())
        same = [s for s in after if _kind(s) == _kind(chosen)]
        place = before.index(chosen)
        if len(before) == len(after) and after[place] in same:
            strategies[name] = after[place]
        elif same:
            strategies[name] = same[0]
        else:
            raise PlanMismatchError(_lost(name, known, other, chosen))
    return Assignment(assignment.mesh, strategies, assignment.parameters)


def _kind(strategy: Strategy) -> object:
    """The strategy without the sizes inside its placements."""

    def kind(places: tuple[object, ...]) -> tuple[object, ...]:
        return tuple((shard_dim(p), shard_before(p) > 1) if is_shard(p) else p for p in places)  # type: ignore[arg-type]

    return tuple(map(kind, strategy.inputs)), tuple(map(kind, strategy.outputs)), strategy.local


def _check_inputs(assignment: Assignment, known: Graph, other: Graph) -> None:
    for node in known.placeholders("input"):
        place, old, new = assignment.strategies[node.name].outputs[0], node.type.shape, other[node.name].type.shape
        for dim, (before, after) in enumerate(zip(old, new, strict=True)):
            parts = 1
            for axis, placement in enumerate(place):
                parts *= assignment.mesh[axis] if shard_dim(placement) == dim else 1
            if before % parts == 0 and after % parts:
                raise PlanMismatchError(
                    f"the input {node.target!r} has shape {tuple(new)}, but the plan was made for {tuple(old)} "
                    f"and divides dim {dim} "
                    f"among {parts} devices ({short(place)}); {after} is not a multiple of {parts}. Pad or drop to "
                    f"{after // parts * parts or parts} along that dim (drop_last=True in a DataLoader), "
                    "or make a plan for this shape"
                )


def _lost(name: str, known: Graph, other: Graph, chosen: Strategy) -> str:
    old, new = known[name], other[name]
    return (
        f"the plan runs {old.op} in {old.module or 'the model'} on {old.type} as {chosen}, "
        f"which is not possible on {new.type}; "
        "use a batch that divides like the first one, or make a plan for this shape"
    )
