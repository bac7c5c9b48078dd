"""Attention under masks that no input decides: which are recognised, in which spellings, and that nothing changes."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.ir.graph import Graph
from autopar.passes.normalise import known_masks
from autopar.passes.normalise.known_masks import KnownMasks
from autopar.planner.prepare import prepare
from autopar.torch_internals.fake_tensors import FakeTensorMode
from tests.helpers.interpret import interpret
from tests.helpers.pass_text import check

BEFORE = """graph(b=4)
    %q: f32[b, 2, 9, 4] = input("q")
    %k: f32[b, 2, {keys}, 4] = input("k")
    backward %dy: f32[b, 2, 9, 4] = tangent("0")
    %positions: i64[9] = aten.arange.default(9)
    %columns: i64[1, 9] = aten.reshape.default(%positions, [1, 9])
    %rows: i64[9, 1] = aten.reshape.default(%positions, [9, 1])
    %seen: b8[9, 9] = aten.{compare}.Tensor(%columns, %rows)
    %zero: f32[] = aten.full.default([], 0.0, dtype=torch.float32)
    %hidden: f32[] = aten.full.default([], {least}, dtype=torch.float32)
    %flat: f32[9, 9] = aten.where.self(%seen, %zero, %hidden)
    %mask: f32[b, 1, 9, 9] = aten.expand.default(%flat, [b, 1, 9, 9])
    %y: f32[b, 2, 9, 4], %y.1: f32[b, 2, 9] = autopar.attention.default(%q, %k, %k, {mask}, scale=0.5)
    backward %d: f32[b, 2, 9, 4], %d.1: f32[b, 2, 9, 4], %d.2: f32[b, 2, 9, 4] = autopar.attention_backward.default(
        %dy, %q, %k, %k, %y, %y.1, {mask}, scale=0.5)
    return output "0" = %y
    return input_gradient "q" = %d
"""


def text(mask: str = "%mask, False", *, compare: str = "le", least: str = "float('-inf')") -> str:
    one_line = BEFORE.replace("default(\n        %dy", "default(%dy")
    return one_line.format(keys=9, mask=mask, compare=compare, least=least)


@pytest.mark.parametrize("least", ["float('-inf')", "-3.4028234663852886e+38"])
def test_a_causal_mask_becomes_an_argument(least: str) -> None:
    check(KnownMasks(), text(least=least), text("None, True", least=least))


def test_a_mask_that_hides_nothing_is_dropped() -> None:
    check(KnownMasks(), text(least="0.0"), text("None, False", least="0.0"))


@pytest.mark.parametrize(
    "change",
    [
        {"compare": "lt"},  # The first position sees nothing.
        {"compare": "ge"},
        {"least": "-1.0"},
        {"mask": "%mask, True"},
    ],
)
def test_other_masks_stay(change: dict[str, str]) -> None:
    check(KnownMasks(), text(**change), text(**change))


def test_masks_that_inputs_decide_stay() -> None:
    given = text().replace("%positions: i64[9] = aten.arange.default(9)", '%positions: i64[9] = input("positions")')
    check(KnownMasks(), given, given)


def test_symbolic_lengths_stay() -> None:
    """A mask may have a window that is shorter than a longer sequence."""
    given = text().replace("9", "l0").replace("graph(b=4)", "graph(b=4, l0=9)")
    check(KnownMasks(), given, given)


@pytest.mark.parametrize("from_", [0, 2, 3, 50])
def test_masks_that_differ_between_samples_stay(from_: int) -> None:
    """For smaller batches this one would be causal."""
    given = (
        text()
        .replace(
            "%mask: f32[b, 1, 9, 9] = aten.expand.default(%flat, [b, 1, 9, 9])",
            """%count: i64[b] = aten.arange.default(b)
        %third: b8[b] = aten.ge.Scalar(%count, FROM)
        %third_1: b8[b, 1, 1, 1] = aten.reshape.default(%third, [b, 1, 1, 1])
        %mask: f32[b, 1, 9, 9] = aten.where.self(%third_1, %zero, %flat)""",
        )
        .replace("FROM", str(from_))
    )
    check(KnownMasks(), given, given)


def test_one_row_for_all_queries_is_not_causal() -> None:
    """It shows the first key to every query; causal attention does so to the first."""
    given = text().replace("%mask: f32[b, 1, 9, 9] = aten.expand.default(%flat, [b, 1, 9, 9])", ONE_ROW)
    given = given.replace("i64[9, 1]", "i64[1, 1]").replace("(%positions, [9, 1])", "(%zeroth, [1, 1])")
    given = given.replace("%columns:", "%zeroth: i64[] = aten.full.default([], 0, dtype=torch.int64)\n    %columns:")
    given = given.replace("b8[9, 9]", "b8[1, 9]").replace("f32[9, 9]", "f32[1, 9]")
    check(KnownMasks(), given, given)


ONE_ROW = "%mask: f32[b, 1, 1, 9] = aten.expand.default(%flat, [b, 1, 1, 9])"


PARTS = """%mask: f32[floor(b/4), 1, 9, 9] = aten.expand.default(%flat, [floor(b/4), 1, 9, 9])"""


def test_masks_of_a_part_of_the_batch_stay() -> None:
    """Of two samples and of three it has no element."""
    given = text().replace("%mask: f32[b, 1, 9, 9] = aten.expand.default(%flat, [b, 1, 9, 9])", PARTS)
    given = given.replace("[b, 2, ", "[floor(b/4), 2, ").replace("graph(b=4)", "graph(b=8)")
    check(KnownMasks(), given, given)


# --- spellings of models ---


def triangle(length: int) -> Tensor:
    return torch.full((length, length), -math.inf).triu(1)


def lower(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


def filled(length: int) -> Tensor:
    seen = torch.ones(length, length).tril().view(1, 1, length, length)
    return torch.zeros(1, 1, length, length).masked_fill(seen == 0, torch.finfo(torch.float32).min)


def of_products(length: int) -> Tensor:
    return (1.0 - torch.tril(torch.ones(1, 1, length, length))) * torch.finfo(torch.float32).min


def by_positions(length: int) -> Tensor:
    count = torch.arange(length)
    return count[None, :] <= count[:, None]


def window(length: int) -> Tensor:
    count = torch.arange(length)
    return by_positions(length) & (count[:, None] - count[None, :] < length - 1)


class Attends(nn.Module):
    def __init__(self, mask: Callable[[int], Tensor]) -> None:
        super().__init__()
        self.mix, self.mask = nn.Linear(8, 24), mask

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.mix(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=self.mask(x.shape[1])).square().mean()


def graph_of(mask: Callable[[int], Tensor], length: int = 7) -> Graph:
    torch.manual_seed(0)
    return prepared(Attends(mask), length=length)


def is_causal(graph: Graph) -> bool:
    found = {node.args[node.args.index(None) :] for node in graph.nodes if "attention" in node.op and None in node.args}
    assert found <= {(None, True)}
    return bool(found)


SPELLINGS = [triangle, lower, filled, of_products, by_positions]


@pytest.mark.parametrize("mask", SPELLINGS)
def test_causal_masks_of_models(mask: Callable[[int], Tensor]) -> None:
    assert is_causal(graph_of(mask))


@pytest.mark.parametrize("mask", SPELLINGS)
def test_large_masks_are_read_in_rows(mask: Callable[[int], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_masks, "_WHOLE", 20)
    assert is_causal(graph_of(mask))


@pytest.mark.parametrize("batch", ["4", "b"])
def test_masks_of_many_samples_are_read_once(batch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the model fixes the batch, so that its size is a number."""
    monkeypatch.setattr(known_masks, "_WHOLE", 20)
    monkeypatch.setattr(known_masks, "_MOST", 81)
    given, expected = (text(each).replace("[b,", f"[{batch},") for each in ("%mask, False", "None, True"))
    if batch != "b":
        given, expected = (each.replace("graph(b=4)", "graph()") for each in (given, expected))
    check(KnownMasks(), given, expected)


def test_samples_that_are_folded_into_heads_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_masks, "_WHOLE", 20)
    monkeypatch.setattr(known_masks, "_MOST", 81)
    folded = """%every: f32[4, 1, 9, 9] = aten.expand.default(%flat, [4, 1, 9, 9])
    %folded: f32[4, 9, 9] = aten.reshape.default(%every, [4, 9, 9])
    %mask: f32[4, 1, 9, 9] = aten.reshape.default(%folded, [4, 1, 9, 9])"""
    given = text().replace("%mask: f32[b, 1, 9, 9] = aten.expand.default(%flat, [b, 1, 9, 9])", folded)
    given = given.replace("[b,", "[4,").replace("graph(b=4)", "graph()")
    check(KnownMasks(), given, given.replace("%mask, False", "None, True"))


@pytest.mark.parametrize("most", [4 * 81, 4 * 81 - 1])
def test_what_is_computed_whole_is_bounded(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two values that cannot be computed in rows, and the two large ones from which they are computed."""
    monkeypatch.setattr(known_masks, "_WHOLE", 20)
    monkeypatch.setattr(known_masks, "_LARGEST", most)
    turned = """%one: f32[9, 9] = aten.permute.default(%flat, [1, 0])
    %two: f32[9, 9] = aten.permute.default(%one, [1, 0])
    %mask: f32[b, 1, 9, 9] = aten.expand.default(%two, [b, 1, 9, 9])"""
    given = text().replace("%mask: f32[b, 1, 9, 9] = aten.expand.default(%flat, [b, 1, 9, 9])", turned)
    check(KnownMasks(), given, given.replace("%mask, False", "None, True") if most == 4 * 81 else given)


@pytest.mark.parametrize("odd", [0, 3, None])
def test_a_sample_with_a_mask_of_its_own_is_seen(odd: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the model fixes the batch, and its mask is larger than what is computed whole."""
    monkeypatch.setattr(known_masks, "_WHOLE", 20)
    table = """%count: i64[4] = aten.arange.default(4)
    %odd: b8[4] = aten.eq.Scalar(%count, ODD)
    %odd_1: b8[4, 1, 1, 1] = aten.reshape.default(%odd, [4, 1, 1, 1])
    %mask: f32[4, 1, 9, 9] = aten.where.self(%odd_1, %zero, %flat)""".replace("ODD", str(7 if odd is None else odd))
    given = text().replace("%mask: f32[b, 1, 9, 9] = aten.expand.default(%flat, [b, 1, 9, 9])", table)
    given = given.replace("[b,", "[4,").replace("graph(b=4)", "graph()")
    check(KnownMasks(), given, given if odd is not None else given.replace("%mask, False", "None, True"))


@pytest.mark.parametrize("whole", [20, 1 << 20])
def test_a_triangle_of_one_row_is_the_same_for_all_rows(whole: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It hides all positions but the first from every query."""
    monkeypatch.setattr(known_masks, "_WHOLE", whole)
    row = """%every: f32[4, 1, 1, 9] = aten.full.default([4, 1, 1, 9], float('-inf'), dtype=torch.float32)
    %row: f32[4, 1, 1, 9] = aten.triu.default(%every, 1)
    %mask: f32[4, 1, 9, 9] = aten.expand.default(%row, [4, 1, 9, 9])"""
    given = text().replace("%mask: f32[b, 1, 9, 9] = aten.expand.default(%flat, [b, 1, 9, 9])", row)
    given = given.replace("[b,", "[4,").replace("graph(b=4)", "graph()")
    check(KnownMasks(), given, given)


@pytest.mark.parametrize("whole", [20, 1 << 20])
def test_windows_are_not_causal(whole: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_masks, "_WHOLE", whole)
    assert not is_causal(graph_of(window))


@pytest.mark.parametrize("mask", [*SPELLINGS, window])
def test_loss_and_gradients_are_the_models(mask: Callable[[int], Tensor]) -> None:
    graph = graph_of(mask).at(b=3)
    model, x = Attends(mask), torch.randn(3, 7, 8)
    loss = model(x)
    loss.backward()
    found = interpret(graph, {**dict(model.named_parameters()), "0": x})
    torch.testing.assert_close(found["output", "0"], loss.detach())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found["gradient", name], parameter.grad)


class Looks(Attends):
    """Takes the mask of each sample from a table, which is no buffer."""

    def __init__(self, odd: int, device: str = "cpu") -> None:
        super().__init__(triangle)
        self.table = triangle(7).expand(64, 1, 7, 7).clone().to(device)
        self.table[odd] = 0.0

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.mix(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        mask = self.table[: x.shape[0]]
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask).square().mean()


def prepared(model: nn.Module, length: int = 7) -> Graph:
    batch = (torch.randn(3, length, 8),)
    return prepare(model, batch, {}, device="cpu", loss_fn=None, training=True, precision=None).graph


@pytest.mark.parametrize("odd", [0, 5, 63])
def test_tables_with_a_row_for_each_sample_stay(odd: int) -> None:
    graph = prepared(Looks(odd))
    assert not any(None in node.args for node in graph.nodes if "attention" in node.op)


def test_whoever_imagines_tensors_gets_a_graph() -> None:
    with FakeTensorMode():
        assert is_causal(prepared(Attends(triangle)))
    with torch.device("meta"):
        model = Attends(triangle)
    assert is_causal(prepared(model))


def test_one_position_has_nothing_to_hide() -> None:
    graph = graph_of(lower, length=1)
    assert all(None in node.args and True not in node.args for node in graph.nodes if "attention" in node.op)


@pytest.mark.parametrize("first", [0, 3, 9])
@pytest.mark.parametrize("shape", [(4, 7), (2, 1, 3, 9), (5, 2), (1, 1)])
def test_a_block_of_rows_is_causal_if_it_hides_what_comes_later(first: int, shape: tuple[int, ...]) -> None:
    least = torch.finfo(torch.float32).min
    later = torch.arange(shape[-1]) > torch.arange(first, first + shape[-2])[:, None]
    rows = torch.zeros(shape).masked_fill(later, least)
    assert "causal" in known_masks._kinds(rows, first)
    for index in range(rows.numel()):
        other = rows.clone()
        other.view(-1)[index] = least - other.view(-1)[index]
        assert "causal" not in known_masks._kinds(other, first)
    for first_index, second in combinations(range(min(rows.numel(), 8)), 2):  # As many hidden as there should be.
        other = rows.clone().view(-1)
        other[[first_index, second]] = other[[second, first_index]]
        assert ("causal" in known_masks._kinds(other.view(shape), first)) == bool((other.view(shape) == rows).all())
