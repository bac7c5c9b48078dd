"""``autopar explain --after PASS``: the graph after any pass; ``--solve``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar.command_line import main
from autopar.errors import OptionsError
from autopar.ir.graph import Graph
from autopar.ir.program import Program
from autopar.pass_graphs import PASSES, PLACED, after_pass
from autopar.plans.plan import Plan

MODEL = """
import torch
from torch import nn


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def make():
    return Stack(), {"x": torch.zeros(8, 64)}
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "stack.py"
    path.write_text(MODEL)
    return f"{path}:make"


def _after(target: str, name: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["explain", target, "--mesh", "2,2", "--stages", "1", "--after", name]) == 0
    return capsys.readouterr().out


def test_the_graph_after_folding_says_which_nodes_are_alike(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = _after(target, "fold", capsys)
    graph = Graph.from_text(text)
    weights = {node.target: graph.classes[node.name] for node in graph.placeholders("param")}
    assert weights["layers.0.0.weight"] == weights["layers.2.0.weight"] != weights["layers.2.0.bias"]
    assert not Graph.from_text(_after(target, "save-activations", capsys)).classes


def test_the_program_of_a_rank_comes_last(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    program = Program.from_text(_after(target, "overlap", capsys))
    assert program.mesh == (2, 2) or program.mesh == (4,)
    assert program.forward.instructions and program.backward.instructions


class Pair(nn.Module):
    """A product and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.log_softmax(self.first(x), -1)[:, 0].mean()


def _plan(**options: object) -> Plan:
    asked = autopar.Options(**options)  # type: ignore[arg-type]
    return autopar.plan(Pair(), (2,), {"x": torch.zeros(8, 16)}, options=asked)


def test_every_pass_has_a_graph_and_each_is_another() -> None:
    plan, batch = _plan(precision="fp16", stages=1), {"x": torch.zeros(8, 16)}
    texts = {name: after_pass(Pair(), batch, name, plan=plan, cluster=None) for name in PASSES}
    for name in PASSES[: PASSES.index("lower")]:
        Graph.from_text(texts[name]).verify()
    assert "aten._log_softmax.default" not in texts["recompute"] and "aten._log_softmax.default" in texts["native"]
    assert texts["trace"] != texts["canonical-views"] and texts["step"] != texts["save-activations"]
    assert "scaled=True" in texts["scaled-loss"] and "scaled=True" not in texts["write-caches"]


def test_what_does_not_run_is_said() -> None:
    batch = {"x": torch.zeros(8, 16)}
    with pytest.raises(OptionsError, match=r"no pass 'folds'.*did you mean 'fold'.*trace, drop-noops"):
        after_pass(Pair(), batch, "folds", plan=_plan(), cluster=None)
    with pytest.raises(OptionsError, match="runs under fp16 alone, and this plan is in fp32"):
        after_pass(Pair(), batch, "scaled-loss", plan=_plan(), cluster=None)


def test_passes_of_placed_graphs_need_a_plan_without_stages(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name in PLACED:
        assert main(["explain", target, "--mesh", "2", "--stages", "2", "--microbatches", "2", "--after", name]) != 0
        assert "this plan has 2 stages" in capsys.readouterr().err


def test_a_choice_is_forbidden(target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", target, "layers.0.0.weight", "--mesh", "2", "--stages", "1", "--solve"]) == 0
    assert "solved again, " in capsys.readouterr().out
    plan = tmp_path / "plan.json"
    _plan().save(plan)
    for asked in (["first.weight", "--solve"], ["--after", "fold"]):
        assert main(["explain", str(plan), *asked]) != 0
        assert "which a plan file does not have" in capsys.readouterr().err
