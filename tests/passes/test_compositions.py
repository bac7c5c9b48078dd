"""What graphs of one search share of their strategies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from autopar.errors import OperatorError
from autopar.ir.graph import Graph
from autopar.ir.placements import AxisStrategy, Shares, Strategy
from autopar.passes.annotate import compositions as composing
from autopar.passes.annotate.annotate import annotate
from autopar.passes.annotate.compositions import Compositions
from autopar.passes.rule_language.compose import compose
from autopar.passes.rule_language.registry import OpCall

MESH = (2, 2)
# The products make its rows and columns live; in the other graph nothing does.
TEXT = """graph()
%x: f32[8, 4] = input("x")
%w: f32[4, 6] = param("w")
%v: f32[6, 4] = param("v")
%y: f32[8, 6] = aten.mm.default(%x, %w)
%z: f32[8, 6] = aten.tanh.default(%y)
%u: f32[8, 4] = aten.mm.default(%z, %v)
return output "0" = %u
"""
OTHER = """graph()
%p: f32[8, 6] = param("p")
%z: f32[8, 6] = aten.tanh.default(%p)
return output "0" = %z
"""


@pytest.fixture
def composed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the calls of each operation were composed."""
    count = Counter[str]()

    def counted(
        call: OpCall, mesh: tuple[int, ...], offer: Callable[[OpCall], tuple[AxisStrategy, ...]], shares: Shares = ()
    ) -> tuple[Strategy, ...]:
        count[call.op] += 1
        return compose(call, mesh, offer, shares)

    monkeypatch.setattr(composing, "compose", counted)
    return count


def test_equal_calls_of_graphs_are_composed_once(composed: Counter[str]) -> None:
    known = Compositions()
    first = annotate(Graph.from_text(TEXT), MESH, compositions=known)
    before = composed.copy()
    renamed = annotate(Graph.from_text(TEXT.replace("%z", "%other")), MESH, compositions=known)
    assert before["aten.mm.default"] > 0 and composed == before
    assert renamed.strategies["other"] == first.strategies["z"]


@pytest.mark.parametrize("first, second", [(TEXT, OTHER), (OTHER, TEXT)])
def test_what_is_live_elsewhere_is_not_taken_over(first: str, second: str) -> None:
    """The call of tanh is the same, and its live placements are not."""
    known, graph = Compositions(), Graph.from_text(second)
    annotate(Graph.from_text(first), MESH, compositions=known)
    assert annotate(graph, MESH, compositions=known).strategies == annotate(graph, MESH).strategies
    assert annotate(Graph.from_text(first), MESH).strategies["z"] != annotate(graph, MESH).strategies["z"]


def test_meshes_are_told_apart() -> None:
    known, graph = Compositions(), Graph.from_text(TEXT)
    annotate(graph, MESH, compositions=known)
    assert annotate(graph, (4, 2), compositions=known).strategies == annotate(graph, (4, 2)).strategies


def test_no_more_are_kept_than_allowed(composed: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(composing, "KEPT_CALLS", 1)
    known, graph = Compositions(), Graph.from_text(TEXT)
    annotate(graph, MESH, compositions=known)
    before = composed.total()
    annotate(graph, MESH, compositions=known)
    assert composed.total() > before


def test_errors_name_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise OperatorError("no rule")

    monkeypatch.setattr(composing, "compose", failing)
    with pytest.raises(OperatorError, match=r"no rule.*in the model"):
        annotate(Graph.from_text(OTHER), MESH)
