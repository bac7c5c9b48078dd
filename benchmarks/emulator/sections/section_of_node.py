"""Assigns each node of a graph to a section of the model: the part before the layers, each traced layer, and the part
after them. Also how often the whole model has each node."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.cost.kernels.kernel import readers
from autopar.ir.graph import Graph
from autopar.ir.node import Value

from .shortened_model import Depth

BEFORE, AFTER = "(before)", "(after)"


def sections_by_node(graph: Graph, paths: list[str]) -> Mapping[str, str]:
    """The section of each node: by its module, or for nodes outside of layers by whether layers came before them."""
    section_of_node: dict[str, str] = {}
    begun = {"forward": False, "backward": False}
    for node in graph.nodes:
        where = node.target if node.op == "param" else node.module
        layer = next((path for path in paths if where == path or where.startswith(f"{path}.")), None)
        if layer is not None and not node.is_placeholder:
            begun[node.phase] = True
        is_after = begun["forward"] if node.phase == "forward" else not begun["backward"]
        section_of_node[node.name] = layer or (AFTER if is_after else BEFORE)
    for node in graph.placeholders("param"):
        users = graph.users.get(Value(node.name), ())
        if section_of_node[node.name] in (BEFORE, AFTER) and users:
            section_of_node[node.name] = section_of_node[users[0][0].name]
    return section_of_node


def using(graph: Graph, section_of_node: Mapping[str, str]) -> Mapping[str, frozenset[str]]:
    """The sections that use each parameter: its own section, and others whose forward reads it."""
    sections = {}
    for node in graph.placeholders("param"):
        read = (user.name for user in readers(graph, Value(node.name)) if user.phase == "forward")
        sections[node.name] = frozenset({section_of_node[node.name], *map(section_of_node.__getitem__, read)})
    return sections


def multiplicities(graph: Graph, depth: Depth) -> Mapping[str, int]:
    """How many nodes of the whole model each node represents: for a node in a traced layer, the number of layers that
    this layer represents."""
    layers = {path: depth.priced_as.count(position) for position, path in enumerate(depth.paths)}
    return {name: layers.get(section, 1) for name, section in sections_by_node(graph, depth.paths).items()}
