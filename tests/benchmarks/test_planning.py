"""What planning costs, beside torch's own trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar.torch_internals.joint_graphs import export_joint
from benchmarks import planning, torch_trace
from benchmarks.planning import build_llama3_8b, rows_of, with_trace

FIGURES: dict[str, Any] = {
    "model": "a model",
    "cpu_seconds": 9.0,
    "wall_seconds": 10.0,
    "peak_gib": 1.0,
    "limit_cpu_seconds": 30.0,
    "file": {"bytes": 1e6, "load_seconds": 0.1},
    "phases_cpu_seconds": {"trace": 3.0},
    "predicted_step_seconds": 1.0,
    "status": "optimal",
    "gap": 0.0,
    "excess_bytes": 0,
    "search": {"plan": "1 stages of (8, 8), 1 microbatches, None", "divisions": None, "excluded": {}},
    "peer": {},
}


def traced_apart(monkeypatch: pytest.MonkeyPatch, figures: dict[str, float] | None) -> list[tuple[str, ...]]:
    """Fresh processes print ``figures``; returns what they are asked."""
    asked = list[tuple[str, ...]]()

    def measured(*words: str) -> dict[str, float] | None:
        asked.append(words)
        return figures

    monkeypatch.setattr(planning, "measured_apart", measured)
    return asked


def test_planning_is_told_as_a_multiple_of_torchs_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = traced_apart(monkeypatch, {"torch_trace_cpu_seconds": 6.0})
    figures = with_trace("llama3-8b", FIGURES, 60.0)
    assert asked == [("benchmarks.planning", "--trace", "llama3-8b", "--stop", "60.0")]
    assert figures == {**FIGURES, "torch_trace_cpu_seconds": 6.0}
    rows = rows_of("llama3-8b", figures)
    assert ("  torch's own trace; planning takes 1.50 times as long", "6.0", "", "", "", "") in rows
    assert [row for row in rows if "torch" not in row[0]] == rows_of("llama3-8b", FIGURES)


@pytest.mark.parametrize(
    ("name", "figures"), [("llama3-8b-bf16", FIGURES), ("gpt2", {"model": "a model", "stopped_after_seconds": 60.0})]
)
def test_other_cases_and_stopped_ones_have_no_yardstick(
    name: str, figures: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = traced_apart(monkeypatch, {"torch_trace_cpu_seconds": 6.0})
    assert with_trace(name, figures, 60.0) == figures and not asked


def test_a_trace_that_was_stopped_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    traced_apart(monkeypatch, None)
    assert with_trace("gpt2", FIGURES, 60.0) == FIGURES


def test_torch_traces_forward_and_backward_of_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = list[torch.fx.GraphModule]()

    def kept(*args: Any) -> torch.fx.GraphModule:
        graphs.append(export_joint(*args))
        return graphs[-1]

    monkeypatch.setattr(torch_trace, "export_joint", kept)
    for layers in (1, 2):
        model, batch = build_llama3_8b(layers)
        assert torch_trace.trace_seconds(model, batch) > 0
    products = [[str(node.target) for node in graph.graph.nodes].count("aten.mm.default") for graph in graphs]
    # Seven products of weights in each layer, one for the logits; each with two gradients.
    assert products == [3 * 8, 3 * 15]
