"""Compares the graph of a model whose equal layers were captured once with that captured layer by layer."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import nn

from autopar.ir.graph import Graph
from autopar.ir.node import Node, Value, map_arg
from autopar.passes.normalise.standard import normalise
from autopar.trace.guards.reads import Reads
from autopar.trace.tracer import ModuleTracker, Request, capture, convert, describe_call, model_state, unchanged

Batch = tuple[Any, ...] | Mapping[str, Any]
ADD = "aten.add.Tensor"


def request_for(model: nn.Module, batch: Batch, *, grad: bool = True, differentiate: Any = "loss") -> Request:
    args, kwargs = (batch, {}) if isinstance(batch, tuple) else ((), batch)
    call = describe_call(tuple(args), kwargs)
    device = torch.device("cpu")
    return Request(
        model, model_state(model), call, device, None, model.training, grad, differentiate, Reads(model, None)
    )


def captured(request: Request, *, outlined: bool, symbolic: bool = True) -> tuple[Graph, int]:
    """The normalised graph, and how many calls were taken out of line."""
    with unchanged(request.model):
        found = capture(request, ModuleTracker(request.model), symbolic=symbolic, outlined=outlined)
        graph = convert(found, request)
    return normalise(graph), len(found.bodies.outlined.sites) if found.bodies else 0


def runs_of(request: Request) -> tuple[list[int], int]:
    """How many calls each run has, and how many nodes the graph of the whole program has."""
    with unchanged(request.model):
        found = capture(request, ModuleTracker(request.model), symbolic=True, outlined=True)
    assert found.bodies is not None
    return [len(run.sites) for run in found.bodies.outlined.runs], len(found.graph_module.graph.nodes)


def meanings(graph: Graph) -> dict[Hashable, int]:
    """What every output is computed by, down to parameters and inputs: a number, equal for equal computations, in
    equal modules, of graphs described one after the other. Sums of several values (gradients of a value that is used
    more than once) are those of their terms, in any order."""
    numbers: dict[str, int] = {}
    terms: dict[str, tuple[int, ...]] = {}

    def leaf(arg: Any) -> Hashable:
        return (numbers[arg.node], arg.index) if isinstance(arg, Value) else repr(arg)

    for node in graph.nodes:
        description: Hashable
        if node.op == "constant":
            constant = graph.constants[node.name]
            description = (
                "constant",
                constant.shape,
                "meta" if constant.is_meta else tuple(constant.flatten().tolist()),
            )
        elif is_sum(node):
            parts = [t for v in node.operands for t in terms.get(v.node, (KNOWN.setdefault(leaf(v), len(KNOWN)),))]
            terms[node.name] = tuple(sorted(parts))
            description = ("sum", terms[node.name])
        else:
            kwargs = tuple((key, map_arg(arg, leaf)) for key, arg in node.kwargs)
            description = (node.op, map_arg(node.args, leaf), kwargs, node.types, node.module, node.phase)
        numbers[node.name] = KNOWN.setdefault(description, len(KNOWN))
    return {
        (o.kind, o.name): None if o.value is None else (numbers[o.value.node], o.value.index) for o in graph.outputs
    }


KNOWN: dict[Hashable, int] = {}


def is_sum(node: Node) -> bool:
    return node.op == ADD and len(node.operands) == 2 and not node.kwargs


def assert_same(model: nn.Module, batch: Batch, **options: Any) -> int:
    """Both ways give the same graph; returns how many calls were taken out of line."""
    symbolic = options.pop("symbolic", True)
    request = request_for(model, batch, **options)
    whole, _ = captured(request, outlined=False, symbolic=symbolic)
    once, calls = captured(request, outlined=True, symbolic=symbolic)
    assert len(once.nodes) == len(whole.nodes)
    assert [n.target for n in once.nodes if n.is_placeholder and n.op != "constant"] == [
        n.target for n in whole.nodes if n.is_placeholder and n.op != "constant"
    ]
    assert [(o.kind, o.name) for o in once.outputs] == [(o.kind, o.name) for o in whole.outputs]
    assert meanings(once) == meanings(whole)
    assert once.symbols == whole.symbols
    return calls
