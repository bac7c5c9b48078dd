"""Small weights that a phase gathers travel in messages of several; large ones, and those of other axes, do not."""

from __future__ import annotations

from collections import Counter

import pytest

from autopar.cluster.description import Cluster
from autopar.cost import collective_seconds
from autopar.cost.collective.collective import copying_seconds
from autopar.ir import weight_messages
from autopar.ir.assignment import Assignment, ParameterPlacement
from autopar.ir.graph import Graph
from autopar.ir.node import Value
from autopar.ir.placements import Placements, Strategy, parse_placements
from autopar.ir.program import Instruction, Program, Section
from autopar.passes.annotate.annotate import annotate
from autopar.passes.lower.lower import Lowering, lower
from autopar.passes.lower.overlap import overlap
from autopar.passes.recompute.saved_values import save_activations
from autopar.placement.prices import Prices
from tests.helpers.planning import Setting, requested, setting
from tests.zoo.check import random_assignment

SCALED = """graph()
%a: f32[8] = param("a")
%w: f32[8, 8] = param("w")
%b: f32[8] = param("b")
%c: f32[8] = param("c")
%x: f32[8, 8] = input("x")
%one: f32[] = tangent("0")
%h: f32[8, 8] = aten.mul.Tensor(%x, %a)
%k: f32[8, 8] = aten.mm.default(%h, %w)
%l: f32[8, 8] = aten.mul.Tensor(%k, %b)
%y: f32[8, 8] = aten.mul.Tensor(%l, %c)
%loss: f32[] = aten.sum.default(%y)
backward %dy: f32[8, 8] = aten.expand.default(%one, [8, 8])
backward %dl: f32[8, 8] = aten.mul.Tensor(%dy, %c)
backward %dk: f32[8, 8] = aten.mul.Tensor(%dl, %b)
backward %ht: f32[8, 8] = aten.permute.default(%h, [1, 0])
backward %dw: f32[8, 8] = aten.mm.default(%ht, %dk)
return output "0" = %loss
return gradient "w" = %dw
"""
REPLICATED, ROWS, COLUMNS, SUM = (parse_placements(text) for text in ("R", "S(0)", "S(1)", "P(sum)"))
SPLIT = {"one": REPLICATED, "loss": SUM, "ht": COLUMNS, "dw": SUM}


def sharded(graph: Graph, at: str) -> Assignment:
    """Samples and weights over one axis of two devices, the weight ``at`` replicated."""
    strategies = {}
    places: dict[str, Placements] = {node.name: REPLICATED for node in graph.placeholders("param")}
    for node in graph.nodes:
        if node.op != "param":
            out = SPLIT.get(node.name, ROWS)
            taken = tuple(places.get(v.node) or SPLIT.get(v.node, ROWS) for v in node.operands)
            wanted = Strategy(taken, (out,))
            assert wanted in graph.strategies[node.name], node.name
            strategies[node.name] = wanted
    rests = {name: REPLICATED if name == at else ROWS for name in places}
    return Assignment((2,), strategies, {name: ParameterPlacement(p, p, p) for name, p in rests.items()})


def sections(replicated: str = "") -> tuple[str, str]:
    """The texts of forward and backward."""
    graph = annotate(save_activations(Graph.from_text(SCALED)), (2,))
    prices = Prices.of(Cluster.get("dgx-a100-80gb"), (2,), graph)
    job = Lowering(graph, sharded(graph, replicated), (0,), prices.path, 1 << 20, prices.messages)
    program = lower(job, graph.outputs)
    return str(program.forward), str(program.backward)


@pytest.fixture
def of_256_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages are full with as much as the matrix."""
    monkeypatch.setattr(weight_messages, "MESSAGE_BYTES", 256)
    monkeypatch.setattr(weight_messages, "LEAST_MESSAGES", 1)


@pytest.mark.usefixtures("of_256_bytes")
def test_messages_fill_in_the_order_of_first_uses() -> None:
    forward, backward = sections()
    assert (
        forward
        == """forward(%a, %w, %b, %c, %x):
  %weights = collective.all_gather_bucket([%a, %w], axes=[0], dims=[0, 0], sizes=[8, 8], befores=[1, 1])
  %weights_wait, %weights_wait.1 = collective.wait(%weights)
  %h = aten.mul.Tensor(%x, %weights_wait)
  %k = aten.mm.default(%h, %weights_wait.1)
  %weights_1 = collective.all_gather_bucket([%b, %c], axes=[0], dims=[0, 0], sizes=[8, 8], befores=[1, 1])
  %weights_1_wait, %weights_1_wait.1 = collective.wait(%weights_1)
  %l = aten.mul.Tensor(%k, %weights_1_wait)
  %y = aten.mul.Tensor(%l, %weights_1_wait.1)
  %loss = aten.sum.default(%y)
  %loss_all_reduce = collective.all_reduce(%loss, axes=[0], op="sum")
  %loss_all_reduce_wait = collective.wait(%loss_all_reduce)
  return %loss_all_reduce_wait, %c, %b, %h"""
    )
    assert (
        backward
        == """backward(%c, %b, %h_rest, %one):
  %dy = aten.expand.default(%one, [4, 8])
  %weights = collective.all_gather_bucket([%c, %b], axes=[0], dims=[0, 0], sizes=[8, 8], befores=[1, 1])
  %weights_wait, %weights_wait.1 = collective.wait(%weights)
  %dl = aten.mul.Tensor(%dy, %weights_wait)
  %dk = aten.mul.Tensor(%dl, %weights_wait.1)
  %ht = aten.permute.default(%h_rest, [1, 0])
  %dw = aten.mm.default(%ht, %dk)
  %gradients = collective.reduce_scatter(%dw, axes=[0], op="sum", dim=0, before=1)
  %gradients_wait = collective.wait(%gradients)
  return %gradients_wait"""
    )


def gathers(text: str) -> list[list[str]]:
    """The operands of the gathers of a section, in order."""
    found = (i for i in Section.from_text(text).instructions if "all_gather" in i.op)
    return [[value.node for value in i.operands] for i in found]


def test_large_weights_are_gathered_alone() -> None:
    forward, _ = sections()
    assert gathers(forward) == [["a", "b", "c"], ["w"]], "what is small is no part of their messages"


@pytest.mark.usefixtures("of_256_bytes")
def test_what_is_whole_already_and_what_is_left_alone_is_in_no_message() -> None:
    forward, backward = sections("b")
    assert gathers(forward) == [["a", "w", "c"]], "a rest of an eighth of a message joins the one before"
    assert gathers(backward) == [["c"]]
    assert "all_gather_bucket" not in backward


def test_the_next_message_starts_before_the_wait_for_the_one_before() -> None:
    graph = annotate(save_activations(Graph.from_text(SCALED)), (2,))
    prices = Prices.of(Cluster.get("dgx-a100-80gb"), (2,), graph)
    job = Lowering(graph, sharded(graph, ""), (0,), prices.path, 1 << 20, prices.messages)
    forward = overlap(lower(job, graph.outputs)).forward.instructions
    assert [i.name for i in forward][:3] == ["weights", "w_all_gather", "weights_wait"]


def weight_gathers(program: Program) -> list[tuple[Instruction, list[str]]]:
    """The gathers of weights in forward and backward that need nothing but inputs, with the weights' names."""
    names = {slot.name for slot in program.placeholders if slot.kind == "param"}
    return [
        (i, [value.node for value in i.operands])
        for section in (program.forward, program.backward)
        for i in section.instructions
        if i.op.startswith("collective.all_gather") and {value.node for value in i.operands} <= names
    ]


@pytest.mark.parametrize("mesh", [(2,), (2, 2), (3,)])
def test_messages_hold_what_is_priced_so(mesh: tuple[int, ...]) -> None:
    """Whatever the assignment, messages hold small weights only."""
    found = setting(requested("stack", mesh))
    messages, types = found.prices.messages, {n.name: n.type for n in found.graph.placeholders("param")}
    together = 0
    for seed in range(4):
        program = found.program(random_assignment(found.graph, mesh, seed))
        for instruction, members in weight_gathers(program):
            if instruction.op.endswith("_bucket"):
                assert len(members) > 1 and all(messages.takes(types[name]) for name in members)
                together += len(members)
    assert together > 10


def fully_sharded(found: Setting) -> Program:
    """ZeRO-3 on one axis: operations as under data parallelism, weights in shards."""
    graph = found.graph
    whole = parse_placements("R")
    strategies, parameters = {}, {}
    for node in graph.nodes:
        offered = graph.strategies[node.name]
        if node.op == "param":
            shard = next((s.outputs[0] for s in offered if s.outputs[0] == ROWS), whole)
            parameters[node.name] = ParameterPlacement(shard, shard, shard)
        else:
            strategies[node.name] = next(s for s in offered if all(p == whole for p in (*s.inputs, *s.outputs)))
    return found.program(Assignment((2,), strategies, parameters))


def test_a_pass_pays_as_many_latencies_as_it_sends_messages() -> None:
    found = setting(requested("stack", (2,)))
    prices, program = found.prices, fully_sharded(found)
    types = {node.name: node.type for node in found.graph.placeholders("param")}
    cluster = prices.cluster

    def alone(nbytes: int) -> float:
        return collective_seconds(cluster, (2,), "all_gather", (0,), nbytes)

    for section, phase in ((program.forward, "forward"), (program.backward, "backward")):
        sent = [i for i, _ in weight_gathers(program) if i in section.instructions]
        small = [v.node for i in sent for v in i.operands if prices.messages.takes(types[v.node])]
        large = [i for i in sent if not prices.messages.takes(types[i.operands[0].node])]
        assert Counter(small).most_common(1)[0][1] == 1, "each is gathered once in a phase"
        seconds = {name: prices.table(types[name], sent=phase).cost(ROWS, REPLICATED) for name in small}  # type: ignore[arg-type]
        copies = sum(copying_seconds(cluster.device, int(types[name].bytes)) for name in small)
        messages = [sum(int(types[v.node].bytes) for v in i.operands) for i in sent if i not in large]
        assert len(messages) < len(small) / 2
        # The last message may be less than full, and others are a little more.
        paid, due = sum(seconds.values()) - copies, sum(map(alone, messages))
        assert due - alone(0) <= paid <= due + alone(0), phase


def test_a_message_holds_a_quarter_of_the_weights_at_most() -> None:
    graph = Graph.from_text(SCALED)
    messages = weight_messages.WeightMessages.of(graph)
    assert messages.limit == (256 + 3 * 32) / 4
    assert dict(messages.small) == {"forward": 3 * 32, "backward": 2 * 32}
    small, large = graph.type_of(Value("a")), graph.type_of(Value("w"))
    assert messages.takes(small) and not messages.takes(large)
    assert messages.message_bytes(small, 32, "forward") == 88
    assert messages.message_bytes(small, 32, "backward") == 64, "no more than all that is sent"
    assert messages.message_bytes(small, 16, "backward") == 32, "of which another axis has a half"
    assert not weight_messages.WeightMessages().takes(small)
