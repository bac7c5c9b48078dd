"""Cutting a graph into chunks: what the chunks say, and that they compute what the whole does, wherever it is cut."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache, partial

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

from autopar.errors import OptionsError
from autopar.ir.graph import Graph
from autopar.ir.node import Value
from autopar.ir.staged_graph import Edge
from autopar.passes.normalise.standard import normalise
from autopar.passes.pipeline.cut import cut, split_backward
from autopar.passes.pipeline.cut_candidates import cut_candidates, cuts_for_owners
from autopar.passes.pipeline.microbatch import microbatch
from autopar.planner.step_graphs import step_graph
from autopar.trace.tracer import trace
from tests.helpers import models
from tests.helpers.lowering import plain
from tests.helpers.microbatches import run_microbatches
from tests.helpers.pass_text import check
from tests.helpers.planning import requested
from tests.helpers.stage_run import check_staged, run_chunks
from tests.zoo.check import Case, compare, make_case
from tests.zoo.hugging_face import FAMILIES

transformers.logging.set_verbosity_error()

# A skip connection over a chunk (%a), a weight in two chunks (w), a mask of data alone, a view, a result used twice.
SKIP = """
graph()
%w: f32[4, 4] = param("w")
%v: f32[4, 4] = param("v")
%idle: f32[1] = param("idle")
%x: f32[2, 4] = input("x")
backward %g: f32[] = tangent("0")
%mask: b8[2, 4] = aten.gt.Scalar(%x, 0.0)
%a: f32[2, 4] = aten.mm.default(%x, %w)
%at: f32[4, 2] = aten.permute.default(%a, [1, 0])
%b: f32[4, 2] = aten.mm.default(%v, %at)
%bt: f32[2, 4] = aten.permute.default(%b, [1, 0])
%c: f32[2, 4] = aten.mul.Tensor(%bt, %mask)
%d: f32[2, 4] = aten.add.Tensor(%c, %a)
%e: f32[2, 4] = aten.mm.default(%d, %w)
%loss: f32[] = aten.sum.default(%e)
backward %ge: f32[2, 4] = aten.expand.default(%g, [2, 4])
backward %dt: f32[4, 2] = aten.permute.default(%d, [1, 0])
backward %gw2: f32[4, 4] = aten.mm.default(%dt, %ge)
backward %wt: f32[4, 4] = aten.permute.default(%w, [1, 0])
backward %gd: f32[2, 4] = aten.mm.default(%ge, %wt)
backward %gbt: f32[2, 4] = aten.mul.Tensor(%gd, %mask)
backward %gb: f32[4, 2] = aten.permute.default(%gbt, [1, 0])
backward %gv: f32[4, 4] = aten.mm.default(%gb, %a)
backward %vt: f32[4, 4] = aten.permute.default(%v, [1, 0])
backward %gat: f32[4, 2] = aten.mm.default(%vt, %gb)
backward %ga2: f32[2, 4] = aten.permute.default(%gat, [1, 0])
backward %ga: f32[2, 4] = aten.add.Tensor(%gd, %ga2)
backward %xt: f32[4, 2] = aten.permute.default(%x, [1, 0])
backward %gw1: f32[4, 4] = aten.mm.default(%xt, %ga)
backward %gw: f32[4, 4] = aten.add.Tensor(%gw2, %gw1)
return output "0" = %loss
return gradient "w" = %gw
return gradient "v" = %gv
return gradient "idle" = none
"""


def _names(graph: Graph) -> list[str]:
    return [node.name for node in graph]


def test_skip_connection_and_tied_weight() -> None:
    graph = Graph.from_text(SKIP)
    staged = cut(graph, ("b", "e"))
    check_staged(staged, graph)
    assert staged.edges == (
        Edge(0, 1, "a"), Edge(1, 0, "ga"), Edge(1, 2, "d"), Edge(2, 1, "gd"),
    )  # fmt: skip
    assert staged.owners == {"w": (0, 2), "v": (1,), "idle": (0,)}
    first, second, last = staged.chunks
    assert "gw1" in _names(first)
    assert "gw2" in _names(last)
    assert not any("gw" in _names(chunk) for chunk in staged.chunks)
    assert "mask_at1" in _names(second), "what depends on data alone is repeated"
    assert "at_at1" in _names(second), "a view is repeated, not sent"
    assert 'return gradient "idle" = none' in first.to_text()


def test_the_graph_of_a_chunk_reads() -> None:
    """The second of three: it takes a value and a gradient, sends as many, and repeats what depends on data alone."""
    check(
        lambda graph: cut(graph, ("b", "e")).chunks[1],
        SKIP,
        """graph()
        %v: f32[4, 4] = param("v")
        %x: f32[2, 4] = input("x")
        %a: f32[2, 4] = receive("a")
        backward %gd: f32[2, 4] = receive("gd")
        %at_at1: f32[4, 2] = aten.permute.default(%a, [1, 0])
        %b: f32[4, 2] = aten.mm.default(%v, %at_at1)
        %bt: f32[2, 4] = aten.permute.default(%b, [1, 0])
        %mask_at1: b8[2, 4] = aten.gt.Scalar(%x, 0.0)
        %c: f32[2, 4] = aten.mul.Tensor(%bt, %mask_at1)
        %d: f32[2, 4] = aten.add.Tensor(%c, %a)
        backward %gbt: f32[2, 4] = aten.mul.Tensor(%gd, %mask_at1)
        backward %gb: f32[4, 2] = aten.permute.default(%gbt, [1, 0])
        backward %gv: f32[4, 4] = aten.mm.default(%gb, %a)
        backward %vt_at1: f32[4, 4] = aten.permute.default(%v, [1, 0])
        backward %gat: f32[4, 2] = aten.mm.default(%vt_at1, %gb)
        backward %ga2: f32[2, 4] = aten.permute.default(%gat, [1, 0])
        backward %ga: f32[2, 4] = aten.add.Tensor(%gd, %ga2)
        return gradient "v" = %gv
        return send "d" = %d
        return send "ga" = %ga
        """,
    )


def test_what_skips_a_chunk_goes_directly() -> None:
    graph = Graph.from_text(SKIP)
    staged = cut(graph, ("b", "d"))
    check_staged(staged, graph)
    assert staged.links() == ((0, 1), (0, 2), (1, 2))
    assert staged.values(0, 2) == ("a",)
    assert staged.values(1, 2) == ("c",)
    values = {name: torch.randn(4, 4) for name in ("w", "v")} | {"idle": torch.randn(1), "x": torch.randn(2, 4)}
    whole = run_microbatches(microbatch(graph, 1), values)
    compare(run_chunks(staged, values), whole, "chunks", 1e-6)


def test_backward_that_is_not_urgent() -> None:
    staged = cut(Graph.from_text(SKIP), ("b", "e"))
    urgent, later = split_backward(staged.chunks[1])
    assert "gv" in later
    assert {"gat", "ga"} <= urgent
    assert split_backward(staged.chunks[0])[0] == frozenset()


BUFFER = """
graph()
%w: f32[4] = param("w")
%steps: i64[] = buffer("steps")
%mean: f32[4] = buffer("mean")
%x: f32[2, 4] = input("x")
%next: i64[] = aten.add.Tensor(%steps, 1)
%a: f32[2, 4] = aten.mul.Tensor(%x, %steps)
%b: f32[2, 4] = aten.mul.Tensor(%a, %w)
%m: f32[4] = aten.sum.dim_IntList(%b, [0])
%old: f32[4] = aten.mul.Tensor(%mean, 0.9)
%new: f32[4] = aten.add.Tensor(%old, %m)
%c: f32[2, 4] = aten.add.Tensor(%b, %next)
%s: f32[] = aten.sum.default(%c)
return output "0" = %s
return mutation "steps" = %next
return mutation "mean" = %new
"""


def test_buffers_change_where_they_are_read() -> None:
    graph = Graph.from_text(BUFFER)
    staged = cut(graph, ("m", "c"))
    check_staged(staged, graph)
    texts = [chunk.to_text() for chunk in staged.chunks]
    assert ['return mutation "steps"' in text for text in texts] == [True, False, True]
    assert ['return mutation "mean"' in text for text in texts] == [False, True, False]
    values = {"w": torch.randn(4), "steps": torch.tensor(3), "mean": torch.randn(4), "x": torch.randn(2, 4)}
    compare(run_chunks(staged, values), run_microbatches(microbatch(graph, 1), values), "buffers", 1e-6)


def test_cut_between_reading_and_writing_a_buffer() -> None:
    text = BUFFER.replace("%c: f32[2, 4] = aten.add.Tensor(%b, %next)", "%c: f32[2, 4] = aten.add.Tensor(%b, %mean)")
    graph = Graph.from_text(text)
    with pytest.raises(OptionsError, match="stage 1 reads the buffer 'mean' that stage 0 changes"):
        cut(graph, ("c",))
    assert "c" not in [candidate.name for candidate in cut_candidates(graph)]


@pytest.mark.parametrize("cuts", [("nothing",), ("gw",), ("x",), ("mask",), ("e", "b"), ("b", "b")])
def test_bad_cuts(cuts: tuple[str, ...]) -> None:
    with pytest.raises(OptionsError, match="cut"):
        cut(Graph.from_text(SKIP), cuts)


class SmallUnet(nn.Module):
    """Skips over everything between, normalised by groups of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.down, self.middle = nn.Conv2d(8, 12, 3, stride=2, padding=1), nn.Conv2d(12, 12, 3, padding=1)
        self.up, self.head = nn.ConvTranspose2d(12, 8, 2, stride=2), nn.Conv2d(16, 4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        skip = F.silu(self.norm(self.first(x)))
        low = self.down(skip)
        low = low + F.silu(self.middle(low))
        return F.cross_entropy(self.head(torch.cat([skip, self.up(low)], 1)), labels, ignore_index=2)


def _longer(model: nn.Module, batch: object) -> tuple[nn.Module, object]:
    """The same with a batch of 40."""
    del batch
    return model, models.text(40, 8)


def _make(name: str) -> tuple[nn.Module, object]:
    torch.manual_seed(0)
    if name == "unet":
        labels = torch.randint(0, 4, (40, 8, 8), generator=models.generator())
        return SmallUnet(), (torch.randn(40, 3, 8, 8, generator=models.generator()), labels)
    if name == "vit":
        return models.make("vit")[0], models.pictures(40)
    if name == "resnet":
        return models.make("resnet")[0], models.pictures(4)
    model = FAMILIES["t5"]()[0] if name == "t5" else models.make(name)[0]
    return _longer(model, None)


@cache
def _case(name: str) -> Case:
    case = make_case(*_make(name))
    return Case(plain(case.graph), case.values, case.expected)


def _check_random_cuts(name: str, count: int, seed: int, trials: int) -> None:
    """Cuts anywhere, in the middle of attention too."""
    case = _case(name)
    made = microbatch(case.graph, count)
    forward = [node.name for node in made.graph if node.phase == "forward" and not node.is_placeholder]
    draw = random.Random(seed)
    for _ in range(trials):
        places = sorted(draw.sample(range(1, len(forward)), draw.choice([1, 2, 3])))
        cuts = tuple(forward[place] for place in places)
        staged = cut(made, cuts)
        check_staged(staged, made.graph)
        found = run_microbatches(made, case.values, lambda values, staged=staged: run_chunks(staged, values))  # type: ignore[misc]
        compare(found, case.expected, f"{name} cut at {cuts}, {count} microbatches")


MODELS = ("gpt2", "llama", "t5", "unet", "vit")


@pytest.mark.parametrize(("name", "count"), [("gpt2", 5), ("unet", 8)])
def test_chunks_cut_anywhere(name: str, count: int) -> None:
    _check_random_cuts(name, count, count, 3)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 5, 8])
@pytest.mark.parametrize("name", MODELS)
def test_chunks_cut_anywhere_at_length(name: str, count: int) -> None:
    _check_random_cuts(name, count, 100 + count, 15)


@pytest.mark.slow
def test_batch_norm_in_chunks() -> None:
    """Of the whole batch, running statistics and all."""
    _check_random_cuts("resnet", 1, 0, 4)


def test_every_place_of_a_model_with_repeats() -> None:
    """One tensor twice in an operation, one weight in many places."""
    case = make_case(*models.make("plain"))
    graph = plain(case.graph)
    forward = [node.name for node in graph if node.phase == "forward" and not node.is_placeholder]
    for name in forward[1:]:
        staged = cut(graph, (name,))
        check_staged(staged, graph)
        compare(run_chunks(staged, case.values), case.expected, f"plain cut at {name}")


def _four_layers_of(name: str) -> Graph:
    """Its step, traced once for all tests."""
    request = requested(FOUR_LAYERS[name], (1,))
    return plain(step_graph(request.graph, request.loss, request.batch))


FOUR_LAYERS: dict[str, Callable[[], models.Case]] = {
    name: partial(models.make, name, layers=4) for name in ("gpt2", "llama")
}


@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def test_candidates_are_few_and_one_tensor_crosses(name: str) -> None:
    graph, layers = _four_layers_of(name), 4
    found = cut_candidates(graph)
    assert layers <= len(found) <= 4 * layers + 4
    stream = min(sum((c.forward_bytes, c.backward_bytes)) for c in found[1 : 2 * layers])
    between = [c for c in found[1:] if c.forward_bytes + c.backward_bytes == stream and c.backward_bytes > 1000]
    assert len(between) >= 2 * layers - 2
    for candidate in between[1:-1]:
        staged = cut(graph, (candidate.name,))
        sent = {e: staged.chunks[e.source].type_of(_sent(staged.chunks[e.source], e.name)) for e in staged.edges}
        assert [edge.phase for edge in sent] == ["forward", "backward"]
        assert [kind.bytes for kind in sent.values()] == [candidate.forward_bytes, candidate.backward_bytes]


def test_candidates_among_skips_that_cross_everything() -> None:
    """Few places of a U-Net have less than their neighbours; more are found where more are asked for."""
    graph = plain(_case("unet").graph)
    few, more = cut_candidates(graph), cut_candidates(graph, 7)
    assert len(few) < 7 <= len(more)
    check_staged(cut(graph, tuple(candidate.name for candidate in more)), graph)
    assert len(cut_candidates(graph, 10**6)) > len(more)


def test_no_candidate_behind_all_that_is_costly() -> None:
    """Little crosses between the head and the loss, but a stage there has nothing to do: the place before the head is
    one, though more crosses there."""
    graph = _four_layers_of("gpt2")
    forward = [node for node in graph if node.phase == "forward" and not node.is_placeholder]
    last = max(index for index, node in enumerate(forward) if "mm" in node.op)
    places = [node.name for node in forward]
    found = [places.index(candidate.name) for candidate in cut_candidates(graph)]
    assert max(found) <= last
    assert any("ln_f" in forward[index].module or forward[index].module == "lm_head" for index in found)


def _sent(chunk: Graph, name: str) -> Value:
    return next(o.value for o in chunk.outputs if o.kind == "send" and o.name == name and o.value is not None)


def test_evaluation_is_cut_as_training_is() -> None:
    """Another trace, with other names: parameters stay where they are."""
    model, batch = FOUR_LAYERS["gpt2"]()
    graph = _four_layers_of("gpt2")
    names = [candidate.name for candidate in cut_candidates(graph)]
    staged = cut(graph, (names[2], names[5]))
    traced = trace(model, (), batch, device="cpu", training=False, grad=False)
    forward = plain(step_graph(normalise(traced.graph), None, 8))
    cuts = cuts_for_owners(forward, staged.owners, 3)
    evaluation = cut(forward, cuts)
    check_staged(evaluation, forward)
    assert evaluation.owners == staged.owners


CACHED = """
graph()
%w: f32[4, 4] = param("w")
%v: f32[4, 4] = param("v")
%x: f32[2, 4] = input("x")
%c: f32[2, 4] = cache("keys")
%h: f32[2, 4] = aten.mm.default(%x, %w)
%k: f32[2, 4] = aten.add.Tensor(%c, %h)
%y: f32[2, 4] = aten.mm.default(%k, %v)
return output "0" = %y
return mutation "keys" = %k
"""


@pytest.mark.parametrize("name, chunk", [("k", 1), ("y", 0)])
def test_a_cache_stays_where_another_program_has_it(name: str, chunk: int) -> None:
    graph = Graph.from_text(CACHED)
    staged = cut(graph, (name,))
    assert staged.holders()["keys"] == (chunk,)
    assert cuts_for_owners(graph, staged.holders(), 2) == (name,)


def test_no_cut_fits_parameters_that_lie_in_another_order() -> None:
    forward = Graph.from_text(SKIP.split("backward %ge")[0].replace('backward %g: f32[] = tangent("0")\n', ""))
    with pytest.raises(OptionsError, match="uses 'v' in stage 1, but stages \\(0,\\) have it"):
        cuts_for_owners(forward, {"w": (1,), "v": (0,)}, 2)
