"""Bytes that sections save of a microbatch for backward, by what recomputation would drop, and bytes of their
inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any

import torch

from autopar.cost import compute_seconds
from autopar.cost.kernels.kernel import origin, readers
from autopar.ir.assignment import Use, operand_uses
from autopar.ir.graph import Graph
from autopar.ir.node import Node, Value
from autopar.ir.placements import Placements
from autopar.layout import Layout, matches, matches_whole
from autopar.passes.recompute.attention import inside_attention
from autopar.placement.prices import local_bytes

from .kernel_seconds import KernelPrices
from .placement import Placed
from .rematerialised import recomputed_operations, rematerialisable, rematerialised_nodes
from .section import Seconds
from .section_of_node import AFTER, BEFORE


class Saved:
    """Saved activations of all sections. ``section_of_node``: the section of each node; ``moved``: values and the
    operations that read them resharded."""

    def __init__(
        self,
        placed: Placed,
        section_of_node: Mapping[str, str],
        layout: Layout,
        priced: KernelPrices,
        moved: Set[tuple[Value, str]],
    ) -> None:
        self.section_of_node, self.layout, self.priced = section_of_node, layout, priced
        self.graph, self.prices, self.assignment = placed.graph, placed.prices, placed.assignment
        self.varying, self.inside, self.last = _varying(self.graph), inside_attention(self.graph), self._after_layers()
        saved = priced.kernels.saved
        self.rematerialised = rematerialisable(self.graph, saved, moved)
        self.again = recomputed_operations(priced.kernels, self._is_recomputed, section_of_node)
        # The operations that run once more, by kind of recomputation.
        inside = self.inside
        ways = {"selective": inside, "elementwise": inside | rematerialised_nodes(self.graph, self.rematerialised)}
        self.repeated = {"recomputed": self.again.nodes, **ways}
        # Values of forward that backward reads; in `kept` also the values saved for recomputation.
        self.read = {value: priced.kept(value) for value in saved}
        taken = (value for value in self.again.taken if value.node in self.varying)
        self.kept = {**self.read, **{value: priced.kept(value) for value in taken}}

    def of(self, name: str) -> dict[str, Any]:
        """Bytes of the values that a section saves for backward, by what recomputation would drop; fields of
        :class:`.Section`."""
        here = [value for value in self.kept if self.section_of_node[value.node] == name]
        saved = [value for value in here if value not in self.again.dropped]
        held = self._retained_by_callers(name)
        inside = [value for value in saved if self._stays_inside(value)]
        rematerialised = [value for value in saved if value in self.rematerialised and value not in inside]
        return {
            "saved": sum(self.kept[value] for value in saved) + held,
            "saved_last": sum(self.kept[value] for value in saved if value.node in self.last)
            + (held if name == AFTER else 0),
            "saved_inside": sum(self.kept[value] for value in inside),
            "saved_rematerialised": sum(self.kept[value] for value in rematerialised),
            "rematerialised": Seconds(sum(map(self._rematerialising, rematerialised))),
            "saved_again": sum(self.kept[value] for value in here if value in self.again.dropped),
        }

    def _retained_by_callers(self, name: str) -> int:
        """Bytes of the inputs that modules of :attr:`Layout.retained_inputs` get from other modules, and of the copies
        that collectives make of them, unless these are retained anyway; recomputed values would not be."""
        sizes: dict[tuple[Value, Placements], int] = {}
        for use in self._operands(name):
            source = origin(self.graph, use.value)
            if not self._is_retained(use.consumer) or not self._is_made_elsewhere(source):
                continue
            if use.target != use.source or source not in self.kept or source in self.again.dropped:
                sizes[source, use.target] = self._taken(use)
        return sum(sizes.values())

    def _is_made_elsewhere(self, value: Value) -> bool:
        return value.node in self.varying and not self._is_retained(value.node)

    def _is_retained(self, name: str) -> bool:
        return matches(self.graph[name].module, self.layout.retained_inputs)

    def _rematerialising(self, value: Value) -> float:
        """Seconds of recomputing a value from saved ones."""
        moved = sum(map(self.priced.local, (value, *self.rematerialised[value])))
        return compute_seconds(self.prices.cluster, 0.0, moved, torch.float32)

    def _stays_inside(self, value: Value) -> bool:
        """Whether forward uses a value only inside attention, so that it is recomputed from attention's inputs."""
        users = (user for user in readers(self.graph, value) if user.phase == "forward")
        return value.node in self.inside and all(user.name in self.inside for user in users)

    def entry(self, name: str) -> int:
        """Bytes of a section's inputs from earlier sections, in forward."""
        taken = {origin(self.graph, use.value): self._taken(use) for use in self._operands(name)}
        return sum(size for value, size in taken.items() if self._comes_in(value, name))

    def _comes_in(self, value: Value, name: str) -> bool:
        return value.node in self.varying and self.section_of_node[value.node] != name

    def _operands(self, name: str) -> Iterator[Use]:
        """The operands of a section's forward operations."""
        for node in self.graph.nodes:
            if node.phase == "forward" and self.section_of_node[node.name] == name:
                yield from operand_uses(self.graph, self.assignment, node)

    def _taken(self, use: Use) -> int:
        """Bytes of an operand on one device, as it is read."""
        return local_bytes(use.kind, use.target, self.prices.mesh)

    def _is_recomputed(self, node: Node) -> bool:
        return matches_whole(node.module, self.layout.recomputed)

    def _after_layers(self) -> frozenset[str]:
        """The forward operations after the last layer."""
        names = [node.name for node in self.graph.nodes if node.phase == "forward" and not node.is_placeholder]
        end = max((i for i, name in enumerate(names) if self.section_of_node[name] not in (BEFORE, AFTER)), default=-1)
        return frozenset(names[end + 1 :])


def _varying(graph: Graph) -> frozenset[str]:
    """Nodes that depend on weights or inputs. All others, such as a mask, are computed where they are needed."""
    names: set[str] = set()
    for node in graph.nodes:
        if not node.is_placeholder:
            producers = (graph[value.node] for value in node.operands)
            if any(producer.op in ("param", "input") or producer.name in names for producer in producers):
                names.add(node.name)
    return frozenset(names)
