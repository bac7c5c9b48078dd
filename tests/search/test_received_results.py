"""Lines of values that stages receive, of operations with several results."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.tensor import Partial

from autopar.ir.graph import Graph
from autopar.ir.placements import Placements
from autopar.passes.pipeline.cut_candidates import CutCandidate, crossing_bytes
from autopar.search import pipeline
from autopar.search.schedules import chunks
from tests.helpers.planning import planned


def _before_attention(graph: Graph, least: int = 1) -> tuple[CutCandidate, ...]:
    return tuple(c for c in crossing_bytes(graph) if graph[c.name].op.startswith("autopar.attention"))


def _another_wire(kind: Any, home: Placements, needs: Any, ends: Any, link: Any) -> Placements:
    """A placement that no receiver needs, so that each moves what it receives."""
    wanted = {place for _, place in needs}
    states = [place for place in ends[0].table(kind).states if not any(isinstance(each, Partial) for each in place)]
    return next((place for place in states if place not in wanted), states[0])


def test_a_gradient_of_attention_that_is_received_and_moved_has_the_name_of_its_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The gradients of keys and values are results 1 and 2 of one operation."""
    monkeypatch.setattr(pipeline, "cut_candidates", _before_attention)
    monkeypatch.setattr(chunks, "best_wire", _another_wire)
    plan = planned("llama", (2, 2), stages=2, microbatches=2, schedule="1f1b")
    plan.validate()
    assert plan.pipeline is not None
    results = {edge.name for edge in plan.pipeline.wires if edge.name.endswith(("_result1", "_result2"))}
    assert results, "gradients of keys and values cross"
    moved = {line.name for line in plan.lines if line.kind == "reshard" and line.phase == "backward"}
    assert any(name.rpartition("_result")[0] in moved for name in results)
