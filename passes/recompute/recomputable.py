"""Finds the forward operations that backward could recompute, and those that the named policies recompute.

A *layer* is an element of a numbered container that contains modules itself (``h.3``; the outermost, where they nest).
Recomputation stays inside a layer: values that one layer hands to another are saved, so that backward of a layer
recomputes no other layer, and frees what it recomputed before the next. Outside of layers anything may be recomputed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from autopar.ir.graph import Graph
from autopar.ir.module_paths import layers_among
from autopar.ir.node import SAVED_ACTIVATION, Node, Value
from autopar.passes.base import is_pure

from .attention import inside_attention

_FUSED = "autopar.attention.default"


@dataclass(frozen=True, eq=False)
class Recomputable:
    """The recomputable parts of a graph with saved activations, annotated or not.

    ``nodes``: forward operations that may run again, and saved activations that need not be saved; ``layers``: the
    layer of each forward operation inside one."""

    graph: Graph
    nodes: frozenset[str]
    layers: Mapping[str, str]

    @cached_property
    def shares(self) -> Mapping[str, float]:
        """For each saved activation, the share of its bytes that is live at once in backward if it is recomputed in all
        layers: that of one layer."""
        return live_shares(self.graph, self.layers)

    @cached_property
    def full(self) -> frozenset[str]:
        """The saved activations that only their own layer uses: without them only the inputs of layers are saved."""
        return frozenset(n for n in self.nodes if self.graph[n].op == SAVED_ACTIVATION and n in self.layers)

    @cached_property
    def selective(self) -> frozenset[str]:
        """The saved activations inside attention: scores and everything computed from them up to the product with the
        values, or the results of one fused operation (Korthikanti et al. 2022, section 5)."""
        inside = inside_attention(self.graph)
        fused = {n.name for n in self.graph.nodes if n.op == _FUSED and n.phase == "forward"}
        saved = (n for n in self.graph.nodes if n.op == SAVED_ACTIVATION and n.name in self.nodes)
        return frozenset(n.name for n in saved if n.name in inside or n.operands[0].node in fused)

    @cached_property
    def cheap(self) -> frozenset[str]:
        """The saved activations that can be recomputed without a matrix product."""
        costly: set[str] = set()
        for node in self.graph.nodes:
            if "mm" in node.op or any(v.node in costly and self._is_computed(v.node) for v in node.operands):
                costly.add(node.name)
        saved = (node.name for node in self.graph.nodes if node.op == SAVED_ACTIVATION)
        return frozenset(name for name in saved if name in self.nodes and name not in costly)

    def chain(self, saved: frozenset[str]) -> frozenset[str]:
        """All nodes that run again if ``saved`` (of :attr:`nodes`) are not saved: they, and the operations back to
        values that still exist."""
        needed: set[str] = set()
        for node in reversed(self.graph.nodes):
            if node.name in needed or node.name in saved:
                needed.add(node.name)
                needed.update(v.node for v in node.operands if self._is_computed(v.node))
        return frozenset(needed)

    def _is_computed(self, name: str) -> bool:
        """Whether a recomputed node must have this operand recomputed too, because it no longer exists."""
        return not self.graph[name].is_placeholder and self.graph[name].op != SAVED_ACTIVATION


def live_shares(graph: Graph, layers: Mapping[str, str] | None = None) -> dict[str, float]:
    """For each saved activation, the share of its bytes that is live at once in backward if those of all layers come
    back when their layer runs: that of one layer. ``layers``: the layer of each forward operation inside one."""
    layers = _layers(graph) if layers is None else layers
    saved = [node.name for node in graph.nodes if node.op == SAVED_ACTIVATION]
    count = Counter(map(_stem, set(layers.values())))
    outside = 1.0 if count else 1.0 / max(len(saved), 1)
    return {name: 1.0 / count[_stem(layers[name])] if name in layers else outside for name in saved}


def recomputable(graph: Graph) -> Recomputable:
    """What is recomputable in a graph with saved activations. Nodes of one class are recomputable together or not at
    all."""
    return graph.once(recomputable, lambda: _recomputable(graph))


def _recomputable(graph: Graph) -> Recomputable:
    layers = _layers(graph)
    banned: set[str] = set()
    while True:
        possible = _possible(graph, layers, banned)
        split = {graph.classes.get(n.name, n.name) for n in graph.nodes if n.name not in possible}
        wrong = {name for name in possible if graph.classes.get(name, name) in split}
        if not wrong:
            return Recomputable(graph, frozenset(possible), layers)
        banned |= wrong


def _possible(graph: Graph, layers: Mapping[str, str], banned: set[str]) -> set[str]:
    """Names of the forward nodes that can be recomputed, without those ``banned``."""
    names: set[str] = set()
    for node in graph.nodes:
        if node.phase != "forward" or node.is_placeholder or node.name in banned:
            continue
        own = layers.get(node.name)
        if node.op == SAVED_ACTIVATION:
            shared = any(layers.get(user.name) != own for user in _forward_users(graph, node))
            possible = node.operands[0].node in names and not (own and shared)
        else:
            possible = is_pure(node.op) and all(_is_available(graph, v, own, layers, names) for v in node.operands)
        if possible:
            names.add(node.name)
    return names


def _is_available(
    graph: Graph, value: Value, layer: str | None, layers: Mapping[str, str], recomputable: set[str]
) -> bool:
    """Whether a recomputed node of ``layer`` can read a value: it is stored, or recomputable in the same layer."""
    node = graph[value.node]
    if node.is_placeholder or node.op == SAVED_ACTIVATION:
        return node.op != "tangent"
    return node.name in recomputable and layers.get(node.name) in (None, layer)


def _forward_users(graph: Graph, node: Node) -> Iterator[Node]:
    for index in range(len(node.types)):
        yield from (user for user, _ in graph.users.get(Value(node.name, index), ()) if user.phase == "forward")


def _layers(graph: Graph) -> dict[str, str]:
    """The layer of each forward operation that is inside one: the path of the outermost element of a container.
    Constants belong to none: those of equal layers are computed in the first of them alone, such as a causal mask."""
    return graph.once("layers of operations", lambda: _layers_of_operations(graph))


def _layers_of_operations(graph: Graph) -> dict[str, str]:
    paths = layers_among(node.path for node in graph.nodes)
    layers: dict[str, str] = {}
    constants: set[str] = set()
    for node in graph.nodes:
        if not node.is_placeholder and all(value.node in constants for value in node.operands):
            constants.add(node.name)
        elif node.phase == "forward" and not node.is_placeholder and node.module:
            parts = node.module.split(".")
            prefixes = (".".join(parts[: i + 1]) for i, part in enumerate(parts) if part.isdigit())
            layer = next((prefix for prefix in prefixes if prefix in paths), None)
            if layer is not None:
                layers[node.name] = layer
    return layers


def _stem(layer: str) -> str:
    return layer.rpartition(".")[0]
