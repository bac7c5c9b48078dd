"""The tables of a plan's JSON that grow with the depth of a model, folded: what equal layers share is written once.

A row of ``nodes`` refers to operands and to the node it is tied to by how many rows these stand before it, so that
corresponding nodes of equal layers have equal rows but for their module. What an operation is, and what a line costs,
are in tables of their own::

    "nodes": {"kinds": [["aten.mm.default", "f32[8, 4]"]], "modules": ["layers.0.up", "layers.1.up"],
              "rows": {"mm": [0, 0, [1, 2], ""], "mm_1": [0, 1, [1, 2], 9]}},
    "lines": {"kinds": [["compute", "forward", 1e-05, [], 1, 0]], "rows": [[0, "mm"], [0, "mm_1"]]}

The actions of the ranks of a pipeline are folded by :mod:`.folded_runs`.

Invariant: :func:`unfolded` of :func:`folded` is what was folded.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autopar.errors import OptionsError

from . import entries, folded_runs
from .entries import entry, rows, shown, texts

Table = dict[str, Any]


def folded(data: Mapping[str, Any]) -> Table:
    """The plan's data with folded ``nodes``, ``lines`` and actions of the ``pipeline``."""
    nodes, lines = _folded_nodes(data["nodes"]), _folded_lines(data["lines"], data["nodes"])
    return {**data, "nodes": nodes, "lines": lines, "pipeline": _with_actions(data["pipeline"], folded_runs.folded)}


def unfolded(data: Mapping[str, Any]) -> Table:
    """The plan's data as it was before it was folded. Raises :class:`OptionsError` that names the table, and the row,
    that was not."""
    nodes = _unfolded_nodes(_tables("nodes", entry(data, "nodes"), ("kinds", "modules", "rows")))
    lines = _unfolded_lines(_tables("lines", entry(data, "lines"), _OF_LINES), nodes)
    pipeline = _with_actions(entry(data, "pipeline"), folded_runs.unfolded)
    return {**data, "nodes": nodes, "lines": lines, "pipeline": pipeline}


def _with_actions(pipeline: Any, change: Callable[[str], str]) -> Any:
    """A pipeline whose lists of actions are changed; as it is if it has none: then its reader says what is wrong."""
    schedule = pipeline.get("schedule") if isinstance(pipeline, Mapping) else None
    ranks = schedule.get("ranks") if isinstance(schedule, Mapping) else None
    if not isinstance(schedule, Mapping) or not isinstance(ranks, (list, tuple)):
        return pipeline
    changed = [change(rank) if isinstance(rank, str) else rank for rank in ranks]
    return {**pipeline, "schedule": {**schedule, "ranks": changed}}


_OF_LINES = ("kinds", "rows")


def _tables(name: str, table: Any, parts: Sequence[str]) -> Mapping[str, Any]:
    """The tables that the field ``name`` is folded into."""
    if not isinstance(table, Mapping):
        raise OptionsError(f"{name} is {shown(table)}, not a table of {', '.join(parts)}")
    for part in (*parts, *table):
        if part not in table or part not in parts:
            raise OptionsError(f"{name}.{part} is {'missing' if part in parts else 'not known'}")
    return table


class _Numbers:
    """Numbers things in the order in which they are first met."""

    def __init__(self) -> None:
        self.things: list[Any] = []
        self._numbers: dict[str, int] = {}

    def of(self, thing: Any) -> int:
        """The number of a thing, which is equal for things of equal text."""
        number = self._numbers.setdefault(repr(thing), len(self.things))
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
    kinds = rows("nodes.kinds", table["kinds"], "[operation, types]", _of_length(2))
    modules = texts("nodes.modules", table["modules"])
    names = list(table["rows"]) if isinstance(table["rows"], Mapping) else []
    place = itertools.count()

    def named(at: int, each: Any) -> Any:
        if not isinstance(each, int):
            return each
        if not 0 < each <= at:
            raise OptionsError(
                f"it refers to a node {each} rows before it, where there is none: the order of rows counts, and "
                "programs that sort names change it"
            )
        return names[at - each]

    def node(row: Any) -> list[Any]:
        at = next(place)
        kind, module, operands, tied, *target = row
        op, types = _entry(kinds, kind)
        taken = [named(at, each) for each in operands]
        return [op, types, _entry(modules, module), target[0] if target else "", taken, named(at, tied)]

    return entries.table("nodes.rows", table["rows"], "[kind, module, operands, tied to, target]", node)


def _folded_lines(lines: Sequence[Sequence[Any]], nodes: Mapping[str, Sequence[Any]]) -> Table:
    kinds, rows = _Numbers(), list[list[Any]]()
    for kind, name, module, phase, seconds, steps, times, stage in lines:
        is_known = name in nodes and nodes[name][2] == module
        rows.append([kinds.of([kind, phase, seconds, steps, times, stage]), name, *([] if is_known else [module])])
    return {"kinds": kinds.things, "rows": rows}


def _unfolded_lines(table: Mapping[str, Any], nodes: Mapping[str, Sequence[Any]]) -> list[list[Any]]:
    form = "[kind, phase, seconds, steps, times, stage]"
    kinds = rows("lines.kinds", table["kinds"], form, _of_length(6))

    def line(row: Any) -> list[Any]:
        number, name, *module = row
        kind, phase, seconds, steps, times, stage = _entry(kinds, number)
        if not module and name not in nodes:
            raise OptionsError(f"it names {name!r}, which nodes does not have")
        return [kind, name, module[0] if module else nodes[name][2], phase, seconds, steps, times, stage]

    return list(rows("lines.rows", table["rows"], "[kind, node, module]", line))


def _of_length(length: int) -> Callable[[Any], Any]:
    def checked(row: Any) -> Any:
        if not isinstance(row, (list, tuple)) or len(row) != length:
            raise ValueError
        return row

    return checked


def _entry(table: Sequence[Any], number: Any) -> Any:
    if not isinstance(number, int) or not 0 <= number < len(table):
        raise OptionsError(f"{shown(number)} is no number of an entry, of which there are {len(table)}")
    return table[number]
