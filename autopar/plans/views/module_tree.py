"""The modules of a plan as a tree of rows: placements, seconds and communication of each. Equal layers are folded into
one row.

The figures of a row are those of one of the modules folded into it, and include the rows below it. Invariant: the
seconds of the top rows, each multiplied by its ``count``, add up to the plan's compute, exchange, reshard and weight
lines.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from autopar.ir.assignment import ParameterPlacement
from autopar.ir.placements import Placements, parse_placements, short
from autopar.ir.plan_record import PlanLine, PlanRecord, ReshardStep
from autopar.offload import IN_TIER

MOVES = ("reshard", "weight", "exchange")
# If the layers of one container fall into more groups than this by their placements, they are folded by their
# structure.
# Chosen: first, last and two kinds between are worth a row each.
KINDS = 4


@dataclass(frozen=True, slots=True)
class Move:
    """``count`` equal reshards. ``what``: the kind of each hop with its axes (``dp,tp``: over both at once); ``way``:
    from which placement to which; ``bytes`` of each (0: no communication); ``seconds`` of all; ``reason``: the kind of
    the plan's lines.
    """

    what: str
    way: str
    bytes: int
    reason: str
    count: float
    seconds: float

    @property
    def key(self) -> tuple[str, str, int, str]:
        return self.what, self.way, self.bytes, self.reason


@dataclass(frozen=True)
class ModuleRow:
    """A row of the tree; see the module docstring. ``paths`` are the modules folded into the row, ``held`` the bytes
    that rest for one of them, ``stages`` the pipeline stages that compute them."""

    label: str
    paths: tuple[str, ...]
    weight: str = ""
    output: str = ""
    compute: float = 0.0
    comm: float = 0.0
    held: float = 0.0
    moves: tuple[Move, ...] = ()
    children: tuple[ModuleRow, ...] = ()
    kind: Hashable = ()
    stages: frozenset[int] = frozenset()

    @property
    def count(self) -> int:
        return len(self.paths)

    @property
    def seconds(self) -> float:
        return self.compute + self.comm


@dataclass
class _Module:
    """The figures collected for one module path, from which rows are made."""

    compute: float = 0.0
    held: float = 0.0
    moves: dict[Hashable, Move] = field(default_factory=dict)
    weights: dict[str, tuple[str, int]] = field(default_factory=dict)
    children: dict[str, _Module] = field(default_factory=dict)
    stages: set[int] = field(default_factory=set)

    @property
    def is_empty(self) -> bool:
        return not (self.compute or self.moves or self.weights)


def moves_of(plan: PlanRecord, *kinds: str) -> tuple[Move, ...]:
    """The reshards among the lines of these kinds. Equal ones are counted together; the most expensive come first."""
    by_key: dict[Hashable, Move] = {}
    for line in plan.lines:
        if line.kind in kinds and line.steps:
            _add_move(by_key, move(plan, line))
    return tuple(sorted(by_key.values(), key=lambda m: -m.seconds))


def move(plan: PlanRecord, line: PlanLine) -> Move:
    """The reshard of one line."""
    wires = [step for step in line.steps if step.communicates] or list(line.steps)
    what = " + ".join(
        f"{kind} {' then '.join(_axes(plan, step) for step in steps)}"
        for kind, steps in itertools.groupby(wires, key=lambda step: step.kind)
    )
    source, target = parse_placements(line.steps[0].source), parse_placements(line.steps[-1].target)
    return Move(what, way(source, target), sum(step.bytes for step in line.steps), line.kind, line.times, line.seconds)


def _axes(plan: PlanRecord, step: ReshardStep) -> str:
    return ",".join(plan.axis_names[axis] for axis in step.axes)


def way(source: Placements, target: Placements) -> str:
    """``P → S(1)`` if all axes that change do so alike, otherwise both placements in full. ``P`` means ``P(sum)``."""
    changes = {(short(a), short(b)) for a, b in zip(source, target, strict=True) if a != b}
    if len(changes) == 1:
        ((before, after),) = changes
    else:
        before, after = short(source), short(target)
    return f"{before} → {after}".replace("P(sum)", "P")


def readable(places: Placements) -> str:
    """Placements in short form, ``P`` for ``P(sum)``."""
    return short(places).replace("P(sum)", "P")


def optimizer_text(place: ParameterPlacement) -> str:
    """How optimizer state is placed, and in which memory."""
    return short(place.optimizer) + (f" {IN_TIER[place.offload]}" if place.offload else "")


def _add_move(moves: dict[Hashable, Move], added: Move) -> None:
    equal = moves.get(added.key)
    moves[added.key] = (
        added
        if equal is None
        else replace(equal, count=equal.count + added.count, seconds=equal.seconds + added.seconds)
    )


def module_rows(plan: PlanRecord) -> tuple[ModuleRow, ...]:
    """The top rows of the tree. What belongs to no submodule is the last row."""
    root = _gather(plan)
    rows = [row for name, child in root.children.items() for row in _rows(plan, child, name, name)]
    if not root.is_empty:
        itself = replace(_row(plan, root, "", ""), children=())
        own = _Module(root.compute, root.held, root.moves, root.weights)
        name = plan.model.split(",")[0].split()[0] if plan.model.split(",")[0].split() else "model"
        rows.append(replace(_row(plan, own, f"({name} itself)", ""), weight=itself.weight))
    return tuple(rows)


def _gather(plan: PlanRecord) -> _Module:
    root = _Module()

    def at(path: str) -> _Module:
        module = root
        for part in filter(None, path.split(".")):
            module = module.children.setdefault(part, _Module())
        return module

    for line in plan.lines:
        if line.kind == "compute":
            computing = at(line.module)
            computing.compute += line.seconds
            computing.stages.add(line.stage)
        elif line.kind in MOVES:
            _add_move(at(line.module).moves, move(plan, line))
    sizes = {holding.name: holding.bytes for holding in plan.holdings if holding.kind == "weight"}
    for path, place in plan.parameters.items():
        module, _, name = path.rpartition(".")
        at(module).weights[name] = (readable(place.weight), sizes.get(plan.parameter_nodes.get(path, ""), 0))
    for holding in plan.holdings:
        at(holding.module).held += holding.bytes
    return root


def _rows(plan: PlanRecord, module: _Module, label: str, path: str) -> Iterator[ModuleRow]:
    """The rows of a module: one row or, if it is only a container of numbered modules, those of its elements, with
    equal ones folded.
    """
    numbered = bool(module.children) and all(name.isdigit() for name in module.children)
    if module.is_empty and numbered:
        elements = {name: _rows_of_element(plan, child, f"{path}.{name}") for name, child in module.children.items()}
        yield from _folded(label, elements)
    elif module.is_empty and len(module.children) == 1:
        ((name, child),) = module.children.items()
        yield from _rows(plan, child, f"{label}.{name}", f"{path}.{name}")
    else:
        yield _row(plan, module, label, path)


def _rows_of_element(plan: PlanRecord, module: _Module, path: str) -> ModuleRow:
    return _row(plan, module, path.rpartition(".")[2], path)


def _row(plan: PlanRecord, module: _Module, label: str, path: str) -> ModuleRow:
    children = tuple(
        row
        for name, child in module.children.items()
        for row in _rows(plan, child, name, f"{path}.{name}" if path else name)
    )
    weight, output = _weight(module.weights), plan.outputs.get(path)
    moves = tuple(sorted(module.moves.values(), key=lambda m: -m.seconds))
    types = tuple(
        plan.nodes[node].type
        for name in module.weights
        if (node := plan.parameter_nodes.get(f"{path}.{name}" if path else name)) is not None
    )
    return ModuleRow(
        label=label,
        paths=(path,),
        weight=weight,
        output=readable(output) if output is not None else "",
        compute=module.compute + sum(row.compute * row.count for row in children),
        comm=sum(m.seconds for m in moves) + sum(row.comm * row.count for row in children),
        held=module.held + sum(row.held * row.count for row in children),
        moves=moves,
        children=children,
        kind=(types, tuple((row.label, row.kind) for row in children)),
        stages=frozenset(module.stages).union(*(row.stages for row in children)),
    )


def _weight(weights: Mapping[str, tuple[str, int]]) -> str:
    """The placement of the module's weight, or of its largest parameter; ``+`` if others have other placements."""
    if not weights:
        return ""
    name = "weight" if "weight" in weights else max(weights, key=lambda n: weights[n][1])
    others = {place for place, _ in weights.values()} - {weights[name][0]}
    return weights[name][0] + ("+" if others else "")


def _folded(label: str, elements: Mapping[str, ModuleRow]) -> Iterator[ModuleRow]:
    by_choice = _grouped(elements, _choices)
    groups = by_choice if len(by_choice) <= KINDS else _grouped(elements, lambda row: row.kind)
    for names in groups:
        yield _merged([elements[name] for name in names], f"{label}.{numbers(names)}")


def _grouped(elements: Mapping[str, ModuleRow], key: Callable[[ModuleRow], Hashable]) -> list[list[str]]:
    groups: defaultdict[Hashable, list[str]] = defaultdict(list)
    for name, row in elements.items():
        groups[key(row)].append(name)
    return list(groups.values())


def _choices(row: ModuleRow) -> Hashable:
    """What must be equal for two layers to read alike."""
    moves = tuple(sorted((m.key, m.count) for m in row.moves))
    return row.kind, row.weight, row.output, moves, tuple(map(_choices, row.children))


def numbers(names: list[str]) -> str:
    """``{0..3,7}`` for layer numbers, ``5`` for one alone."""
    if len(names) == 1:
        return names[0]
    ordered = sorted(map(int, names))
    runs: list[list[int]] = []
    for number in ordered:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [str(r[0]) if len(r) == 1 else f"{r[0]},{r[1]}" if len(r) == 2 else f"{r[0]}..{r[-1]}" for r in runs]
    return f"{{{','.join(parts)}}}"


def _merged(rows: list[ModuleRow], label: str) -> ModuleRow:
    """Merges the rows of equal layers into one, whose figures are the average of one layer."""
    first, count = rows[0], len(rows)
    if count == 1:
        return replace(first, label=label)
    moves: dict[Hashable, Move] = {}
    for row in rows:
        for reshard in row.moves:
            _add_move(moves, reshard)
    children = zip(*(row.children for row in rows), strict=True)
    return replace(
        first,
        label=label,
        paths=tuple(path for row in rows for path in row.paths),
        weight=_joined(row.weight for row in rows),
        output=_joined(row.output for row in rows),
        compute=sum(row.compute for row in rows) / count,
        comm=sum(row.comm for row in rows) / count,
        held=sum(row.held for row in rows) / count,
        moves=tuple(replace(m, count=m.count / count, seconds=m.seconds / count) for m in moves.values()),
        children=tuple(_below(list(same), count) for same in children),
        stages=frozenset().union(*(row.stages for row in rows)),
    )


def _below(rows: list[ModuleRow], layers: int) -> ModuleRow:
    """Merges the same row of each of ``layers`` equal layers. Its ``paths`` stay those of one layer, because ``count``
    is per layer.
    """
    merged = _merged(rows, rows[0].label)
    return merged if layers == 1 else replace(merged, paths=rows[0].paths)


def _joined(texts: Iterator[str]) -> str:
    distinct = list(dict.fromkeys(texts))
    return distinct[0] if len(distinct) == 1 else f"{distinct[0]}…"
