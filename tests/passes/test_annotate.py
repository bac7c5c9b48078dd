"""Annotation and pruning, text in, text out: the strategies of small graphs."""

from __future__ import annotations

from functools import partial

import pytest

from autopar.ir.annotation_text import parse_strategy
from autopar.ir.graph import Graph
from autopar.ir.node import Node, Value
from autopar.passes.annotate import annotate as annotating
from autopar.passes.annotate.annotate import annotate, rule_sources
from autopar.passes.annotate.prune import live_placements
from autopar.passes.recompute.saved_values import save_activations
from autopar.passes.rule_language.compose import compose
from autopar.passes.rule_language.registry import OpCall
from tests.helpers.pass_text import check


def strategies(text: str, mesh: tuple[int, ...]) -> dict[str, list[str]]:
    """The strategies of each node, operands and results as text."""
    graph = annotate(save_activations(Graph.from_text("graph()\n" + text)), mesh)
    return {name: [str(strategy).strip() for strategy in found] for name, found in graph.strategies.items()}


CHAIN = """
%w: f32[4, 6] = param("w")
%x: f32[8, 4] = input("x")
%y: f32[8, 6] = aten.mm.default(%x, %w)
%z: f32[8, 6] = aten.tanh.default(%y)
return output "0" = %z
"""


def test_one_axis() -> None:
    check(
        partial(annotate, mesh=(2,)),
        "graph()\n" + CHAIN,
        """
        graph()
        %w: f32[4, 6] = param("w")
          | -> (R)
          | -> (S(0))
          | -> (S(1))
        %x: f32[8, 4] = input("x")
          | -> (R)
          | -> (S(0))
          | -> (S(1))
        %y: f32[8, 6] = aten.mm.default(%x, %w)
          | (R) (R) -> (R)
          | (S(0)) (R) -> (S(0))
          | (S(1)) (S(0)) -> (P(sum))
          | (R) (S(1)) -> (S(1))
        %z: f32[8, 6] = aten.tanh.default(%y)
          | (R) -> (R)
          | (S(0)) -> (S(0))
          | (S(1)) -> (S(1))
        return output "0" = %z
        """,
    )


def test_two_axes_are_one_after_the_other() -> None:
    """A strategy of two axes is one of each; the inner axis shards what the outer one left."""
    one, two = strategies(CHAIN, (2,)), strategies(CHAIN, (2, 2))
    assert {name: len(found) for name, found in two.items()} == {name: len(found) ** 2 for name, found in one.items()}
    assert two["y"][6:10] == [
        "(S(0),S(1)) (R,S(0)) -> (S(0),P(sum))",
        "(S(0),R) (R,S(1)) -> (S(0),S(1))",
        "(S(1),R) (S(0),R) -> (P(sum),R)",
        "(S(1),S(0)) (S(0),R) -> (P(sum),S(0))",
    ]


def test_an_axis_of_one_device_shards_nothing() -> None:
    assert strategies(CHAIN, (2, 1))["z"] == ["(R,R) -> (R,R)", "(S(0),R) -> (S(0),R)", "(S(1),R) -> (S(1),R)"]


def test_a_dim_shorter_than_the_axis_is_sharded_only_at_rest() -> None:
    """Three rows leave the fourth device none: no operation runs so. Six columns leave it none either (2, 2, 2, 0). A
    parameter may be stored so."""
    found = strategies(CHAIN.replace("8", "3"), (4,))
    assert found["w"] == ["-> (R)", "-> (S(0))", "-> (S(1))"]
    assert found["x"] == ["-> (R)", "-> (S(1))"]
    assert found["y"] == ["(R) (R) -> (R)", "(S(1)) (S(0)) -> (P(sum))"]
    assert found["z"] == ["(R) -> (R)"]


def test_a_dim_behind_another_is_sharded_through_a_reshape() -> None:
    """A sequence sharded, then flattened with the batch: ``S(0/8)``, the rows of each of 8 samples."""
    found = strategies(
        """
        %w: f32[4, 12] = param("w")
        %x: f32[8, 6, 4] = input("x")
        %f: f32[48, 4] = aten.reshape.default(%x, [48, 4])
        %y: f32[48, 12] = aten.mm.default(%f, %w)
        return output "0" = %y
        """,
        (2,),
    )
    assert found["f"] == ["(R) -> (R)", "(S(0)) -> (S(0))", "(S(1)) -> (S(0/8))", "(S(2)) -> (S(1))"]
    assert found["y"] == [
        "(R) (R) -> (R)",
        "(S(0)) (R) -> (S(0))",
        "(S(1)) (S(0)) -> (P(sum))",
        "(R) (S(1)) -> (S(1))",
        "(S(0/8)) (R) -> (S(0/8))",
    ]


REDUCED = """
%x: f32[8, 6, 4] = input("x")
%m: f32[6] = buffer("m")
%a: f32[8, 6, 4] = aten.mul.Tensor(%x, %x)
%t: f32[6, 8, 4] = aten.permute.default(%a, [1, 0, 2])
%r: f32[6] = aten.sum.dim_IntList(%t, [1, 2])
%e: f32[6] = aten.exp.default(%r)
%s: f32[6] = aten.add.Tensor(%e, %m)
return output "0" = %s
"""


def test_placements_flow_through_views_and_pointwise_operations() -> None:
    found = strategies(REDUCED, (2,))
    assert found["m"] == ["-> (R)"]
    assert found["t"] == ["(R) -> (R)", "(S(0)) -> (S(1))", "(S(1)) -> (S(0))", "(S(2)) -> (S(2))"]
    assert found["r"] == ["(R) -> (R)", "(S(0)) -> (S(0))", "(S(1)) -> (P(sum))", "(S(2)) -> (P(sum))"]
    assert found["e"] == ["(R) -> (R)", "(S(0)) -> (S(0))"]
    assert found["s"] == ["(R) (R) -> (R)", "(S(0)) (S(0)) -> (S(0))"]


BACKWARD = """
%w: f32[4, 6] = param("w")
%x: f32[8, 4] = {kind}("x")
%one: f32[8, 6] = tangent("0")
%y: f32[8, 6] = aten.mm.default(%x, %w)
%z: f32[8, 6] = aten.tanh.default(%y)
backward %g: f32[8, 6] = aten.tanh_backward.default(%one, %z)
backward %xt: f32[4, 8] = aten.permute.default(%x, [1, 0])
backward %dw: f32[4, 6] = aten.mm.default(%xt, %g)
return output "0" = %z
return gradient "w" = %dw
"""


def test_a_saved_value_rests_where_it_is_made_or_used() -> None:
    found = strategies(BACKWARD.format(kind="input"), (2,))
    assert found["z_rest"] == ["(R) -> (R)", "(S(0)) -> (S(0))", "(S(1)) -> (S(1))"]
    assert found["dw"][2] == "(S(1)) (S(0)) -> (P(sum))"


POINTWISE = """
%x: f32[8, 4] = {kind}("x")
%y: f32[8, 4] = aten.tanh.default(%x)
%z: f32[8, 4] = aten.mul.Tensor(%y, %y)
return output "0" = %z
"""


def test_what_no_costly_operation_wants_is_left_out() -> None:
    """An input can be had sharded, and the chain follows; a buffer cannot, and nothing in the chain is worth it."""
    assert len(strategies(POINTWISE.format(kind="input"), (2,))["z"]) == 3
    assert strategies(POINTWISE.format(kind="buffer"), (2,))["z"] == ["(R) (R) -> (R)"]


def live(text: str, offered: dict[str, list[str]]) -> dict[str, set[str]]:
    """The live placements of each value, given the strategies offered to each node on one axis."""
    graph = Graph.from_text("graph()\n" + text)
    found = live_placements(graph, {n: [parse_strategy(f"| {s}") for s in ways] for n, ways in offered.items()})
    return {node.name: set(map(str, found.get(Value(node.name), ()))) for node in graph.nodes}


LINKED = """
%w: f32[8, 8] = param("w")
%x: f32[8, 8] = buffer("x")
%p: f32[8, 8] = aten.tanh.default(%x)
%y: f32[8, 8] = aten.mm.default(%p, %w)
%q: f32[8, 8] = aten.sin.default(%y)
return output "0" = %q
"""


def test_live_is_what_an_anchor_has_and_what_links_to_it() -> None:
    offered = {
        "w": ["-> R", "-> S(0)", "-> S(1)"],
        "x": ["-> R"],
        "p": ["R -> R", "S(0) -> S(0)", "S(1) -> S(1)"],
        "y": ["R R -> R", "S(0) R -> S(0)"],
        "q": ["R -> R", "S(0) -> S(0)", "S(1) -> S(1)"],
    }
    assert live(LINKED, offered) == {"w": set(), "x": {"S(0)"}, "p": {"S(0)"}, "y": {"S(0)"}, "q": {"S(0)"}}


def test_a_strided_shard_of_an_anchor_only_passes_on_what_others_want() -> None:
    offered = {
        "w": ["-> R"],
        "x": ["-> R"],
        "p": ["R -> R", "S(0) -> S(0)", "S(0/2) -> S(0/2)"],
        "y": ["R R -> R", "S(0/2) R -> S(0/2)"],
        "q": ["R -> R", "S(0/2) -> S(0/2)"],
    }
    assert not any(live(LINKED, offered).values())
    assert live(LINKED.replace('buffer("x")', 'input("x")'), {**offered, "x": ["-> R", "-> S(0/2)"]})["q"] == {"S(0/2)"}


def test_a_product_takes_no_partial_sum() -> None:
    """To put off a reduction past a product saves nothing; pointwise linear operations do take it."""
    found = strategies(
        """
        %w: f32[4, 6] = param("w")
        %v: f32[6, 6] = param("v")
        %x: f32[8, 4] = input("x")
        %y: f32[8, 6] = aten.mm.default(%x, %w)
        %n: f32[8, 6] = aten.neg.default(%y)
        %z: f32[8, 6] = aten.mm.default(%n, %v)
        return output "0" = %z
        """,
        (2,),
    )
    assert "(P(sum)) -> (P(sum))" in found["n"]
    assert not any(strategy.startswith("(P(sum))") for strategy in found["z"])


def test_where_rules_come_from() -> None:
    graph = Graph.from_text("graph()\n" + CHAIN)
    assert rule_sources(graph, (2,)) == {"aten.mm.default": ("written",), "aten.tanh.default": ("written",)}


LAYERS = """
%v: f32[8, 8] = param("layers.0.up.weight")
%w: f32[8, 8] = param("layers.1.up.weight")
%u: f32[8] = constant("u")
%x: f32[8] = constant("x")
%a: f32[8] = aten.tanh.default(%u)  @layers.0.act
%b: f32[8] = aten.tanh.default(%x)  @layers.1.act
%c: f32[8] = aten.mv.default(%w, %b)
return output "0" = %a
return output "1" = %c
"""


def test_equal_nodes_of_layers_share_what_is_live() -> None:
    """Only the second layer's result is read by a product; the shard that this makes live is offered to both."""
    graph = annotate(Graph.from_text("graph()\n" + LAYERS), (2,))
    assert graph.strategies["a"] == graph.strategies["b"]
    assert "(S(0)) -> (S(0))" in map(str, graph.strategies["a"])


RESHAPED = """
%x: f32[8, 4, 6] = input("x")
%w: f32[6, 6] = param("w")
%rows: f32[32, 6] = aten.reshape.default(%x, [32, 6])
%y: f32[32, 6] = aten.mm.default(%rows, %w)
%z: f32[8, 4, 6] = aten.reshape.default(%y, [8, 4, 6])
return output "0" = %z
"""


@pytest.mark.parametrize("text", [CHAIN, RESHAPED])
@pytest.mark.parametrize("mesh", [(2,), (1, 2), (4, 1), (1, 2, 1)])
def test_one_axis_among_axes_of_one_device_has_what_is_composed(
    text: str, mesh: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Composing on the whole mesh gives the same strategies in the same order as those of the axis alone."""
    found = strategies(text, mesh)
    factors = annotating.reshape_factors(Graph.from_text("graph()\n" + text), mesh)
    offers = []

    def composed(single: object, wanted: annotating.Wanted, axis: int, axes: int, call: OpCall, node: Node) -> object:
        offers.append(call)
        return compose(call, mesh, partial(annotating._live_offers, factors=factors, wanted=wanted), ((),) * axes)

    monkeypatch.setattr(annotating, "_on_one_axis", composed)
    assert strategies(text, mesh) == found and offers
