"""Explains tensors of the wrong dtype or shape: which module received them, by the names its author knows.

Torch checks some operations, above all products, on real tensors only. Fake tensors pass, and the program would fail
when it runs; so :func:`check_dtypes` checks the graph.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from types import TracebackType

import torch
from torch import nn

from autopar.errors import TraceError
from autopar.ir.graph import Graph
from autopar.ir.node import Node, TensorType, Value

# Operations -> positions of the operands that must have one dtype.
_SAME: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(("aten.mm.default", "aten.bmm.default", "aten.mv.default", "aten.dot.default"), (0, 1)),
    "aten.vdot.default": (0, 1),
    **dict.fromkeys(("aten.addmm.default", "aten.baddbmm.default", "aten.addmv.default"), (0, 1, 2)),
    "aten.convolution.default": (0, 1, 2),
    "aten.index_put.default": (0, 2),
    **dict.fromkeys(("aten.index_add.default", "aten.index_copy.default"), (0, 3)),
}
# Operations -> the position of the operand that must hold integers; torch 2.11 does not check it either.
_INDICES: Mapping[str, int] = {"aten.embedding.default": 1}
# Operations that only reshape their operand.
_MOVES = re.compile(r"aten\.(t|permute|transpose|reshape|view|_unsafe_view|expand|clone|alias|unsqueeze|squeeze)\.")
_INPUT_WORDS = re.compile(r"dtype|scalar type|[Ii]nput type|data type|'indices'")
_SHAPE_WORDS = re.compile(r"shape|size|dimension|dim\b|channels|[Ee]xpected|broadcast")
# Tensors that a message names. Chosen: what a reader takes in.
_SHOWN = 4


def check_dtypes(graph: Graph, model: nn.Module) -> None:
    """Raises :class:`TraceError` for an operation that does not take operands of these dtypes, or not together."""
    for node in graph.nodes:
        index = node.args[_INDICES[node.op]] if node.op in _INDICES else None
        if isinstance(index, Value) and _type(graph, index).dtype not in (torch.int64, torch.int32):
            raise TraceError(_no_indices(graph, model, node, index))
        places = [node.args[place] for place in _SAME.get(node.op, ()) if place < len(node.args)]
        values = [value for value in places if isinstance(value, Value)]
        types = [_type(graph, value) for value in values]
        if len({kind.dtype for kind in types}) > 1 and not _fills(graph, node):
            raise TraceError(_mixed(graph, model, node, values, types))


def _fills(graph: Graph, node: Node) -> bool:
    """Whether the node writes one number where a mask is true: torch then fills, and converts the number."""
    if node.op != "aten.index_put.default" or (len(node.args) > 3 and node.args[3]):
        return False
    _, indices, number = node.args[:3]
    masks = [index for index in indices if isinstance(index, Value)] if isinstance(indices, tuple) else []
    return (
        isinstance(number, Value)
        and all(size == 1 for size in _type(graph, number).shape)
        and [_type(graph, mask).dtype in (torch.bool, torch.uint8) for mask in masks] == [True]
    )


def _type(graph: Graph, value: Value) -> TensorType:
    tensor_type = graph[value.node].types[value.index]
    assert tensor_type is not None
    return tensor_type


def _mixed(graph: Graph, model: nn.Module, node: Node, values: list[Value], types: list[TensorType]) -> str:
    origins = [_origin(graph, value) for value in values]
    described = " and ".join(f"{kind} ({_describe(node, model)})" for kind, node in zip(types, origins, strict=True))
    inputs = [(node, kind.dtype) for node, kind in zip(origins, types, strict=True) if node.op == "input"]
    others = [kind.dtype for node, kind in zip(origins, types, strict=True) if node.op != "input"]
    advice = "convert one of them with .to(...)"
    if inputs and others:
        advice = f"pass {_input_name(inputs[0][0], model)}.to({others[0]})"
    name = node.op.removeprefix("aten.").partition(".")[0]
    return f"{_cannot_run(node, model)}\n{name} takes operands of one dtype, but has {described}; {advice}"


def _no_indices(graph: Graph, model: nn.Module, node: Node, index: Value) -> str:
    origin = _origin(graph, index)
    name = type(model.get_submodule(node.module)).__name__
    return (
        f"{_cannot_run(node, model)}\n{name} was given input {_type(graph, index)} ({_describe(origin, model)}), but "
        f"indices are integers; convert it with .long(){_ADVICE}"
    )


def _cannot_run(node: Node, model: nn.Module) -> str:
    where = f"module {node.module!r} ({type(model.get_submodule(node.module)).__name__})"
    return (
        f"{type(model).__name__} cannot run on inputs of these dtypes: in "
        f"{where if node.module else type(model).__name__}{node.source and f' at {node.source}'}"
    )


def _origin(graph: Graph, value: Value) -> Node:
    """The node that computes a value, before operations that only reshape it."""
    node = graph[value.node]
    while _MOVES.match(node.op) and isinstance(node.args[0], Value):
        node = graph[node.args[0].node]
    return node


def _input_name(node: Node, model: nn.Module) -> str:
    """The name of an input in forward's signature: the trace numbers positional inputs."""
    first, dot, rest = node.target.partition(".")
    names = list(inspect.signature(model.forward).parameters)
    return f"{names[int(first)]}{dot}{rest}" if first.isdigit() and int(first) < len(names) else node.target


def _describe(node: Node, model: nn.Module) -> str:
    names = {"param": "the parameter", "buffer": "the buffer"}
    if node.op == "input":
        return f"the input {_input_name(node, model)!r}"
    if node.op in names:
        return f"{names[node.op]} {node.target!r}"
    return f"a result of {node.op}{node.module and f' in {node.module!r}'}"


def failing_inputs(error: BaseException, model: nn.Module) -> str:
    """A line about the tensors passed to the module that raised ``error``, if the error seems to be about their dtypes
    or shapes; "" if not."""
    about_dtypes = bool(_INPUT_WORDS.search(str(error)))
    if not (about_dtypes or _SHAPE_WORDS.search(str(error))):
        return ""
    calls = list(_calls(error.__traceback__))
    if not calls:
        return ""
    module, arguments = calls[-1]
    inputs = next((tensors for owner, tensors in calls if owner is model), {})
    names = {id(tensor): name for name, tensor in inputs.items() if module is not model}
    tensors = [f"{name} {_type_of(tensor)}{_of_input(names, tensor)}" for name, tensor in arguments.items()]
    weights = [f"{name} {_type_of(tensor)}" for name, tensor in module.named_parameters(recurse=False)]
    text = f"\n{type(module).__name__} was given {', '.join(tensors[:_SHOWN])}" if tensors else ""
    if text and weights:
        text += f"; its parameters are {', '.join(weights[:_SHOWN])}"
    return text + (_ADVICE if text and about_dtypes else "")


_ADVICE = (
    "\nids and class labels are integers (tensor.long()); what is multiplied by parameters has their dtype "
    "(tensor.to(parameter.dtype))"
)


def _calls(trail: TracebackType | None) -> Iterator[tuple[nn.Module, dict[str, torch.Tensor]]]:
    """Yields the modules whose forward an exception left, outermost first, each with its tensor arguments."""
    while trail is not None:
        frame = trail.tb_frame
        code = frame.f_code
        owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if code.co_name == "forward" and isinstance(owner, nn.Module):
            names = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
            arguments = {name: frame.f_locals.get(name) for name in names}
            yield owner, {name: tensor for name, tensor in arguments.items() if isinstance(tensor, torch.Tensor)}
        trail = trail.tb_next


def _type_of(tensor: torch.Tensor) -> TensorType:
    return TensorType(tuple(tensor.shape), tensor.dtype)


def _of_input(names: Mapping[int, str], tensor: torch.Tensor) -> str:
    return f" (the input {names[id(tensor)]!r})" if id(tensor) in names else ""
