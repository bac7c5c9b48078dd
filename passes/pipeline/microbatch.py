"""Derives the graph of one microbatch from the graph of a whole batch.

Microbatches are a mesh axis in time instead of space: microbatch ``k`` corresponds to device ``k``, and the rules of
operations (:mod:`autopar.passes.rule_language.registry`) say how results combine. A value that is divided among
microbatches is ``Shard``, one to which each microbatch adds a part is ``Partial(sum)``, and one that is the same for
all is ``Replicate``. The local forms of all operations for microbatch 0 are the graph of every microbatch, since forms
that depend on the microbatch are never chosen.

Microbatches exchange nothing. So a value that needs the whole batch must depend on inputs, buffers and constants alone,
such as the number of valid tokens: the ``prelude`` computes it once a step for the whole batch. Anything else (the
statistics of batch norm) is an error, unless microbatches may be batches of their own (:mod:`.own_statistics`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from autopar.errors import OptionsError
from autopar.ir.graph import Graph
from autopar.ir.node import Node, Output, Value

from .coupled_samples import CoupledError
from .microbatch_walk import Walk
from .own_statistics import LAST, own_graph

Combine = str


@dataclass(frozen=True)
class Microbatched:
    """The graph of one microbatch, and how several make up a step.

    Attributes:
        graph: computes one of ``count`` microbatches. It draws its part of the whole batch's random numbers if element
            3 of its ``random`` placeholder is the microbatch's number k (see :mod:`autopar.ops.random`). Every
            microbatch reads buffers as they were before the step, unless it has ``own_statistics``.
        inputs: for each input, including those from the prelude, the dim along which microbatch k takes piece k of
            ``count`` equal pieces, or None if it takes the whole input.
        combine: how the results of all microbatches, by ``(kind, name)`` of the output, become that of the step:
            ``concatenate:<dim>``, ``sum``, or ``same`` (each has the whole result). Gradients of parameters are always
            summed.
        prelude: computes, on the whole batch, the outputs whose names are the targets of further inputs of ``graph``;
            element 3 of its random state is 0.
        own_statistics: whether the graph is that of a batch of its own (:mod:`.own_statistics`): it reads buffers as
            the microbatch before left them, and ``combine`` of mutations is ``last``.
    """

    graph: Graph
    count: int
    inputs: Mapping[str, int | None]
    combine: Mapping[tuple[str, str], Combine] = field(default_factory=dict)
    prelude: Graph | None = None
    own_statistics: bool = False


def split_inputs(graph: Graph) -> dict[str, int | None]:
    """The dim along which each input is divided: dim 0 if it is the batch. A symbolic graph says which it is; in a
    concrete one the batch is the size of dim 0 that most inputs share."""
    inputs = [node for node in graph.inputs if node.type.rank]
    dims: dict[str, int | None] = {node.target: None for node in graph.inputs}
    sizes = [node.type.shape[0] for node in inputs]
    if graph.symbols:
        return dims | {n.target: 0 for n in inputs if not isinstance(n.type.shape[0], int)}
    if not sizes:
        return dims
    batch = max(sizes, key=sizes.count)
    return dims | {n.target: 0 for n in inputs if n.type.shape[0] == batch}


def check_count(graph: Graph, count: int, inputs: Mapping[str, int | None]) -> None:
    """Raises :class:`OptionsError`, naming the counts that work, unless the batch divides into ``count`` pieces."""
    sizes = {int(node.type.shape[dim]) for node in graph.inputs if (dim := inputs.get(node.target)) is not None}
    if not sizes:
        raise OptionsError(f"microbatches={count}: no input has a batch dim to divide; use microbatches=1")
    works = [n for n in range(1, min(sizes) + 1) if all(size % n == 0 for size in sizes)]
    if count not in works:
        batch = " and ".join(map(str, sorted(sizes)))
        raise OptionsError(
            f"a batch of {batch} does not divide into {count} microbatches; microbatches="
            f"{', '.join(map(str, works))} {'do' if len(works) > 1 else 'does'}"
        )


def microbatch(
    graph: Graph,
    count: int,
    inputs: Mapping[str, int | None] | None = None,
    alone: Callable[[], Graph] | None = None,
) -> Microbatched:
    """Converts ``graph``, concrete and without saved activations, to one of ``count`` microbatches; with ``count`` 1 it
    stays unchanged.

    ``inputs``: how inputs are divided; default :func:`split_inputs`. ``alone``: makes the graph of a batch of the size
    of a microbatch, if microbatches may have statistics of their own where samples are coupled. Raises
    :class:`OptionsError` if the batch does not divide into ``count``, or if an operation couples the samples of a
    batch, naming it, and there is no ``alone``.
    """
    inputs = split_inputs(graph) if inputs is None else inputs
    if count == 1:
        return Microbatched(graph, 1, inputs, {(o.kind, o.name): "same" for o in graph.outputs})
    check_count(graph, count, inputs)
    try:
        return _divided(Walk(graph, count, inputs))
    except CoupledError:
        if alone is None:
            raise
    own = own_graph(alone(), count)
    combine: dict[tuple[str, str], Combine] = {
        (o.kind, o.name): LAST if o.kind == "mutation" else "sum" for o in own.outputs
    }
    return Microbatched(own, count, inputs, combine, own_statistics=True)


def _divided(walk: Walk) -> Microbatched:
    """The graph of a microbatch by a walk over that of the batch. Raises :class:`CoupledError`."""
    graph, count, inputs = walk.graph, walk.count, walk.inputs
    walk.run()
    outputs: list[Output] = []
    combine: dict[tuple[str, str], Combine] = {}
    for output in graph.outputs:
        value, how = (None, "same") if output.value is None else walk.result(output)
        outputs.append(Output(output.kind, output.name, value))
        combine[output.kind, output.name] = how
    piece = _tidy(Graph((*walk.placeholders, *walk.nodes), tuple(outputs), (), graph.constants), walk.from_prelude)
    arriving = [node.target for node in piece.placeholders("input")]
    from_prelude = {target: walk.from_prelude[target] for target in arriving if target in walk.from_prelude}
    divided = dict(inputs) | {target: dim for target, (_, dim) in from_prelude.items()}
    values = {target: value for target, (value, _) in from_prelude.items()}
    return Microbatched(piece, count, divided, combine, _prelude(graph, values))


def _tidy(graph: Graph, from_prelude: Collection[str]) -> Graph:
    """The graph without dead operations, and without unused constants and inputs from the prelude."""
    alive = graph.without_dead()
    used = alive.needed_for(alive.output_values)
    nodes = tuple(n for n in alive if n.name in used or (n.is_placeholder and not _optional(n, from_prelude)))
    constants = {name: tensor for name, tensor in graph.constants.items() if name in used}
    return Graph(nodes, alive.outputs, (), constants).verify()


def _optional(node: Node, from_prelude: Collection[str]) -> bool:
    return node.op in ("constant", "random") or (node.op == "input" and node.target in from_prelude)


def _prelude(graph: Graph, values: Mapping[str, Value]) -> Graph | None:
    if not values:
        return None
    needed = graph.needed_for(values.values())
    nodes = tuple(Node(n.name, n.op, n.args, n.kwargs, n.types, n.module, n.source) for n in graph if n.name in needed)
    outputs = tuple(Output("output", name, value) for name, value in values.items())
    constants = {name: tensor for name, tensor in graph.constants.items() if name in needed}
    return Graph(nodes, outputs, (), constants).verify()
