"""The windows of a placement program: which of its groups compute, and which of its transfers are sent meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.node import SAVED_ACTIVATION
from autopar.solver.problem import Window

from .choices import OUTPUTS, ChoiceSets
from .edges import TensorEdge
from .overlap_windows import OverlapWindow, windows_of


def instance_windows(choice_sets: ChoiceSets, edges: Sequence[TensorEdge]) -> tuple[Window, ...]:
    """The windows of a step. Transfer i of the program is that of ``edges[i]``."""
    windows = windows_of(choice_sets.graph, choice_sets.prices.cluster, choice_sets.repeats)
    return tuple(_window(choice_sets, window, edges) for window in windows)


def _window(choice_sets: ChoiceSets, window: OverlapWindow, edges: Sequence[TensorEdge]) -> Window:
    """The window of the program. Costs of groups and gathers are those of all microbatches, so a window takes a part of
    them; reductions occur once. Of messages only what they leave of the processors counts."""
    part = window.times / choice_sets.repeats.microbatches
    computes = (i for i, name in enumerate(choice_sets.choices) if _computes(choice_sets, name, window.phase))
    gathers = (i for i, edge in enumerate(edges) if _gathers(choice_sets, edge, window.phase))
    reductions = (i for i, edge in enumerate(edges) if window.reduces and edge.role == "gradient")
    left = 1.0 - window.taken
    transfers = dict.fromkeys(gathers, left * part) | dict.fromkeys(reductions, left)
    return Window(window.name, dict.fromkeys(computes, part), transfers, window.hidden)


def _computes(choice_sets: ChoiceSets, name: str, phase: str) -> bool:
    if name == OUTPUTS:
        return False
    node = choice_sets.graph[name]
    return node.phase == phase and not node.is_placeholder and node.op != SAVED_ACTIVATION


def _gathers(choice_sets: ChoiceSets, edge: TensorEdge, phase: str) -> bool:
    return edge.role == phase and choice_sets.graph[edge.producer].op == "param"
