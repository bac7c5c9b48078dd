"""Draws the tree of a plan's modules with rich, which is loaded when a tree is first drawn."""

from __future__ import annotations

import io

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from autopar.ir.plan_record import PlanRecord

from .module_tree import ModuleRow, Move, module_rows, numbers
from .page_width import page_width
from .quantities import duration, share, size
from .stages import fullest_stage, mesh_text

# Columns where no terminal says how many. Chosen: a tree indents, so it takes more than a table.
WIDTH = 120


def tree_text(plan: PlanRecord) -> str:
    """The tree as plain text."""
    console = Console(file=io.StringIO(), width=page_width(WIDTH), color_system=None, legacy_windows=False)
    console.print(drawn_tree(plan))
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def drawn_tree(plan: PlanRecord) -> Tree:
    """The tree in colour."""
    stages = (
        f"\nshares of the time of all {plan.stages} stages, memory of stage {fullest_stage(plan)}"
        if plan.stages > 1
        else ""
    )
    about = f"{plan.model}   mesh ({mesh_text(plan)}){stages}"
    tree = Tree(Text(about, no_wrap=True, overflow="ellipsis"))
    for row in module_rows(plan):
        _add(plan, tree, row, 1)
    return tree


def _add(plan: PlanRecord, tree: Tree, row: ModuleRow, times: int) -> None:
    branch = tree.add(_label(plan, row, times * row.count))
    for move in row.moves:
        branch.add(_move_label(move))
    for child in row.children:
        _add(plan, branch, child, times * row.count)


def _label(plan: PlanRecord, row: ModuleRow, times: int) -> Text:
    label = Text(no_wrap=True, overflow="ellipsis")
    label.append(row.label, style="bold")
    if row.count > 1:
        label.append(f" x{row.count}, each")
    for name, place in (("weight", row.weight), ("output", row.output)):
        if place:
            label.append(f"  {name} ", style="dim")
            label.append(place, style="cyan")
    if row.seconds:
        part = share(row.seconds * times, plan.predicted.step_seconds * plan.stages)
        label.append(f"  {duration(row.seconds)} ({part}{' in all' if times > 1 else ''})", style="green")
    if row.stages and plan.stages > 1:
        named = numbers([str(stage) for stage in row.stages])
        label.append(f"  stage{'s' if len(row.stages) > 1 else ''} {named}", style="blue")
    if row.held:
        label.append(f"  {size(row.held)}", style="magenta")
    return label


def _move_label(move: Move) -> Text:
    amount = f"{size(move.bytes)} x{move.count:.3g}" if move.bytes else f"local x{move.count:.3g}"
    return Text(f"↳ {move.what}  {move.way}  {amount}  {duration(move.seconds)}", style="yellow", no_wrap=True)
