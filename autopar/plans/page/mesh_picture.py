"""Who holds what: for each way of placing parameters, the devices of the mesh, numbered and coloured by their share."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.field_text import in_sentence
from autopar.ir.placements import Placements, is_shard
from autopar.ir.plan_record import PlanRecord
from autopar.offload import IN_TIER
from autopar.plans.views.module_tree import optimizer_text, readable
from autopar.plans.views.stages import folded_modules, mesh_of_parameter

# Ways of placing that are shown, those of most bytes first. Chosen: a screen of pictures.
_MOST = 8
# Devices of a picture along each side. Chosen: what can be told apart.
_MOST_ROWS, _MOST_COLUMNS = 8, 16
# Units of a device's side. Chosen: three digits fit.
CELL = 26
# Colours that the style sheet has for shares; the next share has the first colour again.
_COLOURS = 6


@dataclass(frozen=True)
class Cell:
    """One device: its rank, and the number of its share, from 1 on."""

    x: int
    y: int
    rank: int
    share: int
    css: str


@dataclass(frozen=True)
class Grid:
    """The devices of a mesh (of one stage): ``placed`` says of which tensor, ``shares`` how many different there are;
    ``cut``: whether the mesh has more devices than are shown."""

    what: str
    placed: str
    shares: int
    width: int
    height: int
    cells: tuple[Cell, ...]
    cut: bool

    @property
    def about(self) -> str:
        if self.shares == 1:
            return f"{self.what} {self.placed}: every device holds the whole"
        return f"{self.what} {self.placed}: a device holds one of {self.shares} shares"


@dataclass(frozen=True)
class Way:
    """One way of placing parameters: how many there are, the largest of them, and a grid for what is placed
    differently: weights, gradients, optimizer state."""

    names: str
    count: int
    bytes: int
    grids: tuple[Grid, ...]


def mesh_pictures(plan: PlanRecord) -> tuple[Way, ...]:
    """The pictures of ``plan``'s parameters."""
    held = {name: sum(h.bytes for h in found) for name, found in plan.holdings_by_name.items()}
    groups: dict[tuple[str, str, str, tuple[int, ...]], list[str]] = {}
    for path, place in plan.parameters.items():
        mesh = mesh_of_parameter(plan, path)
        placed = (readable(place.weight), readable(place.gradient), optimizer_text(place), mesh)
        groups.setdefault(placed, []).append(path)

    def size_of(path: str) -> int:
        return held.get(plan.parameter_nodes.get(path, ""), 0)

    ways = []
    for (*_, mesh), paths in groups.items():
        largest = sorted(paths, key=size_of, reverse=True)
        place = plan.parameters[paths[0]]
        state = "optimizer state" + (f" {IN_TIER[place.offload]}" if place.offload else "")
        parts = {"weight": place.weight, "gradient": place.gradient, state: place.optimizer}
        grids = tuple(
            _grid(mesh, in_sentence([what for what, _ in same]), placements)
            for (placements, _), same in itertools.groupby(parts.items(), key=lambda part: (part[1], " in " in part[0]))
        )
        ways.append(Way(_names(largest), len(paths), sum(map(size_of, paths)), grids))
    return tuple(sorted(ways, key=lambda way: -way.bytes)[:_MOST])


def _names(paths: Sequence[str]) -> str:
    """The largest parameters, equal layers folded."""
    shown = folded_modules(paths).split(", ")
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")


def _grid(mesh: tuple[int, ...], what: str, placements: Placements) -> Grid:
    *outer, columns = mesh
    rows = math.prod(outer)
    shares: dict[tuple[int, ...], int] = {}
    cells = []
    for row, column in itertools.product(range(rows), range(columns)):
        at = (*_coordinates(row, outer), column)
        key = tuple(index for index, placed in zip(at, placements, strict=True) if is_shard(placed))
        share = shares.setdefault(key, len(shares) + 1)
        if row < _MOST_ROWS and column < _MOST_COLUMNS:
            css = "whole" if not any(map(is_shard, placements)) else f"s{(share - 1) % _COLOURS + 1}"
            cells.append(Cell(column * CELL, row * CELL, row * columns + column, share, css))
    return Grid(
        what,
        readable(placements),
        len(shares),
        min(columns, _MOST_COLUMNS) * CELL,
        min(rows, _MOST_ROWS) * CELL,
        tuple(cells),
        rows > _MOST_ROWS or columns > _MOST_COLUMNS,
    )


def _coordinates(index: int, sizes: Sequence[int]) -> tuple[int, ...]:
    found: list[int] = []
    for size in reversed(sizes):
        index, last = divmod(index, size)
        found.append(last)
    return tuple(reversed(found))
