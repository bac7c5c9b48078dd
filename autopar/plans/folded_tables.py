"""The tables of a plan's JSON that grow with the depth of a model, folded: what equal layers share is written once.

A row of ``nodes`` refers to operands and to the node it is tied to by how many rows these stand before it, so that
corresponding nodes of equal layers have equal rows but for their module. What an operation is, and what a line costs,
are in tables of their own::

    "nodes": {"kinds": [["aten.mm.default", "f32[8, 4]"]], "modules": ["layers.0.up", "layers.1.up"],
              "rows": {"mm": [0, 0, [1, 2], ""], "mm_1": [0, 1, [1, 2], 9]}},
    "lines": {"kinds": [["compute", "forward", 1e-05, [], 1, 0]], "rows": [[0, "mm"], [0, "mm_1"]]}

Invariant: :func:`unfolded` of :func:`folded` is what was folded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Table = dict[str, Any]


def folded(data: Mapping[str, Any]) -> Table:
    """The plan's data with folded ``nodes`` and ``lines``."""
    return {**data, "nodes": _folded_nodes(data["nodes"]), "lines": _folded_lines(data["lines"], data["nodes"])}


def unfolded(data: Mapping[str, Any]) -> Table:
    """The plan's data as it was before it was folded. Raises ``KeyError``, ``IndexError``, ``TypeError`` or
    ``ValueError`` for tables that were not."""
    nodes = _unfolded_nodes(data["nodes"])
    return {**data, "nodes": nodes, "lines": _unfolded_lines(data["lines"], nodes)}


class _Numbers:
    """Numbers things in the order in which they are first met."""

    def __init__(self) -> None:
        self.things: list[Any] = []
        self._numbers: dict[str, int] = {}

    def of(self, thing: Any) -> int:
        """The number of a thing, which is equal for things of equal text."""
        number = self._numbers.setdefault(json.dumps(thing), len(self.things))
        if number == len(self.things):
            self.things.append(thing)
        return number


def _folded_nodes(nodes: Mapping[str, Sequence[Any]]) -> Table:
    places = {name: place for place, name in enumerate(nodes)}
    kinds, modules = _Numbers(), _Numbers()

    def before(place: int, name: str) -> int | str:
        """How far the node ``name`` stands before ``place``; its name, if it does not."""
        distance = place - places.get(name, place)
        return distance if distance > 0 else name

    rows: Table = {}
    for name, (op, kind, module, target, operands, tied) in nodes.items():
        place = places[name]
        row = [kinds.of([op, kind]), modules.of(module), [before(place, each) for each in operands]]
        rows[name] = [*row, before(place, tied) if tied else "", *([target] if target else [])]
    return {"kinds": kinds.things, "modules": modules.things, "rows": rows}


def _unfolded_nodes(table: Mapping[str, Any]) -> Table:
    kinds, modules, rows = table["kinds"], table["modules"], table["rows"]
    names = list(rows)

    def named(place: int, each: Any) -> Any:
        if not isinstance(each, int):
            return each
        if not 0 < each <= place:
            raise ValueError(f"the node {names[place]!r} refers to a node {each} rows before it")
        return names[place - each]

    nodes: Table = {}
    for place, (name, (kind, module, operands, tied, *target)) in enumerate(rows.items()):
        op, text = _entry(kinds, kind)
        taken = [named(place, each) for each in operands]
        nodes[name] = [op, text, _entry(modules, module), target[0] if target else "", taken, named(place, tied)]
    return nodes


def _folded_lines(lines: Sequence[Sequence[Any]], nodes: Mapping[str, Sequence[Any]]) -> Table:
    kinds, rows = _Numbers(), list[list[Any]]()
    for kind, name, module, phase, seconds, steps, times, stage in lines:
        is_known = name in nodes and nodes[name][2] == module
        rows.append([kinds.of([kind, phase, seconds, steps, times, stage]), name, *([] if is_known else [module])])
    return {"kinds": kinds.things, "rows": rows}


def _unfolded_lines(table: Mapping[str, Any], nodes: Mapping[str, Sequence[Any]]) -> list[list[Any]]:
    lines: list[list[Any]] = []
    for number, name, *module in table["rows"]:
        kind, phase, seconds, steps, times, stage = _entry(table["kinds"], number)
        lines.append([kind, name, module[0] if module else nodes[name][2], phase, seconds, steps, times, stage])
    return lines


def _entry(table: Sequence[Any], number: Any) -> Any:
    if not isinstance(number, int) or not 0 <= number < len(table):
        raise ValueError(f"{number!r} is no number of an entry, of which there are {len(table)}")
    return table[number]
