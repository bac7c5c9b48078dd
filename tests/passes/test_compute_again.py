"""Backward computes again what compiled code would not store."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest

from autopar.cluster.description import Cluster
from autopar.ir.graph import Graph
from autopar.ir.program import Program
from autopar.options import Options
from autopar.passes.recompute.compute_again import ANEW, ComputeAgain, compute_again
from autopar.passes.recompute.saved_values import saved_values
from autopar.planner.plan_graph import check_same_graph, compiled_as_planned
from autopar.planner.prepare import prepare
from autopar.runtime.execute.fused_recomputation import recomputed_in_backward
from tests.helpers.models import make
from tests.helpers.pass_text import check
from tests.helpers.planning import planned, requested, setting

HEAD = """graph()
    %x: f32[4, 4] = input("x")
    %w: bf16[4, 4] = param("w")
    %d: f32[4, 4] = tangent("0")
    """
GATED = """%h: bf16[4, 4] = aten.mm.default(%x, %w)  @h.0.up
    %t: bf16[4, 4] = aten.tanh.default(%h)  @h.0
    %u: bf16[4, 4] = aten.add.Tensor(%t, 1.0)  @h.0
    %p: bf16[4, 4] = aten.mul.Tensor(%u, %h)  @h.0
    %y: bf16[4, 4] = aten.mm.default(%p, %w)  @h.0.down
    """
GATED_BACKWARD = """backward %a: f32[4, 4] = aten.mul.Tensor(%d, {u})  @h.0
    backward %b: f32[4, 4] = aten.mul.Tensor(%a, {t})  @h.0
    backward %c: f32[4, 4] = aten.mul.Tensor(%b, %h)  @h.0
    backward %g: f32[4, 4] = aten.mm.default(%p, %c)  @h.0.down
    return output "0" = %y
    return gradient "w" = %g
    """
# A norm's input is a sum in 32 bits, of a stream and a product in 16.
RESIDUAL = """%h: bf16[4, 4] = aten.mm.default(%x, %w)  @h.0.up
    %r: f32[4, 4] = aten.add.Tensor(%x, %h)  @h.0
    %s: f32[4, 1] = aten.mean.dim(%r, [1], True)  @h.0.norm
    %n: f32[4, 4] = aten.mul.Tensor(%r, %s)  @h.0.norm
    %y: bf16[4, 4] = aten.mm.default(%n, %w)  @h.0.down
    """
RESIDUAL_BACKWARD = """backward %a: f32[4, 4] = aten.mul.Tensor(%d, {r})  @h.0.norm
    backward %b: f32[4, 4] = aten.mul.Tensor(%a, %s)  @h.0.norm
    backward %g: f32[4, 4] = aten.mm.default(%n, %b)  @h.0.down
    return output "0" = %y
    return gradient "w" = %g
    """


def test_an_activation_function_is_computed_again_from_the_product() -> None:
    before = HEAD + GATED + GATED_BACKWARD.format(u="%u", t="%t")
    copies = f"""backward %t{ANEW}: bf16[4, 4] = aten.tanh.default(%h)  @h.0
    backward %u{ANEW}: bf16[4, 4] = aten.add.Tensor(%t{ANEW}, 1.0)  @h.0
    """
    check(ComputeAgain(), before, HEAD + GATED + copies + GATED_BACKWARD.format(u=f"%u{ANEW}", t=f"%t{ANEW}"))
    assert [str(value) for value in saved_values(compute_again(Graph.from_text(before)))] == ["%h", "%p"]


def test_a_product_of_fewer_bytes_is_saved_in_place_of_a_sum() -> None:
    before = HEAD + RESIDUAL + RESIDUAL_BACKWARD.format(r="%r")
    copy = f"backward %r{ANEW}: f32[4, 4] = aten.add.Tensor(%x, %h)  @h.0\n    "
    check(ComputeAgain(), before, HEAD + RESIDUAL + copy + RESIDUAL_BACKWARD.format(r=f"%r{ANEW}"))


def test_again_changes_nothing_more() -> None:
    graph = compute_again(Graph.from_text(HEAD + GATED + GATED_BACKWARD.format(u="%u", t="%t")))
    assert compute_again(graph).to_text() == graph.to_text()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("%h: bf16", "%h: f32"),  # No gain.
        ("%r)  @h.0.norm\n    backward %b", "%r)  @h.1.norm\n    backward %b"),  # Another layer's.
        ('return output "0" = %y', 'return output "0" = %y\n    return output "1" = %r'),
        ("aten.mul.Tensor(%d, %r)", "aten.mm.default(%d, %r)"),  # A product's operand.
    ],
)
def test_what_stays_saved(old: str, new: str) -> None:
    text = HEAD + RESIDUAL + RESIDUAL_BACKWARD.format(r="%r")
    assert old in text
    graph = Graph.from_text(text.replace(old, new))
    assert compute_again(graph).to_text() == graph.to_text()


def lowered(compiled: bool, precision: Any) -> tuple[Program, Graph]:
    """The program of a Llama's plan on one device, and the graph of its step."""
    options: Any = {"compile": compiled, "precision": precision, "stages": 1, "microbatches": 1, "mesh_search": False}
    found = setting(requested("llama", (1,), **options))
    plan = planned("llama", (1,), **options)
    return found.program(plan.assignment({n.target: n.name for n in found.graph.placeholders("param")})), found.graph


def saved_bytes(program: Program, graph: Graph) -> int:
    """The bytes of what a program on one device saves, without placeholders."""
    kinds = {node.name: node for node in graph.nodes}
    sizes = {}
    for value in program.forward.outputs[len(program.results) :]:
        if value is not None and value.node in kinds and not kinds[value.node].is_placeholder:
            kind = graph.type_of(value)
            sizes[value] = prod(map(int, kind.shape)) * kind.dtype.itemsize
    return sum(sizes.values())


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_runtime_saves_what_the_plan_counts(precision: Any) -> None:
    """Its own transformation finds nothing more to drop in the program of a plan for compiled steps."""
    sizes = {}
    for compiled in (False, True):
        program, graph = lowered(compiled, precision)
        sizes[compiled] = [saved_bytes(each, graph) for each in (program, recomputed_in_backward(program))]
    assert sizes[True][0] == sizes[True][1] == sizes[False][1] < 0.8 * sizes[False][0]


def test_plans_count_less_and_say_so() -> None:
    options: Any = {"precision": "bf16", "stages": 1, "microbatches": 1, "mesh_search": False}
    plans = {how: planned("llama", (1,), compile=how, **options) for how in (False, True)}
    assert plans[True].predicted.activation_bytes < 0.8 * plans[False].predicted.activation_bytes
    names = {how: [name for name in plan.nodes if name.endswith(ANEW)] for how, plan in plans.items()}
    assert names[True] and not names[False]


def test_a_plan_is_read_with_the_graph_that_it_was_made_for() -> None:
    """Whatever the options of the run, as for old plans, which save all."""
    model, batch = make("llama")
    base = prepare(model, (), batch, device="cpu", loss_fn=None, training=True)
    for compiled in (False, True):
        plan = planned("llama", (1,), compile=compiled, stages=1, mesh_search=False)
        prepared = compiled_as_planned(base, plan, Options(compile=not compiled), Cluster.get("local"))
        assert prepared.compiled == compiled and check_same_graph(plan, prepared)
