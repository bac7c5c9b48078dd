"""Carries an assignment over to the same graph at another batch size."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from autopar.errors import PlanMismatchError
from autopar.ir.assignment import Assignment
from autopar.ir.graph import Graph
from autopar.ir.node import Node
from autopar.ir.placements import Placement, Strategy, is_shard, shard_before, shard_dim, shares_of, short
from autopar.plans.plan import Plan


def refit(assignment: Assignment, original: Graph, other: Graph) -> Assignment:
    """Carries the ``assignment`` of the annotated graph ``original`` over to ``other``: the same model, annotated for
    the same mesh, at another batch size.

    Nodes correspond as :func:`corresponding` says. Each node takes the strategy that differs only in the sizes inside
    its placements; if several do, the one at the same position in the list.

    Raises:
        PlanMismatchError: a dim that was divided evenly no longer is, or a strategy is not available at the new size;
            names both shapes and a batch size that works.
    """
    names = corresponding(original, other)
    _check_inputs(assignment, original, other, names)
    strategies = {}
    for name, chosen in assignment.strategies.items():
        before, after = original.strategies[name], other.strategies[names[name]]
        same = [s for s in after if _kind(s) == _kind(chosen)]
        position = before.index(chosen)
        if not same:
            raise PlanMismatchError(_lost(original[name], other[names[name]], chosen, _changed(original, other, names)))
        same_position = len(before) == len(after) and after[position] in same
        strategies[names[name]] = after[position] if same_position else same[0]
    parameters = {names[name]: position for name, position in assignment.parameters.items()}
    recomputed = frozenset(names[name] for name in assignment.recomputed)
    offloaded = frozenset(names[name] for name in assignment.offloaded)
    return Assignment(assignment.mesh, strategies, parameters, recomputed=recomputed, offloaded=offloaded)


def corresponding(original: Graph, other: Graph) -> dict[str, str]:
    """Maps each node of ``original`` to its node in ``other``, a graph of the same model. Nodes correspond by position,
    inputs by the nodes that read them: a call that passes inputs by keyword or in another order gives them other names
    and another order.

    Raises:
        PlanMismatchError: the graphs run different operations.
    """
    before, after = _without_inputs(original), _without_inputs(other)
    inputs, others = original.placeholders("input"), other.placeholders("input")
    ran, runs = ([(node.op, len(node.operands)) for node in nodes] for nodes in (before, after))
    if ran != runs or len(inputs) != len(others):
        raise PlanMismatchError("the model runs other operations on these inputs than on those of the plan")
    names = {old.name: new.name for old, new in zip(before, after, strict=True)}
    for old, new in zip(before, after, strict=True):
        used = zip(old.operands, new.operands, strict=True)
        names |= {mine.node: its.node for mine, its in used if original[mine.node].op == "input"}
    taken = set(names.values())
    unused = (node.name for node in others if node.name not in taken)
    return names | dict(zip((node.name for node in inputs if node.name not in names), unused, strict=False))


def _without_inputs(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op != "input"]


def refit_plan(
    plan: Plan, original: Graph, other: Graph, chunks: Sequence[int] = (), names: Collection[str] | None = None
) -> Assignment:
    """:func:`refit` of the choices of ``plan``, which was made for ``original``. Nodes that only a cut graph has are
    left out. ``chunks``: those whose stages have a mesh of their own, for which both graphs are annotated; ``names``:
    the nodes there, to which the result is restricted."""
    chosen = plan.assignment({node.target: node.name for node in original.placeholders("param")}, chunks)
    strategies = {
        name: strategy
        for name, strategy in chosen.strategies.items()
        if name in original and (names is None or name in names)
    }
    return refit(replace(chosen, strategies=strategies), original, other)


def _kind(strategy: Strategy) -> object:
    """The strategy without the sizes inside its placements."""

    def kind(places: tuple[Placement, ...]) -> tuple[object, ...]:
        return tuple((shard_dim(p), shard_before(p) > 1, bool(shares_of(p))) if is_shard(p) else p for p in places)

    return tuple(map(kind, strategy.inputs)), tuple(map(kind, strategy.outputs)), strategy.local


def _check_inputs(assignment: Assignment, original: Graph, other: Graph, names: Mapping[str, str]) -> None:
    for node in original.placeholders("input"):
        if node.name not in assignment.strategies:
            continue
        place, old = assignment.strategies[node.name].outputs[0], node.type.shape
        new = other[names[node.name]].type.shape
        for dim, (before, after) in enumerate(zip(old, new, strict=True)):
            parts = 1
            for axis, placement in enumerate(place):
                # Rows are shared anew if they are unequal.
                parts *= assignment.mesh[axis] if shard_dim(placement) == dim and not shares_of(placement) else 1
            if before % parts == 0 and after % parts:
                raise PlanMismatchError(
                    f"the input {node.target!r} has shape {tuple(new)}, but the plan was made for {tuple(old)} "
                    f"and divides dim {dim} "
                    f"among {parts} devices ({short(place)}); {after} is not a multiple of {parts}. Pad or drop to "
                    f"{after // parts * parts or parts} along that dim (drop_last=True in a DataLoader), "
                    "or make a plan for this shape"
                )


def _changed(original: Graph, other: Graph, names: Mapping[str, str]) -> str:
    """The inputs whose type has changed, with both types."""
    inputs = [(node, other[names[node.name]]) for node in original.placeholders("input")]
    return ", ".join(f"{old.target!r} {new.type} instead of {old.type}" for old, new in inputs if old.type != new.type)


def _lost(old: Node, new: Node, chosen: Strategy, changed: str) -> str:
    return (
        f"the plan does not carry over to inputs {changed}: it runs {old.op} in {old.module or 'the model'} on "
        f"{old.type} as {chosen}, which is not possible on {new.type}. Use a batch that divides like the first one "
        "(drop_last=True in a DataLoader), or make a plan for this shape"
    )
