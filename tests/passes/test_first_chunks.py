"""In which chunk a node is first, against the chunks that are cut."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopar.errors import OptionsError
from autopar.ir.graph import Graph
from autopar.ir.node import original
from autopar.passes.pipeline.cut import cut
from autopar.passes.pipeline.cut_candidates import cut_candidates
from autopar.passes.pipeline.first_chunks import first_chunks
from autopar.planner.step_graphs import pipelined_graph
from tests.helpers import models
from tests.helpers.planning import requested


class Tied(nn.Module):
    """A stack whose head is its embedding, with a weight that every layer shares, one that nothing uses and one that
    has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(24, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))
        self.shared, self.idle = nn.Linear(16, 16), nn.Linear(16, 16)
        self.frozen = nn.Parameter(torch.ones(16), requires_grad=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = skip = self.embedding(ids) * self.frozen
        for layer in self.layers:
            x = x + torch.tanh(self.shared(layer(x).transpose(0, 1)).transpose(0, 1))
        return F.cross_entropy((x + skip).flatten(0, 1) @ self.embedding.weight.T, ids.flatten())


@cache
def graph_of(name: str) -> Graph:
    ids = {"ids": torch.zeros(8, 6, dtype=torch.int64)}
    request = requested(lambda: (Tied(), ids) if name == "tied" else models.make(name), (2,))
    return pipelined_graph(request.graph, request.loss, request.batch)


def by_cutting(graph: Graph, cuts: tuple[str, ...]) -> dict[str, int]:
    found: dict[str, int] = {}
    for index, chunk in enumerate(cut(graph, cuts).chunks):
        for node in chunk.nodes:
            if node.op != "receive":
                found.setdefault(original(node.name, graph), index)
    return {name: index for name, index in found.items() if name in graph}  # Without the sums that cutting adds.


@pytest.mark.parametrize("name", ["gpt2", "llama", "vit", "tied"])
def test_segments_are_those_of_the_chunks_between_candidates(name: str) -> None:
    graph = graph_of(name)
    cuts = tuple(candidate.name for candidate in cut_candidates(graph))
    found = first_chunks(graph, cuts)
    assert found is not None
    assert found == by_cutting(graph, cuts)
    assert len(set(found.values())) == len(cuts) + 1 > 2


@pytest.mark.parametrize("name", ["gpt2", "llama", "vit", "tied"])
def test_nodes_are_where_cuts_anywhere_put_them(name: str) -> None:
    graph, draw, known = graph_of(name), random.Random(0), 0
    forward = [node.name for node in graph if node.phase == "forward" and not node.is_placeholder]
    for _ in range(30):
        cuts = tuple(forward[place] for place in sorted(draw.sample(range(1, len(forward)), draw.randint(1, 6))))
        found = first_chunks(graph, cuts)
        known += found is not None
        if found is not None:
            assert found == by_cutting(graph, cuts), cuts
    assert known > 0


BUFFER = """
graph()
%b: f32[4, 4] = buffer("b")
%x: f32[4, 4] = input("x")
%y: f32[4, 4] = aten.mul.Tensor(%x, %b)
%z: f32[4, 4] = aten.add.Tensor(%y, %b)
return mutation "b" = %y
return output "0" = %z
"""


def test_of_buffers_that_change_nothing_is_said() -> None:
    graph = Graph.from_text(BUFFER)
    assert first_chunks(graph, ("z",)) is None
    with pytest.raises(OptionsError):
        first_chunks(Graph.from_text(BUFFER.replace('return mutation "b" = %y', "")), ("nothing",))
