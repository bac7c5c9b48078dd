"""To which section of a model each node of its graph belongs: what comes before the layers, each kept layer, what comes
after them; and how often the whole model has it."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.ir.graph import Graph
from autopar.ir.node import Value

from .fusion import readers
from .shortened_model import Depth

BEFORE, AFTER = "(before)", "(after)"


def sections_by_node(graph: Graph, paths: list[str]) -> Mapping[str, str]:
    """The section of each node: by its module; of those in no layer, by whether layers came before them."""
    section_of_node: dict[str, str] = {}
    begun = {"forward": False, "backward": False}
    for node in graph.nodes:
        where = node.target if node.op == "param" else node.module
        found = next((path for path in paths if where == path or where.startswith(f"{path}.")), None)
        if found is not None and not node.is_placeholder:
            begun[node.phase] = True
        late = begun["forward"] if node.phase == "forward" else not begun["backward"]
        section_of_node[node.name] = found or (AFTER if late else BEFORE)
    for node in graph.placeholders("param"):
        users = graph.users.get(Value(node.name), ())
        if section_of_node[node.name] in (BEFORE, AFTER) and users:
            section_of_node[node.name] = section_of_node[users[0][0].name]
    return section_of_node


def using(graph: Graph, section_of_node: Mapping[str, str]) -> Mapping[str, frozenset[str]]:
    """The sections of which each parameter is a weight: its home, and others whose forward reads it."""
    found = {}
    for node in graph.placeholders("param"):
        read = (user.name for user in readers(graph, Value(node.name)) if user.phase == "forward")
        found[node.name] = frozenset({section_of_node[node.name], *map(section_of_node.__getitem__, read)})
    return found


def multiplicities(graph: Graph, depth: Depth) -> Mapping[str, int]:
    """For how many nodes of the whole model each node stands: those of the kept layers for as many as these do."""
    layers = {path: depth.priced_as.count(position) for position, path in enumerate(depth.paths)}
    return {name: layers.get(home, 1) for name, home in sections_by_node(graph, depth.paths).items()}
