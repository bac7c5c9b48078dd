"""Arithmetic of torch's symbolic sizes, every distinct operation once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

# Whether operations on sizes are recorded in a graph at the moment (2.13).
from torch.fx.experimental.proxy_tensor import get_proxy_mode

# The implementation of symbolic sizes (2.13).
from torch.fx.experimental.sym_node import SymNode

# Those whose result follows from both expressions. That of ``mod`` also depends on what is known of their ranges.
_OPERATIONS = ("add", "sub", "mul", "eq", "ne", "lt", "le", "gt", "ge")

_Operation = Callable[[SymNode, SymNode], SymNode]


@contextmanager
def remembered_arithmetic() -> Iterator[None]:
    """Computes sums, differences, products and comparisons of sizes once each, and where they are recorded in a graph,
    once for each tracer. Torch computes the storage of every fake tensor from its sizes and strides: of a Llama of 32
    layers that were 28,000 operations, of which 300 differ, in a fifth of the seconds of its trace. Relies on the
    methods ``_add`` and the like of ``SymNode``, on its fields, and on the ``tracer`` of the mode that records, its
    ``enable_thunkify`` and the ``_graph_namespace`` of its graph (2.11 to 2.15)."""
    known: dict[Hashable, SymNode] = {}
    with ExitStack() as stack:
        for name in _OPERATIONS:
            method = f"_{name}"
            stack.enter_context(patch.object(SymNode, method, _remembered(name, getattr(SymNode, method), known)))
        yield


def _remembered(name: str, compute: _Operation, known: dict[Hashable, SymNode]) -> _Operation:
    """``compute``, with results in ``known``."""
    recorded: dict[Hashable, tuple[SymNode, bool]] = {}

    def computed(left: SymNode, right: SymNode) -> SymNode:
        key, mode = (*_described(left), *_described(right)), get_proxy_mode()
        if mode is None:
            result = known.get((name, *key))
            if result is None:
                result = known[name, *key] = compute(left, right)
            return _copied(result)
        return _recorded_once(mode.tracer, name, key, recorded, partial(compute, left, right))

    return computed


def _recorded_once(
    tracer: Any,
    name: str,
    key: tuple[Hashable, ...],
    recorded: dict[Hashable, tuple[SymNode, bool]],
    compute: Callable[[], SymNode],
) -> SymNode:
    """The result of an operation that ``tracer`` records in its graph when it is first computed: the same object each
    time, by which the tracer finds what it recorded. Each time takes up a name, as if it were recorded again: those of
    other operations, which plans refer to, do not depend on how often that is."""
    key = tracer, tracer.enable_thunkify, *key
    if key not in recorded:
        before = len(tracer.graph.nodes)
        recorded[key] = compute(), len(tracer.graph.nodes) > before
    elif recorded[key][1]:
        tracer.graph._graph_namespace.create_name(name, None)
    return recorded[key][0]


def _described(node: SymNode) -> tuple[Hashable, ...]:
    """What a result depends on. In ``expr``, symbols are replaced by what they were found to equal so far."""
    expression = node.expr if node.constant is None else node._expr  # Of a number there is nothing to replace.
    return expression, node._hint, node.pytype, node._optimized_summation, node.shape_env


def _copied(node: SymNode) -> SymNode:
    """Another of the same value, since a tracer tells sizes apart by identity."""
    copied = object.__new__(SymNode)
    copied.__dict__.update(node.__dict__)
    return copied
