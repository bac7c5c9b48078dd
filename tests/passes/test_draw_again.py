"""Backward draws again what it would read of saved random numbers."""

from __future__ import annotations

from autopar.ir.graph import Graph
from autopar.ir.node import SAVED_ACTIVATION
from autopar.layout import Layout
from autopar.passes.recompute.draw_again import DrawAgain, draw_again
from autopar.passes.recompute.saved_values import saved_values
from autopar.planner.step_graphs import step_graph
from tests.helpers.models import Case, text
from tests.helpers.pass_text import check
from tests.helpers.planning import planned, requested

DRAW = 'autopar.bernoulli.default(%random, [4, 4], 0.9, dtype=torch.bool, device=device("cpu"), place=2)'
BEFORE = f"""graph()
    %random: i64[4] = random("random")
    %x: f32[4, 4] = input("x")
    %w: f32[4, 4] = param("w")
    %d: f32[4, 4] = tangent("0")
    %m: b8[4, 4] = {DRAW}
    %k: f32[4, 4] = aten._to_copy.default(%m, dtype=torch.float32)
    %h: f32[4, 4] = aten.mul.Tensor(%x, %k)
    %y: f32[4, 4] = aten.mm.default(%h, %w)
    backward %e: f32[4, 4] = aten.mul.Tensor(%d, %k)
    backward %g: f32[4, 4] = aten.mm.default(%h, %e)
    backward %c: f32[4, 4] = aten._to_copy.default(%m, dtype=torch.float32)
    backward %f: f32[4, 4] = aten.mul.Tensor(%g, %c)
    return output "0" = %y
    return gradient "w" = %f
    """


def test_one_copy_before_what_reads_it() -> None:
    cast = "aten._to_copy.default(%{}, dtype=torch.float32)\n"
    copies = f"backward %m_redrawn: b8[4, 4] = {DRAW}\n    backward %k_redrawn: f32[4, 4] = {cast.format('m_redrawn')}"
    after = BEFORE.replace("backward %e: f32[4, 4] = aten.mul.Tensor(%d, %k)", "backward %e: f32[4, 4] = EDGE")
    after = after.replace("backward %e", f"{copies}    backward %e").replace("EDGE", "aten.mul.Tensor(%d, %k_redrawn)")
    after = after.replace(f"%c: f32[4, 4] = {cast.format('m')}", f"%c: f32[4, 4] = {cast.format('m_redrawn')}")
    check(DrawAgain(), BEFORE, after)
    assert [str(value) for value in saved_values(draw_again(Graph.from_text(BEFORE)))] == ["%h"]


def test_again_changes_nothing_more() -> None:
    graph = draw_again(Graph.from_text(BEFORE))
    assert draw_again(graph).to_text() == graph.to_text()


def test_what_is_not_made_of_draws_alone_is_saved() -> None:
    """Numbers of a normal distribution are not drawn in compiled code."""
    normal = BEFORE.replace(DRAW, DRAW.replace("bernoulli", "normal").replace(", 0.9", "").replace("bool", "float32"))
    normal = normal.replace("%m: b8", "%m: f32")
    mixed = BEFORE.replace("%k: f32[4, 4] = aten._to_copy.default(%m, dtype=torch.float32)", "%k: f32[4, 4] = SUM")
    mixed = mixed.replace("SUM", "aten.mul.Tensor(%m, %x)").replace("aten._to_copy.default(%m, dty", "aten.neg(%d, dty")
    for text_of_graph in (normal, mixed.replace("aten.neg(%d, dtype=torch.float32)", "aten.neg.default(%d)")):
        assert draw_again(Graph.from_text(text_of_graph)).to_text() == Graph.from_text(text_of_graph).to_text()


def dropping_gpt2(length: int = 16, layers: int = 2) -> Case:
    """A GPT-2 with dropout on its stream, in its attention, and on its embeddings."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers, n_embd=48, n_head=4, vocab_size=257, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config), text(length=length)


def saved_draws(graph: Graph) -> list[str]:
    saved = (node for node in graph.nodes if node.op == SAVED_ACTIVATION)
    return [node.name for node in saved if graph[node.operands[0].node].op == "autopar.bernoulli.default"]


def test_compiled_steps_save_no_masks() -> None:
    graphs = {}
    for compiled in (False, True):
        request = requested(dropping_gpt2, (2,), compile=compiled)
        graphs[compiled] = step_graph(request.graph, request.loss, request.batch)
    assert len(saved_draws(graphs[False])) == 7 and saved_draws(graphs[True]) == []
    names = [node.name for node in graphs[True].nodes if node.op == "autopar.bernoulli.default"]
    assert len(names) == 14


def test_a_plan_of_a_compiled_step_keeps_no_masks_and_prices_no_draws_apart() -> None:
    """What is kept is smaller by the masks, a byte an element; draws are parts of kernels."""
    layout = Layout(data=2)
    plans = {compiled: planned(dropping_gpt2, (2,), compile=compiled, layout=layout) for compiled in (False, True)}
    held = {key: sum(h.bytes for h in plan.holdings if "bernoulli" in h.name) for key, plan in plans.items()}
    # Of 4 samples on each device: on the embedding and twice a layer, and inside of attention.
    assert held == {False: 4 * (5 * 16 * 48 + 2 * 4 * 16 * 16), True: 0}
    assert plans[True].predicted.peak_bytes <= plans[False].predicted.peak_bytes - held[False] // 2
    seconds = {key: sum(x.seconds for x in plan.lines if "bernoulli" in x.name) for key, plan in plans.items()}
    # A part of a launch each; uncompiled a launch of its own and 128 bytes an element.
    assert seconds[True] < 0.5 * seconds[False]
