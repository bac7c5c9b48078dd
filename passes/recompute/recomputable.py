"""What of forward could be computed again in backward, and what the named policies recompute.

A *layer* is an element of a numbered container that holds modules itself (``h.3``; the outermost, where they nest).
Recomputation stays inside a layer: what one layer hands to another is kept, so that backward of a layer recomputes no
other layer, and what it recomputes is dropped before the next. Outside of layers anything may be recomputed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from autopar.ir.graph import Graph
from autopar.ir.module_paths import layers_among
from autopar.ir.node import SAVED_ACTIVATION, Node, Value
from autopar.ir.program import Instruction, draws_numbers
from autopar.passes.base import is_pure

# Products; of two activations they are those of an attention written out.
_PRODUCTS = frozenset(f"aten.{name}.default" for name in ("mm", "bmm", "baddbmm"))
_FUSED = "aten._scaled_dot_product_"


@dataclass(frozen=True, eq=False)
class Recomputable:
    """``nodes``: forward operations that may run again, and saved activations that need not be kept; ``layers``: the
    layer of each forward operation inside one. Of an annotated or plain graph with saved activations."""

    graph: Graph
    nodes: frozenset[str]
    layers: Mapping[str, str]

    @cached_property
    def shares(self) -> Mapping[str, float]:
        """For each saved activation the part of its bytes that backward holds at once if all that are like it are
        recomputed: that of one layer."""
        saved = [node.name for node in self.graph.nodes if node.op == SAVED_ACTIVATION]
        count = Counter(map(_stem, set(self.layers.values())))
        outside = 1.0 if count else 1.0 / max(len(saved), 1)
        return {name: 1.0 / count[_stem(self.layers[name])] if name in self.layers else outside for name in saved}

    @cached_property
    def full(self) -> frozenset[str]:
        """The saved activations that only their own layer uses: without them, what is kept are the inputs of layers."""
        return frozenset(n for n in self.nodes if self.graph[n].op == SAVED_ACTIVATION and n in self.layers)

    @cached_property
    def selective(self) -> frozenset[str]:
        """The saved activations inside attention: scores and what becomes of them until they meet the values, or the
        results of one fused operation (Korthikanti et al. 2022, section 5)."""
        inside = set(_between_products(self.graph))
        fused = {n.name for n in self.graph.nodes if n.op.startswith(_FUSED) and n.phase == "forward"}
        found = (n for n in self.graph.nodes if n.op == SAVED_ACTIVATION and n.name in self.nodes)
        return frozenset(n.name for n in found if n.name in inside or n.operands[0].node in fused)

    def chain(self, saved: frozenset[str]) -> frozenset[str]:
        """Everything that runs again if ``saved`` (of :attr:`nodes`) are not kept: they, and the operations back to
        what is there."""
        needed: set[str] = set()
        for node in reversed(self.graph.nodes):
            if node.name in needed or node.name in saved:
                needed.add(node.name)
                needed.update(v.node for v in node.operands if self._is_computed(v.node))
        return frozenset(needed)

    def _is_computed(self, name: str) -> bool:
        """Whether a node that runs again cannot read the value but must have it made again."""
        return not self.graph[name].is_placeholder and self.graph[name].op != SAVED_ACTIVATION


def recomputable(graph: Graph) -> Recomputable:
    """Of a graph with saved activations; nodes of one class are recomputable together or not at all."""
    layers = _layers(graph)
    banned: set[str] = set()
    while True:
        found = _possible(graph, layers, banned)
        split = {graph.classes.get(n.name, n.name) for n in graph.nodes if n.name not in found}
        wrong = {name for name in found if graph.classes.get(name, name) in split}
        if not wrong:
            return Recomputable(graph, frozenset(found), layers)
        banned |= wrong


def _possible(graph: Graph, layers: Mapping[str, str], banned: set[str]) -> set[str]:
    """Names of the forward nodes, without those ``banned``, that can be had again."""
    found: set[str] = set()
    for node in graph.nodes:
        if node.phase != "forward" or node.is_placeholder or node.name in banned:
            continue
        own = layers.get(node.name)
        if node.op == SAVED_ACTIVATION:
            shared = any(layers.get(user.name) != own for user in _forward_users(graph, node))
            possible = node.operands[0].node in found and not (own and shared)
        else:
            possible = _repeatable(node) and all(_is_there(graph, v, own, layers, found) for v in node.operands)
        if possible:
            found.add(node.name)
    return found


def _is_there(graph: Graph, value: Value, layer: str | None, layers: Mapping[str, str], found: set[str]) -> bool:
    node = graph[value.node]
    if node.is_placeholder or node.op == SAVED_ACTIVATION:
        return node.op != "tangent"
    return node.name in found and layers.get(node.name) in (None, layer)


def _repeatable(node: Node) -> bool:
    """Whether the operation gives the same bits again. An attention that drops nothing does, whatever its tag says."""
    if is_pure(node.op):
        return True
    call = Instruction(node.name, node.op, node.args, node.kwargs)
    return node.op.startswith(_FUSED) and not draws_numbers(call)


def _forward_users(graph: Graph, node: Node) -> Iterator[Node]:
    for index in range(len(node.types)):
        yield from (user for user, _ in graph.users.get(Value(node.name, index), ()) if user.phase == "forward")


def _layers(graph: Graph) -> dict[str, str]:
    """The layer of each forward operation inside one: the path of the outermost element of a container."""
    paths = layers_among(node.target if node.is_placeholder else node.module for node in graph.nodes)
    found: dict[str, str] = {}
    for node in graph.nodes:
        if node.phase == "forward" and not node.is_placeholder and node.module:
            parts = node.module.split(".")
            prefixes = (".".join(parts[: i + 1]) for i, part in enumerate(parts) if part.isdigit())
            layer = next((prefix for prefix in prefixes if prefix in paths), None)
            if layer is not None:
                found[node.name] = layer
    return found


def _stem(layer: str) -> str:
    return layer.rpartition(".")[0]


def _between_products(graph: Graph) -> Iterator[str]:
    """Forward nodes that lie behind one product of two activations and before another of the same module."""
    data = _from_data(graph)
    modules: defaultdict[str, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.phase == "forward" and not node.is_placeholder:
            modules[node.module].append(node)
    for nodes in modules.values():
        products = {n.name for n in nodes if n.op in _PRODUCTS and sum(v.node in data for v in n.operands) > 1}
        behind: set[str] = set()
        for node in nodes:
            if node.name in products or any(v.node in behind for v in node.operands):
                behind.add(node.name)
        before: set[str] = set()
        for node in reversed(nodes):
            if node.name in products or node.name in before:
                before.update(v.node for v in node.operands)
        yield from (node.name for node in nodes if node.name in behind and node.name in before)


def _from_data(graph: Graph) -> set[str]:
    """Nodes that depend on what the model is given, or on another stage."""
    found: set[str] = set()
    for node in graph.nodes:
        if node.op in ("input", "receive") or any(value.node in found for value in node.operands):
            found.add(node.name)
    return found
