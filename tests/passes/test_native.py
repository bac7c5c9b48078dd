"""Decompositions are undone where nothing is sharded across them, and only there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from autopar.ir.assignment import Assignment, ParameterPlacement
from autopar.ir.graph import Graph
from autopar.ir.placements import Placements, Strategy
from autopar.passes.native.pattern import Occurrences
from autopar.passes.native.restore import MODULES, restore
from autopar.passes.normalise.standard import normalise
from autopar.planner.step_graphs import step_graph
from autopar.trace.tracer import trace
from tests.helpers.interpret import interpret
from tests.helpers.lowering import plain
from tests.helpers.marks import slow_but
from tests.helpers.pass_text import check

R, ROWS, CLASSES = (Replicate(),), (Shard(0),), (Shard(1),)
SOFTMAX = """graph()
    %x: f32[4, 9] = input("x")
    %largest: f32[4, 1] = aten.amax.default(%x, [1], True)
    %shifted: f32[4, 9] = aten.sub.Tensor(%x, %largest)
    %exp: f32[4, 9] = aten.exp.default(%shifted)
    %total: f32[4, 1] = aten.sum.dim_IntList(%exp, [1], True)
    %log: f32[4, 1] = aten.log.default(%total)
    %y: f32[4, 9] = aten.sub.Tensor(%shifted, %log)
    return output "0" = %y
"""
BATCH_NORM = """graph()
    %x: f32[6, 3, 2] = input("x")
    %sum: f32[1, 3, 1] = aten.sum.dim_IntList(%x, [0, 2], True)
    %mean: f32[1, 3, 1] = aten.div.Tensor(%sum, 12)
    %centred: f32[6, 3, 2] = aten.sub.Tensor(%x, %mean)
    %squares: f32[6, 3, 2] = aten.mul.Tensor(%centred, %centred)
    %spread: f32[1, 3, 1] = aten.sum.dim_IntList(%squares, [0, 2], True)
    %variance: f32[1, 3, 1] = aten.div.Tensor(%spread, 12)
    %shifted: f32[1, 3, 1] = aten.add.Tensor(%variance, 1e-05)
    %scale: f32[1, 3, 1] = aten.rsqrt.default(%shifted)
    %y: f32[6, 3, 2] = aten.mul.Tensor(%centred, %scale)
    return output "0" = %y
"""

KERNEL = (
    "%y: f32[6, 3, 2], %y.1: f32[3], %y.2: f32[3] = aten._native_batch_norm_legit.no_stats"
    "(%x, None, None, True, 0.0, 1e-05)"
)


def replicated(graph: Graph) -> Assignment:
    place = ParameterPlacement(R, R, R)
    return Assignment((2,), {}, {node.name: place for node in graph.placeholders("param")})


def placed(graph: Graph, place: Placements, partial: frozenset[str] = frozenset()) -> Assignment:
    """Every value in the same placements, but those of reductions over the sharded dim."""

    def home(name: str) -> Placements:
        return (Partial("sum"),) if name in partial else place

    strategies = {
        node.name: Strategy(tuple(home(v.node) for v in node.operands), tuple(home(node.name) for _ in node.types))
        for node in graph.nodes
    }
    return Assignment((2,), strategies, {})


def restored(assign: Callable[[Graph], Assignment]) -> Callable[[Graph], Graph]:
    return lambda graph: restore(graph, assign(graph))[0]


def operations(graph: Graph) -> Counter[str]:
    return Counter(node.op for node in graph.nodes)


def test_log_softmax() -> None:
    after = """graph()
    %x: f32[4, 9] = input("x")
    %y: f32[4, 9] = aten._log_softmax.default(%x, 1, False)
    return output "0" = %y
    """
    check(restored(replicated), SOFTMAX, after)
    check(restored(lambda graph: placed(graph, ROWS)), SOFTMAX, after)


def test_not_over_a_sharded_dim() -> None:
    split = restored(lambda graph: placed(graph, CLASSES, frozenset(("largest", "total"))))
    check(split, SOFTMAX, SOFTMAX)


def test_not_if_something_is_resharded_on_the_way() -> None:
    def resharding(graph: Graph) -> Assignment:
        strategies = dict(placed(graph, ROWS).strategies)
        strategies["exp"] = Strategy((R,), (R,))
        strategies["total"] = Strategy((R,), (ROWS,))
        return Assignment((2,), strategies, {})

    check(restored(resharding), SOFTMAX, SOFTMAX)


def test_not_if_a_device_runs_another_form() -> None:
    def masked(graph: Graph) -> Assignment:
        strategies = dict(placed(graph, R).strategies)
        strategies["log"] = Strategy((R,), (R,), "autopar.other")
        return Assignment((2,), strategies, {})

    check(restored(masked), SOFTMAX, SOFTMAX)


@pytest.mark.parametrize("also", ["exp", "shifted", "total"])
def test_not_if_something_else_needs_what_it_no_longer_computes(also: str) -> None:
    text = SOFTMAX + f'    return output "1" = %{also}\n'
    check(restored(replicated), text, text)


def test_not_another_dim_in_the_sum_than_in_the_maximum() -> None:
    text = SOFTMAX.replace("%exp, [1]", "%exp, [0]").replace("%total: f32[4, 1]", "%total: f32[1, 9]")
    text = text.replace("%log: f32[4, 1]", "%log: f32[1, 9]")
    check(restored(replicated), text, text)


def test_batch_norm_without_weights_and_averages() -> None:
    check(
        restored(replicated),
        BATCH_NORM,
        f"""graph()
    %x: f32[6, 3, 2] = input("x")
    {KERNEL}
    return output "0" = %y
    """,
    )


@pytest.mark.parametrize(("number", "other"), [("12", "11"), ("[0, 2]", "[0]")])
def test_not_with_another_count_or_other_dims(number: str, other: str) -> None:
    text = BATCH_NORM.replace(number, other)
    if number != "12":
        text = text.replace("f32[1, 3, 1]", "f32[1, 3, 2]")
    check(restored(replicated), text, text)


def test_what_backward_reads_of_the_statistics_comes_from_the_kernel() -> None:
    check(
        restored(replicated),
        BATCH_NORM + '    return output "1" = %scale\n    return output "2" = %centred\n',
        f"""graph()
    %x: f32[6, 3, 2] = input("x")
    {KERNEL}
    %mean: f32[1, 3, 1] = aten.reshape.default(%y.1, [1, 3, 1])
    %centred: f32[6, 3, 2] = aten.sub.Tensor(%x, %mean)
    %scale: f32[1, 3, 1] = aten.reshape.default(%y.2, [1, 3, 1])
    return output "0" = %y
    return output "1" = %scale
    return output "2" = %centred
    """,
    )


def test_weights_that_are_no_row_are_not_given_to_the_kernel() -> None:
    """The kernel takes a weight for each channel in one dim; the statistics are its own all the same."""
    text = BATCH_NORM.replace(
        '    return output "0" = %y\n',
        """    %w: f32[1, 3, 1] = input("w")
    %v: f32[1, 3, 1] = input("v")
    %weighted: f32[6, 3, 2] = aten.mul.Tensor(%y, %w)
    %z: f32[6, 3, 2] = aten.add.Tensor(%weighted, %v)
    return output "0" = %z
""",
    )
    graph = restored(replicated)(Graph.from_text(text))
    assert KERNEL in graph.to_text() and operations(graph)["aten.mul.Tensor"] == 1


def test_channels_may_be_sharded() -> None:
    graph, assignment = restore(Graph.from_text(BATCH_NORM), placed(Graph.from_text(BATCH_NORM), CLASSES))
    assert assignment.strategies["y"] == Strategy((CLASSES,), (CLASSES, ROWS, ROWS))
    assert operations(graph)["aten._native_batch_norm_legit.no_stats"] == 1


def test_the_gradient_of_a_label_is_written_where_the_label_is() -> None:
    check(
        restored(replicated),
        """graph()
    %labels: i64[4, 1] = input("labels")
    %rows: f32[4, 1] = input("rows")
    %zeros: f32[4, 9] = aten.full.default([4, 9], 0, dtype=torch.float32)
    %marked: f32[4, 9] = aten.scatter.value(%zeros, 1, %labels, -1.0)
    %y: f32[4, 9] = aten.mul.Tensor(%rows, %marked)
    return output "0" = %y
    """,
        """graph()
    %labels: i64[4, 1] = input("labels")
    %rows: f32[4, 1] = input("rows")
    %zeros: f32[4, 9] = aten.full.default([4, 9], 0, dtype=torch.float32)
    %marked: f32[4, 1] = aten.mul.Tensor(%rows, -1.0)
    %y: f32[4, 9] = aten.scatter.src(%zeros, 1, %labels, %marked)
    return output "0" = %y
    """,
    )


def norm(dims: int, **options: bool) -> nn.Module:
    return {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[dims](3, **options)


class Normalises(nn.Module):
    """A residual block: two batch norms with the same gradient, and an activation whose input is saved."""

    def __init__(self, dims: int, **options: bool) -> None:
        super().__init__()
        self.first, self.second = norm(dims, **options), norm(dims, **options)
        self.head = nn.Parameter(torch.randn(3, 3))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = torch.einsum("bc...,cd->bd...", x, self.head)
        y = torch.tanh(self.first(x) + self.second(x * x)).flatten(1)
        return nn.functional.cross_entropy(y, labels)


def compare(model: nn.Module, inputs: tuple[torch.Tensor, ...], **tolerances: float) -> Counter[str]:
    """The operations of a model's step with torch's own, which computes what the decomposed one does."""
    traced = trace(model, inputs, device="cpu")
    graph = step_graph(normalise(traced.graph), traced.signature.loss, len(inputs[0]))
    native, _ = restore(graph, replicated(graph))
    named = dict(zip([node.target for node in graph.placeholders("input")], inputs, strict=True))
    values = {**dict(model.named_parameters()), **dict(model.named_buffers()), **named}
    expected, actual = interpret(plain(graph), values), interpret(plain(native), values)
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(actual[key], value, msg=lambda text, key=key: f"{key}: {text}", **tolerances)
    return operations(native)


class NormalisesNarrow(Normalises):
    """The same under autocast, which leaves batch norm the dtype of its input."""

    def __init__(self, dims: int, dtype: torch.dtype, **options: bool) -> None:
        super().__init__(dims, **options)
        self.dtype = dtype

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", self.dtype):
            return super().forward(x, labels)


@pytest.mark.parametrize("dtype", slow_but([torch.bfloat16], [torch.bfloat16, torch.float16]), ids=str)
@pytest.mark.parametrize("options", [{}, {"affine": False}])
def test_batch_norms_of_16_bits_take_and_give_16_bits(dtype: torch.dtype, options: dict[str, bool]) -> None:
    torch.manual_seed(0)
    model = NormalisesNarrow(2, dtype, **options)
    after = compare(model, (torch.randn(5, 3, 4, 2), torch.randint(0, 3, (5,))), rtol=2e-2, atol=2e-3)
    forward = sum(count for op, count in after.items() if op.startswith("aten._native_batch_norm_legit"))
    assert (forward, after["aten.native_batch_norm_backward.default"]) == (2, 2)
    assert after["aten.rsqrt.default"] == 0


class NormalisesCasts(nn.Module):
    """A batch norm in float32 of what was ``given`` in another dtype, then a cast to ``taken``."""

    def __init__(self, given: torch.dtype, taken: torch.dtype) -> None:
        super().__init__()
        self.norm, self.head = norm(2), nn.Parameter(torch.randn(3))
        self.given, self.taken = given, taken

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = (x * self.head[:, None, None] * 8).to(self.given)
        y = self.norm(x.float()).to(self.taken).float().flatten(1)
        return nn.functional.cross_entropy(y, labels)


@pytest.mark.parametrize(
    "given, taken",
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.bfloat16),
        (torch.bfloat16, torch.float16),
        (torch.float64, torch.bfloat16),
    ],
    ids=str,
)
def test_only_casts_there_and_back_are_part_of_a_batch_norm(given: torch.dtype, taken: torch.dtype) -> None:
    torch.manual_seed(0)
    after = compare(NormalisesCasts(given, taken), (torch.randn(5, 3, 4, 2), torch.randint(0, 3, (5,))))
    forward = sum(found for op, found in after.items() if op.startswith("aten._native_batch_norm_legit"))
    assert (forward, after["aten.native_batch_norm_backward.default"]) == (1, 1)


def test_a_batch_norm_of_integers_is_that_of_their_cast() -> None:
    torch.manual_seed(0)

    class OfIntegers(Normalises):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return nn.functional.cross_entropy(
                    torch.einsum("bchw,cd->bd", self.first(x.float()), self.head), labels
                )

    inputs = (torch.randint(0, 255, (5, 3, 4, 2), dtype=torch.uint8), torch.randint(0, 3, (5,)))
    assert compare(OfIntegers(2), inputs)["aten._native_batch_norm_legit_functional.default"] == 1


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("options", slow_but([{}], [{}, {"affine": False}, {"track_running_stats": False}]))
def test_batch_norms_of_torch_are_recognised(dims: int, options: dict[str, bool]) -> None:
    torch.manual_seed(0)
    shape = (5, 3, 4, 2, 3)[: dims + 1 + (dims > 1)]
    after = compare(Normalises(dims, **options), (torch.randn(shape), torch.randint(0, 3, (5,))))
    forward = sum(count for op, count in after.items() if op.startswith("aten._native_batch_norm_legit"))
    assert (forward, after["aten.native_batch_norm_backward.default"]) == (2, 2)
    assert after["aten.rsqrt.default"] == 0


def test_frozen_weights() -> None:
    torch.manual_seed(0)
    model = Normalises(2)
    model.first.weight.requires_grad_(False)
    model.second.bias.requires_grad_(False)
    after = compare(model, (torch.randn(5, 3, 4, 2), torch.randint(0, 3, (5,))))
    assert after["aten.native_batch_norm_backward.default"] == 2


class Classifies(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.head, self.options = nn.Linear(4, 7), options

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(x).movedim(-1, 1)
        return nn.functional.cross_entropy(logits, labels, **self.options)


@pytest.mark.parametrize("options", [{}, {"ignore_index": 2}, {"reduction": "sum"}, {"label_smoothing": 0.1}])
@pytest.mark.parametrize("shape", slow_but([(5, 3)], [(5,), (5, 3)]))
def test_cross_entropies_of_torch_are_recognised(shape: tuple[int, ...], options: dict[str, object]) -> None:
    torch.manual_seed(0)
    after = compare(Classifies(**options), (torch.randn(*shape, 4), torch.randint(0, 7, shape)))
    assert after["aten._log_softmax.default"] == 1
    assert after["aten._log_softmax_backward_data.default"] == 1
    assert after["aten.amax.default"] == after["aten.exp.default"] == 0


def test_a_pattern_with_an_operation_that_the_graph_lacks_is_not_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = Graph.from_text("""graph(b=8)
        %x: f32[b, 4] = input("x")
        %a: f32[b, 4] = aten.mul.Tensor(%x, %x)
        %b: f32[b, 4] = aten.sub.Tensor(%a, %x)
        %c: f32[b, 4] = aten.add.Tensor(%b, %x)
        %d: f32[b, 4] = aten.div.Tensor(%c, %x)
        return output "0" = %d
        """)
    occurrences = Occurrences(graph)
    patterns = [rewrite.pattern for module in MODULES for rewrite in module.REWRITES]
    assert any(pattern.last.op in occurrences.by_op for pattern in patterns)
    monkeypatch.setattr(Occurrences, "_node", lambda *_: pytest.fail("searched"))
    assert not [match for pattern in patterns for match in occurrences.find(pattern)]
