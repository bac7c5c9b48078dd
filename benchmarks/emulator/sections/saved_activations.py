"""Bytes that sections save of a microbatch for backward, by what recomputation would drop, and bytes of their
inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import torch

from autopar.cost import compute_seconds
from autopar.cost.kernels.kernel import origin, readers
from autopar.ir.assignment import Use, operand_uses
from autopar.ir.graph import Graph
from autopar.ir.node import Value
from autopar.passes.recompute.attention import inside_attention
from autopar.placement.prices import local_bytes

from .kernel_seconds import KernelPrices
from .rematerialised import rematerialisable
from .section import Seconds
from .section_of_node import AFTER, BEFORE


class Saved:
    """Saved activations of all sections; ``moved``: values and the operations that read them resharded."""

    def __init__(self, priced: KernelPrices, moved: Set[tuple[Value, str]]) -> None:
        self.priced, self.section_of_node, self.layout = priced, priced.section_of_node, priced.layout
        self.graph, self.prices, self.assignment = priced.graph, priced.prices, priced.assignment
        self.varying, self.inside, self.last = _varying(self.graph), inside_attention(self.graph), self._after_layers()
        saved = priced.kernels.saved
        self.rematerialised = rematerialisable(self.graph, saved, moved)
        # Values of forward that backward reads.
        self.read = {value: priced.kept(value) for value in saved}

    def of(self, name: str) -> dict[str, Any]:
        """Bytes of the values that a section saves for backward, by what recomputation would drop; fields of
        :class:`.Section`."""
        return self.of_values([value for value in self.read if self.section_of_node[value.node] == name], self.read)

    def of_values(self, saved: Sequence[Value], size: Mapping[Value, int]) -> dict[str, Any]:
        """:meth:`of` for the values that a section saves, with their bytes."""
        inside = [value for value in saved if self._stays_inside(value)]
        rematerialised = [value for value in saved if value in self.rematerialised and value not in inside]
        return {
            "saved": sum(size[value] for value in saved),
            "saved_last": sum(size[value] for value in saved if value.node in self.last),
            "saved_inside": sum(size[value] for value in inside),
            "saved_rematerialised": sum(size[value] for value in rematerialised),
            "rematerialised": Seconds(sum(map(self._rematerialising, rematerialised))),
        }

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
        taken = {origin(self.graph, use.value): self.taken(use) for use in self.operands(name)}
        return sum(size for value, size in taken.items() if self._comes_in(value, name))

    def _comes_in(self, value: Value, name: str) -> bool:
        return value.node in self.varying and self.section_of_node[value.node] != name

    def operands(self, name: str) -> Iterator[Use]:
        """The operands of a section's forward operations."""
        for node in self.graph.nodes:
            if node.phase == "forward" and self.section_of_node[node.name] == name:
                yield from operand_uses(self.graph, self.assignment, node)

    def taken(self, use: Use) -> int:
        """Bytes of an operand on one device, as it is read."""
        return local_bytes(use.kind, use.target, self.prices.mesh)

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
