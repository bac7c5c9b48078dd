"""Whether rows that pad a batch leave the results of the other rows unchanged.

The proof is that of microbatches, with as many microbatches as the batch has rows: the graph of one row computes that
row of every output from that row of the inputs, parameters, and what is the same for all rows. Three conditions extend
it to any number of rows: nothing is computed from the whole batch beforehand, no operation uses the batch size for
anything but the shape of its result, and no tensor of the batch's size is used whole. Gradients follow: rows that do
not enter a loss have a gradient of zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import sympy
import torch

from autopar.errors import AutoparError, OptionsError
from autopar.ir.graph import Graph
from autopar.ir.node import Arg, Node, Value, map_arg
from autopar.ops.random import DRAWS
from autopar.passes.pipeline.microbatch import Microbatched, microbatch
from autopar.runtime.comm.groups import AxisGroup

from .rank_zero import on_first_rank

_ADVICE = 'Options(last_batch="replicate") makes a program for a smaller batch instead, which is exact for every model'
# Operations that take the shape of their result, and the position of that argument. Group norm takes how many samples
# there are: each has statistics of its own.
_SHAPED = {
    **{f"aten.{name}.default": 1 for name in ("view", "_unsafe_view", "reshape", "expand", "new_zeros", "new_ones")},
    **{f"aten.{name}.default": 0 for name in ("full", "zeros", "ones", "empty")},
    "aten.empty.memory_format": 0,
    "aten.new_full.default": 1,
    "aten.native_group_norm.default": 3,
}


@dataclass(frozen=True)
class PaddedRows:
    """How to run a program for ``batch`` rows, made from the symbolic ``graph``, on fewer rows. ``guards`` says whether
    the trace holds for a number of rows."""

    graph: Graph
    batch: int
    guards: Callable[[int], bool]
    ranks: AxisGroup
    _proven: dict[str, int | None] = field(default_factory=dict)

    def holds_for(self, rows: int) -> bool:
        """Whether a batch of ``rows`` may be padded. Not a batch of one: many models treat it differently
        (``squeeze``), and a trace does not show it."""
        return 2 <= rows < self.batch and bool(self.graph.symbols) and self.guards(rows)

    @cached_property
    def inputs(self) -> dict[str, tuple[tuple[int, ...], torch.dtype, bool]]:
        """The shape and dtype of each input, and whether its dim 0 counts rows."""
        planned = {node.target: node.type for node in self._at(self.graph).placeholders("input")}
        return {
            node.target: (
                tuple(map(int, planned[node.target].shape)),
                node.type.dtype,
                bool(node.type.rank) and not isinstance(node.type.shape[0], int),
            )
            for node in self.graph.placeholders("input")
        }

    def outputs(self, named: Callable[[str], str]) -> Mapping[str, int | None]:
        """The dim of each output that counts rows, None for an output without rows. Collective until it first returns.
        Raises :class:`AutoparError`, on every rank, naming what mixes rows (outputs as ``named``)."""
        if not self._proven:
            self._proven.update(on_first_rank(self.ranks, lambda: self._prove(named)))
        return self._proven

    def _prove(self, named: Callable[[str], str]) -> dict[str, int | None]:
        outputs = tuple(output for output in self.graph.outputs if output.kind in ("output", "mutation"))
        graph = replace(self.graph, outputs=outputs).without_dead()
        divided = {name: 0 if rows else None for name, (_, _, rows) in self.inputs.items()}
        concrete = self._at(graph)
        try:
            by_row = microbatch(concrete, self.batch, divided)
        except OptionsError as error:
            raise _refusal(str(error).partition(": ")[2].partition("; use ")[0]) from error
        places = dict(_places(by_row, named))
        _check_whole(graph, concrete, by_row)
        _check_sizes(graph)
        return places

    def _at(self, graph: Graph) -> Graph:
        return graph.at(**{name: self.batch for name, _ in graph.symbols})


def _refusal(reason: str) -> AutoparError:
    return AutoparError(f'last_batch="pad" would change the numbers of this model: {reason}. {_ADVICE}')


def _name(node: Node) -> str:
    return f"{node.op} (%{node.name}{f', in {node.module}' if node.module else ''})"


def _is_symbolic(size: object) -> bool:
    return isinstance(size, sympy.Expr) and bool(size.free_symbols)


def _symbolic(arg: Arg) -> bool:
    leaves: list[Arg] = []

    def look(leaf: Arg) -> Arg:
        leaves.append(leaf)
        return leaf

    map_arg(arg, look)
    return any(_is_symbolic(leaf) for leaf in leaves)


def _check_sizes(graph: Graph) -> None:
    """Checks that the size of the batch is used for shapes alone. Draws count their elements sample by sample
    (:mod:`autopar.ops.random`), if they know which dim counts samples."""
    for node in graph:
        if node.is_placeholder:
            continue
        if node.op in DRAWS:
            if _symbolic(node.args) and not _counts_samples(node):
                raise _refusal(f"the numbers that {_name(node)} draws for a row depend on how many rows there are")
            continue
        shape = _SHAPED.get(node.op)
        others = tuple(arg for place, arg in enumerate(node.args) if place != shape)
        if _symbolic(others) or any(_symbolic(arg) for _, arg in node.kwargs):
            raise _refusal(f"{_name(node)} computes with the size of the batch")


def _counts_samples(node: Node) -> bool:
    samples = dict(node.kwargs).get("samples") or next(
        (arg for arg in reversed(node.args) if _is_pair(arg) and not _symbolic(arg[:1])), ()
    )
    return _is_pair(samples) and not _symbolic(samples)


def _is_pair(arg: Arg) -> bool:
    return isinstance(arg, tuple) and not isinstance(arg, Value) and len(arg) == 2


def _check_whole(graph: Graph, concrete: Graph, by_row: Microbatched) -> None:
    """Checks that nothing is computed from the whole batch."""
    if by_row.prelude is not None:
        names = ", ".join(output.name.removeprefix("prelude.") for output in by_row.prelude.outputs)
        raise _refusal(f"%{names} is computed from all rows together")
    symbolic = {node.name: node for node in graph}
    for node in by_row.graph:
        original = symbolic.get(node.name)
        if original is None or original.is_placeholder:
            continue
        for kind, here, whole in zip(original.types, node.types, concrete[node.name].types, strict=True):
            if kind is not None and any(map(_is_symbolic, kind.shape)) and here == whole:
                raise _refusal(f"{_name(node)} has the size of the batch and is used whole")


def _places(by_row: Microbatched, named: Callable[[str], str]) -> Iterator[tuple[str, int | None]]:
    for (kind, name), how in by_row.combine.items():
        if how == "sum":
            result = f"output {named(name)}" if kind == "output" else f"buffer {name}"
            raise _refusal(f"the {result} is computed from all rows together, as a loss is")
        if kind == "mutation" and how != "same":
            raise _refusal(f"the buffer {name} stores something of every row")
        if kind == "output":
            yield name, None if how == "same" else int(how.partition(":")[2])
