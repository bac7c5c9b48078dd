"""Whether the priced collectives of a plan are those that its placements need: one check of :mod:`.plan_check`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

from .graph import SHORT_DTYPES, TensorType
from .plan import Plan, PlanLine, Step
from .reshard import make_hop
from .spec import Placements, parse_placements, shard_before, short

_TYPE = re.compile(r"(\w+)\[([\d, ]*)\]")


def moves(plan: Plan) -> Iterator[str]:
    """What is wrong with the lines that move values, of a plan whose names and placements are checked."""
    by_value: dict[str, list[PlanLine]] = defaultdict(list)
    for position, line in enumerate(plan.lines):
        if line.steps and line.kind != "hidden":
            by_value[line.name].append(line)
            types = _types(plan.nodes[line.name].type)
            for step in line.steps:
                yield from _hop(plan, step, types, f"lines[{position}] ({line.kind} {line.name})")
    yield from _ends(plan, by_value)


def _types(text: str) -> list[TensorType]:
    """The types of a node's results, and that in which a parameter is stored."""
    found = [
        TensorType(tuple(map(int, re.findall(r"\d+", dims))), SHORT_DTYPES[dtype])
        for dtype, dims in _TYPE.findall(text)
        if dtype in SHORT_DTYPES
    ]
    shape = found[0].shape if found else ()
    stored = [SHORT_DTYPES[name] for name in re.findall(r", stored (\w+)", text) if name in SHORT_DTYPES]
    return [*found, *(TensorType(shape, dtype) for dtype in stored)]


def _hop(plan: Plan, step: Step, types: list[TensorType], where: str) -> Iterator[str]:
    """A step is what leads from its source to its target, and moves as many bytes as the tensor has."""
    source, target = parse_placements(step.source), parse_placements(step.target)
    whole = all(shard_before(place) > 0 for place in (*source, *target))
    hops = [make_hop(kind, source, target, plan.mesh) for kind in types if whole]
    possible = {(hop.kind, hop.axes, hop.collective.bytes if hop.collective else 0) for hop in hops if hop is not None}
    if (step.kind, step.axes, step.bytes) not in possible:
        needed = " or ".join(f"{kind} over {list(axes)} of {size} bytes" for kind, axes, size in sorted(possible))
        yield (
            f"{where}: {step.source} -> {step.target} is priced as {step.kind} over {list(step.axes)} of {step.bytes} "
            f"bytes; it takes {needed or 'several steps'}"
        )


def _made(plan: Plan) -> Mapping[str, set[Placements]]:
    """How each value is placed where it is made, or rests."""
    made = {name: set(strategy.outputs) for name, strategy in plan.strategies.items()}
    # A weight that was updated where its optimizer state rests is brought back from there.
    rests = {path: {place.weight, place.optimizer} for path, place in plan.parameters.items()}
    return {**made, **{node: rests[path] for path, node in plan.parameter_nodes.items()}}


def _ends(plan: Plan, lines: Mapping[str, list[PlanLine]]) -> Iterator[str]:
    """What is moved begins as it is made, or where another line brought it."""
    made = _made(plan)
    for name, moved in lines.items():
        for line in moved:
            others = {step.target for other in moved if other is not line for step in other.steps}
            begins = parse_placements(line.steps[0].source)
            if begins not in made.get(name, {begins}) and line.steps[0].source not in others:
                yield (
                    f"lines moves {name!r} from {short(begins)}, but it is made as {' '.join(map(short, made[name]))}"
                )
