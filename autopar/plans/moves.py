"""Checks that the priced collectives of a plan are those that its placements need: one check of :mod:`.validate`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

from autopar.ir.node import SHORT_DTYPES, TensorType
from autopar.ir.placements import Placements, parse_placements, shard_before, short
from autopar.ir.plan_record import PlanLine, PlanRecord, ReshardStep
from autopar.ir.reshard import make_hop

_TYPE = re.compile(r"(\w+)\[([\d, ]*)\]")


def moves(plan: PlanRecord) -> Iterator[str]:
    """What is wrong with the lines that move values. The names and placements of the plan are already checked."""
    by_value: dict[str, list[PlanLine]] = defaultdict(list)
    problems: dict[object, list[str]] = {}
    for position, line in enumerate(plan.lines):
        if line.steps and line.kind not in ("hidden", "exchange"):
            by_value[line.name].append(line)
            text, mesh = plan.nodes[line.name].type, plan.stage_meshes.meshes[line.stage]
            key = id(line.steps), text, mesh
            if key not in problems:  # Lines of a plan that was read share their steps.
                types = types_of(text)
                problems[key] = [problem for step in line.steps for problem in _hop(mesh, step, types)]
            yield from (f"lines[{position}] ({line.kind} {line.name}): {problem}" for problem in problems[key])
    yield from _ends(plan, by_value)


def types_of(text: str) -> list[TensorType]:
    """The types of a node's results, and the type in which a parameter is stored."""
    results = [
        TensorType(tuple(map(int, re.findall(r"\d+", dims))), SHORT_DTYPES[dtype])
        for dtype, dims in _TYPE.findall(text)
        if dtype in SHORT_DTYPES
    ]
    shape = results[0].shape if results else ()
    stored = [SHORT_DTYPES[name] for name in re.findall(r", stored (\w+)", text) if name in SHORT_DTYPES]
    return [*results, *(TensorType(shape, dtype) for dtype in stored)]


def _hop(mesh: tuple[int, ...], step: ReshardStep, types: list[TensorType]) -> Iterator[str]:
    """Checks that a step leads from its source to its target, and moves as many bytes as the tensor needs."""
    source, target = parse_placements(step.source), parse_placements(step.target)
    divisible = all(shard_before(place) > 0 for place in (*source, *target))
    hops = [make_hop(kind, source, target, mesh) for kind in types if divisible]
    possible = {(hop.kind, hop.axes, hop.collective.bytes if hop.collective else 0) for hop in hops if hop is not None}
    if (step.kind, step.axes, step.bytes) not in possible:
        needed = " or ".join(f"{kind} over {list(axes)} of {size} bytes" for kind, axes, size in sorted(possible))
        yield (
            f"{step.source} -> {step.target} is priced as {step.kind} over {list(step.axes)} of {step.bytes} "
            f"bytes; it takes {needed or 'several steps'}"
        )


def _produced(plan: PlanRecord) -> Mapping[str, set[Placements]]:
    """The placements in which each value is computed or rests."""
    produced = {name: set(strategy.outputs) for name, strategy in plan.strategies.items()}
    # A weight is updated in the placement of its optimizer state and gathered from there.
    rests = {path: {place.weight, place.optimizer} for path, place in plan.parameters.items()}
    for (_, path), place in plan.pipeline.borrowed.items() if plan.pipeline is not None else ():
        rests[path] |= {place.weight, place.optimizer}
    return {**produced, **{node: rests[path] for path, node in plan.parameter_nodes.items()}}


def _ends(plan: PlanRecord, lines: Mapping[str, list[PlanLine]]) -> Iterator[str]:
    """Checks that each move begins at the placement in which the value is computed, or at one to which another line
    moves it."""
    produced = _produced(plan)
    for name, moved in lines.items():
        for line in moved:
            targets = {step.target for other in moved if other is not line for step in other.steps}
            begins = parse_placements(line.steps[0].source)
            if begins not in produced.get(name, {begins}) and line.steps[0].source not in targets:
                made_as = " ".join(map(short, produced[name]))
                yield f"lines moves {name!r} from {short(begins)}, but it is computed as {made_as}"
