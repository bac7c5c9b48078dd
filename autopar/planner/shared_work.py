"""What the candidates of one search have in common, so that it is computed once for all of them.

Layouts of the devices often differ in what an axis is for, in the schedule or in the memory limit, and not in the graph
of a microbatch or in the mesh inside a stage. Then annotated graphs, prices and places to cut are the same objects.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from autopar.ir.graph import Graph

Result = TypeVar("Result")
# Results of each kind that are kept, those used last. Chosen: a graph of a hundred layers takes some 50 MB.
KEPT = 6
# Of small graphs more are kept: of so many operations together.
# Chosen: a few of a Llama of 32 layers, and whatever plans of a toy under other limits of memory have in common.
KEPT_NODES = 12_000


class SharedWork:
    """Results of pure functions of large objects, which are told apart by identity, and of small ones.

    >>> work, graph = SharedWork(), ["a graph"]
    >>> work.once("length", (graph,), 3, make=lambda: len(graph))
    1
    >>> graph.append("which should not change")
    >>> work.once("length", (graph,), 3, make=lambda: len(graph))
    1
    """

    def __init__(self) -> None:
        self._kinds: dict[str, OrderedDict[Hashable, tuple[tuple[object, ...], Any]]] = {}

    def once(
        self, kind: str, of: tuple[object, ...], *settings: Hashable, make: Callable[[], Result], kept: int = KEPT
    ) -> Result:
        """The result of ``make``, which depends on the objects ``of`` and on ``settings`` alone."""
        results = self._kinds.setdefault(kind, OrderedDict())
        key = (*map(id, of), *settings)
        if key not in results:
            # With the objects, so that no others get their identities.
            results[key] = of, make()
        results.move_to_end(key)
        most = max(kept, KEPT_NODES // size) if (size := _size(of)) else kept
        while len(results) > most:
            results.popitem(last=False)
        found: Result = results[key][1]
        return found


def _size(of: tuple[object, ...]) -> int:
    """The operations of the largest graph among some objects, or that they are of; 0 if there is none."""
    graphs = (getattr(each, "graph", each) for each in of)
    return max((len(graph) for graph in graphs if isinstance(graph, Graph)), default=0)
