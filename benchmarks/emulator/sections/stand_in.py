"""Modules that replace equal layers while a model is traced: when called, they return their inputs.

A layer of a deep model that another one represents need not run. Its replacement has its class, its plain attributes
and its place in the list, but neither parameters nor parts. Its results have the structure of the representative's: a
result with the shape and dtype of an input is the replacement's own input (a hidden state passes through); all others
are the representative's. So models may count, zip, index or join their layers as they like.

This works if a layer is called after its representative, with tensors of the same shapes and dtypes. If not,
:class:`UnlikeError` is raised, and the layers must be traced themselves. So must layers whose results other operations
read one by one (:func:`read_by_others`): with no layer running between them these operations would be one kernel, or
one operation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.ir.graph import Graph
from autopar.ir.node import Node
from autopar.torch_internals.modules import blank_copy, children_of, set_children
from autopar.torch_internals.trees import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

# Containers whose elements are called instead of themselves.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
# The operation that marks each result of a stand-in in a graph, until it is dropped as a no-op.
_MARK = "aten.alias.default"


class UnlikeError(Exception):
    """The layers at ``path`` are not equal after all."""

    def __init__(self, path: str) -> None:
        super().__init__(f"layers of {path} take tensors of different shapes")
        self.path = path


@dataclass(frozen=True)
class _Call:
    """One call of a module: its input tensors, and the leaves and structure of its output."""

    inputs: tuple[torch.Tensor, ...]
    leaves: tuple[Any, ...]
    spec: TreeSpec


class Represented:
    """Creates replacements for equal layers of the list at ``path``. Hooks record the calls of representatives until
    :meth:`close`."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._last: dict[int, _Call] = {}
        self._hooks: dict[int, Any] = {}

    def close(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks.values():
            hook.remove()

    def stand_in(self, layer: nn.Module, representative: nn.Module) -> nn.Module:
        """Replaces ``layer``, which is equal to ``representative``; in lists and dicts of modules the elements are
        replaced."""
        replacement = blank_copy(layer)
        if isinstance(layer, _CONTAINERS):
            children = ((name, child) for name, child in children_of(layer).items() if child is not None)
            parts = {n: self.stand_in(child, representative.get_submodule(n)) for n, child in children}
            set_children(replacement, parts)
            return replacement
        self._listen(representative)
        replacement.__dict__["forward"] = self._passing(id(representative))
        return replacement

    def _listen(self, module: nn.Module) -> None:
        def note(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            leaves, spec = tree_flatten(output)
            self._last[id(module)] = _Call(_tensors((args, kwargs)), tuple(leaves), spec)

        if id(module) not in self._hooks:
            self._hooks[id(module)] = module.register_forward_hook(note, with_kwargs=True)

    def _passing(self, representative: int) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            last, inputs = self._last.get(representative), _tensors((args, kwargs))
            if last is None or list(map(_kind, last.inputs)) != list(map(_kind, inputs)):
                raise UnlikeError(self.path)
            return tree_unflatten(list(map(_marked, _passed_on(last, inputs))), last.spec)

        return forward


def _tensors(tree: Any) -> tuple[torch.Tensor, ...]:
    return tuple(leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _kind(tensor: torch.Tensor) -> tuple[str, torch.dtype]:
    """Shape and dtype; sizes as text, since comparing symbolic ones would put conditions on them."""
    return ",".join(map(str, tensor.shape)), tensor.dtype


def _passed_on(last: _Call, inputs: Sequence[torch.Tensor]) -> list[Any]:
    """Replaces each leaf of the representative's output that is, or looks like, one of its inputs by the input now
    given in its place."""
    unused = [i for i, tensor in enumerate(last.inputs) if tensor.is_floating_point()]
    leaves: list[Any] = []
    for leaf in last.leaves:
        same = [i for i in unused if last.inputs[i] is leaf] or [i for i in unused if _is_of_kind(leaf, last.inputs[i])]
        leaves.append(inputs[same[0]] if same else leaf)
        unused = [i for i in unused if not same or i != same[0]]
    return leaves


def _marked(leaf: Any) -> Any:
    return torch.ops.aten.alias.default(leaf) if isinstance(leaf, torch.Tensor) else leaf


def _is_of_kind(leaf: Any, tensor: torch.Tensor) -> bool:
    return isinstance(leaf, torch.Tensor) and _kind(leaf) == _kind(tensor)


def read_by_others(graph: Graph, loss: str | None, path: str, kinds: Mapping[str, str]) -> bool:
    """Whether operations outside the list of layers at ``path`` read results of several layers that are represented or
    represent others. Only operations that gradients or ``loss`` depend on count. ``graph``: as it was traced;
    ``kinds``: the layer that each layer is priced as."""
    represented = {name for name, kind in kinds.items() if name != kind}
    involved = represented | {kinds[name] for name in represented}

    def layer(node: Node) -> str:
        """The layer of the list that a node is in, or ""."""
        below = f"{path}." if path else ""
        is_below = not node.is_placeholder and node.module.startswith(below)
        return node.module.removeprefix(below).partition(".")[0] if is_below else ""

    needed = graph.needed_for([o.value for o in graph.outputs if o.value and (o.kind != "output" or o.name == loss)])
    read: set[str] = set()
    for node in graph.nodes:
        # A stand-in has no operations but its marks. Other nodes with its path are operations after the model, which
        # have no module of their own.
        is_inside = layer(node) and (layer(node) not in represented or node.op == _MARK)
        if node.phase == "forward" and node.name in needed and not is_inside:
            read.update(layer(graph[value.node]) for value in node.operands)
    return len(read & involved) > 1
