"""Modules that replace equal ones while a model is traced: called, they pass on what they are given.

A layer of a deep model that another one represents need not run. What replaces it has its class, its plain
attributes and its place in the list, but neither parameters nor parts; what it gives back has the form of what the
represented layer gave: results of the kind of something that went in are what goes in now (a hidden state passes
through), all others are the representative's. So models may count, zip, index or join their layers as they like.

That holds if a layer is called after its representative, with tensors of the same shapes and dtypes. Where one is not
:class:`UnlikeError` says so, and the layers must be traced themselves. So must those whose results other operations
read one by one (:func:`read_by_others`): with no layer at work between them these would be one kernel, or one
operation.
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

# What is called through its elements and not itself.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
# What a graph has for each result of a stand-in, until it is dropped as an operation that does nothing.
_MARK = "aten.alias.default"


class UnlikeError(Exception):
    """The layers at ``path`` are not equal after all."""

    def __init__(self, path: str) -> None:
        super().__init__(f"layers of {path} take tensors of different shapes")
        self.path = path


@dataclass(frozen=True)
class _Call:
    """One call of a module: its tensors, what it gave, and where among these leaves tensors were."""

    taken: tuple[torch.Tensor, ...]
    given: tuple[Any, ...]
    spec: TreeSpec


class Represented:
    """What replaces equal layers of the list at ``path``, made one by one; until :meth:`close` the layers that
    represent others are listened to."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._last: dict[int, _Call] = {}
        self._hooks: dict[int, Any] = {}

    def close(self) -> None:
        """Leaves the representatives as they were."""
        for hook in self._hooks.values():
            hook.remove()

    def stand_in(self, layer: nn.Module, representative: nn.Module) -> nn.Module:
        """What replaces ``layer``, which is equal to ``representative``; of lists and dicts of modules their
        elements do."""
        found = blank_copy(layer)
        if isinstance(layer, _CONTAINERS):
            children = ((name, child) for name, child in children_of(layer).items() if child is not None)
            set_children(found, {n: self.stand_in(child, representative.get_submodule(n)) for n, child in children})
            return found
        self._listen(representative)
        found.__dict__["forward"] = self._passing(id(representative))
        return found

    def _listen(self, module: nn.Module) -> None:
        def note(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            given, spec = tree_flatten(output)
            self._last[id(module)] = _Call(_tensors((args, kwargs)), tuple(given), spec)

        if id(module) not in self._hooks:
            self._hooks[id(module)] = module.register_forward_hook(note, with_kwargs=True)

    def _passing(self, representative: int) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            last, now = self._last.get(representative), _tensors((args, kwargs))
            if last is None or list(map(_kind, last.taken)) != list(map(_kind, now)):
                raise UnlikeError(self.path)
            return tree_unflatten(list(map(_marked, _passed_on(last, now))), last.spec)

        return forward


def _tensors(tree: Any) -> tuple[torch.Tensor, ...]:
    return tuple(leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _kind(tensor: torch.Tensor) -> tuple[str, torch.dtype]:
    """Shape and dtype; sizes as text, since comparing symbolic ones would put conditions on them."""
    return ",".join(map(str, tensor.shape)), tensor.dtype


def _passed_on(last: _Call, now: Sequence[torch.Tensor]) -> list[Any]:
    """For each leaf that the representative gave, what went in now at its place; else that leaf."""
    left = [i for i, tensor in enumerate(last.taken) if tensor.is_floating_point()]
    found: list[Any] = []
    for leaf in last.given:
        same = [i for i in left if last.taken[i] is leaf] or [i for i in left if _is_of_kind(leaf, last.taken[i])]
        found.append(now[same[0]] if same else leaf)
        left = [i for i in left if not same or i != same[0]]
    return found


def _marked(leaf: Any) -> Any:
    return torch.ops.aten.alias.default(leaf) if isinstance(leaf, torch.Tensor) else leaf


def _is_of_kind(leaf: Any, tensor: torch.Tensor) -> bool:
    return isinstance(leaf, torch.Tensor) and _kind(leaf) == _kind(tensor)


def read_by_others(graph: Graph, loss: str | None, path: str, kinds: Mapping[str, str]) -> bool:
    """Whether operations outside the list of layers at ``path`` read results of several layers that are represented or
    represent others, ``kinds`` saying for each layer which one it is priced as; in a graph as it was traced, of which
    gradients and ``loss`` count."""
    represented = {name for name, kind in kinds.items() if name != kind}
    asked = represented | {kinds[name] for name in represented}

    def layer(node: Node) -> str:
        """The layer of the list that a node is in, or nothing."""
        below = f"{path}." if path else ""
        is_below = not node.is_placeholder and node.module.startswith(below)
        return node.module.removeprefix(below).partition(".")[0] if is_below else ""

    needed = graph.needed_for([o.value for o in graph.outputs if o.value and (o.kind != "output" or o.name == loss)])
    read: set[str] = set()
    for node in graph.nodes:
        # A stand-in has no operations but its marks: others are called so for want of a module, being after the model.
        is_inside = layer(node) and (layer(node) not in represented or node.op == _MARK)
        if node.phase == "forward" and node.name in needed and not is_inside:
            read.update(layer(graph[value.node]) for value in node.operands)
    return len(read & asked) > 1
