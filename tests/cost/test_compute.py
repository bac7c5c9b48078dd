"""FLOPs against torch's own counter, bytes by hand, seconds of the roofline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from autopar.cluster.description import Cluster, Device, Link
from autopar.cost import FAMILIES, bytes_moved, compute_seconds, flops, node_seconds, total_bytes, total_flops
from autopar.cost.compute.expert_blocks import traffic
from autopar.cost.compute.flops_and_bytes import larger
from autopar.cost.compute.matmul_efficiency import attention_seconds, product_seconds
from autopar.cost.compute.op_families import family_of
from autopar.ir.graph import Graph
from autopar.ir.node import PLACEHOLDERS, Node, TensorType, Value, symbol
from autopar.ops.exchanged_experts import EXCHANGES
from autopar.ops.masked import LOCAL_OPS
from autopar.trace.moe_blocks import activation_text

aten = torch.ops.aten
F32, BF16, I64 = torch.float32, torch.bfloat16, torch.int64
TOY = Cluster(
    "toy",
    "made up",
    Device("chip", {"f32": 1e6, "bf16": 4e6}, 1 << 20, 1e5, 1e-3, 1e-4, matmul_efficiency=0.5, matmul_padding=4),
    (Link("one", 1, 1.0, 0.0),),
)


def test_what_does_not_overlap_is_paid_twice() -> None:
    product = (2.0 * 1000 * 100, 40_000, F32, (1000, 100, 1))
    alone, traffic = compute_seconds(TOY, *product) - 1e-3, 40_000 / 1e5
    assert alone > traffic

    def stalling(share: float) -> float:
        return compute_seconds(replace(TOY, device=replace(TOY.device, memory_stalls=share)), *product) - 1e-3

    assert stalling(1.0) == pytest.approx(alone + traffic)
    assert stalling(0.25) == pytest.approx(alone + 0.25 * traffic)


@pytest.mark.parametrize(("call", "share"), [(aten.tanh.default, 1), (aten.exp.default, 1), (aten.neg.default, 0)])
def test_functions_take_time_of_their_own(call: Callable[..., Any], share: int) -> None:
    slow = replace(TOY, device=replace(TOY.device, function_seconds=1.0))
    node, inputs, outputs = node_of(call, r(3, 5))
    usual = node_seconds(TOY, node, inputs, outputs)
    assert node_seconds(slow, node, inputs, outputs) == pytest.approx(usual + share * 15.0, rel=1e-3)


def types(*shapes: tuple[int, ...], dtype: torch.dtype = F32) -> tuple[TensorType, ...]:
    return tuple(TensorType(shape, dtype) for shape in shapes)


def node_of(call: Callable[..., Any], *args: Any) -> tuple[Node, tuple[TensorType, ...], tuple[TensorType, ...]]:
    """The node, operand types and result types of an ATen call on real tensors."""
    operands = [arg for arg in args if isinstance(arg, torch.Tensor)]
    names = iter(range(len(operands)))
    stored = tuple(Value(f"x{next(names)}") if isinstance(arg, torch.Tensor) else arg for arg in args)
    result = call(*args)
    results = [r for r in (result if isinstance(result, tuple) else (result,)) if isinstance(r, torch.Tensor)]
    outputs = tuple(TensorType(tuple(r.shape), r.dtype) for r in results)
    inputs = tuple(TensorType(tuple(x.shape), x.dtype) for x in operands)
    return Node("y", str(call), stored, (), outputs), inputs, outputs


def r(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


CONVOLUTION = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
STRIDED = ([2, 1], [1, 0], [1, 2], False, [0, 0], 2)
TRANSPOSED = ([2, 2], [0, 0], [1, 1], True, [0, 0], 1)


@pytest.mark.parametrize(
    ("call", "args", "sums"),
    [
        (aten.mm.default, (r(3, 5), r(5, 7)), 0),
        (aten.addmm.default, (r(7), r(3, 5), r(5, 7)), 21),
        (aten.bmm.default, (r(2, 3, 5), r(2, 5, 7)), 0),
        (aten.baddbmm.default, (r(2, 3, 7), r(2, 3, 5), r(2, 5, 7)), 42),
        (aten.convolution.default, (r(2, 4, 9, 8), r(6, 4, 3, 2), None, *CONVOLUTION), 0),
        (aten.convolution.default, (r(2, 4, 9, 8), r(6, 2, 3, 2), r(6), *STRIDED), 2 * 6 * 5 * 6),
        (aten.convolution.default, (r(2, 4, 5, 6), r(4, 3, 2, 2), None, *TRANSPOSED), 0),
    ],
)
def test_flops_are_those_torch_counts(call: Callable[..., Any], args: tuple[Any, ...], sums: int) -> None:
    """``sums``: the additions of a bias, which torch leaves out."""
    with FlopCounterMode(display=False) as counter:
        node, inputs, outputs = node_of(call, *args)
    assert flops(node, inputs) == counter.get_total_flops() + sums
    assert flops(replace(node, types=()), inputs, outputs) == flops(node, inputs)


@pytest.mark.parametrize("mask", [[True, True, True], [False, True, False], [True, False, True]])
@pytest.mark.parametrize("layout", [(r(6, 2, 3, 2), STRIDED), (r(6, 4, 3, 2), CONVOLUTION)])
def test_flops_of_convolution_backward(mask: list[bool], layout: tuple[torch.Tensor, Any]) -> None:
    image, (weight, settings) = r(2, 4, 9, 8), layout
    grad = torch.ones_like(aten.convolution.default(image, weight, None, *settings))
    args = (grad, image, weight, [6], *settings, mask)
    with FlopCounterMode(display=False) as counter:
        node, inputs, _ = node_of(aten.convolution_backward.default, *args)
    # Torch counts the zeros that a strided gradient of the input skips: each product is done once.
    forward = 2 * grad.shape[0] * grad[0, 0].numel() * weight.numel()
    assert flops(node, inputs) == (mask[0] + mask[1]) * forward + mask[2] * grad.numel()
    if settings is CONVOLUTION and not mask[0]:
        assert flops(node, inputs) == counter.get_total_flops() + mask[2] * grad.numel()


@pytest.mark.parametrize("causal", [False, True])
def test_flops_of_attention(causal: bool) -> None:
    query, key, value = r(2, 6, 5, 4), r(2, 3, 7, 4), r(2, 3, 7, 4)
    shapes = types((2, 6, 5, 4), (2, 3, 7, 4), (2, 3, 7, 4))
    product = 2 * 2 * 6 * 5 * 7 * 4 // (2 if causal else 1)
    op = "autopar.attention.default"
    forward = Node("y", op, (Value("q"), Value("k"), Value("v"), None, causal))
    assert flops(forward, shapes, (shapes[0],)) == 2 * product
    keyword = Node("y", op, (Value("q"), Value("k"), Value("v")), (("is_causal", causal),))
    assert flops(keyword, shapes, (shapes[0],)) == 2 * product
    op = "autopar.attention_backward.default"
    values = tuple(map(Value, "gqkvol"))
    backward = Node("y", op, (*values, None, causal))
    assert flops(backward, (shapes[0], *shapes, shapes[0], *types((2, 6, 5))), ()) == 5 * product
    if not causal:
        with FlopCounterMode(display=False) as counter:
            aten.scaled_dot_product_attention(query, key.repeat(1, 2, 1, 1), value.repeat(1, 2, 1, 1))
        assert counter.get_total_flops() in (0, 2 * product)  # 0: torch does not count the operation for CPUs


def test_flops_of_grouped_products() -> None:
    node = Node("y", "aten._grouped_mm.default", (Value("a"), Value("b"), Value("o")))
    rows = types((10, 3), (4, 3, 5), (4,))
    assert flops(node, rows, types((10, 5))) == 2 * 10 * 3 * 5
    inner = types((3, 10), (10, 5), (4,))
    assert flops(node, inner, types((4, 3, 5))) == 2 * 3 * 10 * 5
    columns = types((4, 3, 6), (6, 10), (4,))
    assert flops(node, columns, types((3, 10))) == 2 * 3 * 6 * 10


@pytest.mark.parametrize(
    ("op", "inputs", "outputs", "work", "nbytes"),
    [
        ("aten.add.Tensor", types((4, 1), (1, 3)), types((4, 3)), 12, 4 * (4 + 3 + 12)),
        ("aten.gelu.default", types((4, 3), dtype=BF16), types((4, 3), dtype=BF16), 12, 48),
        ("aten.sum.dim_IntList", types((4, 3)), types((4,)), 12, 64),
        ("aten._softmax.default", types((4, 3)), types((4, 3)), 12, 96),
        ("aten.native_layer_norm.default", types((4, 3), (3,)), types((4, 3), (4, 1), (4, 1)), 12, 140),
        ("aten.view.default", types((4, 3)), types((12,)), 0, 0),
        ("aten.t.default", types((4, 3)), types((3, 4)), 0, 0),
        ("aten.clone.default", types((4, 3)), types((4, 3)), 0, 96),
        ("aten.full.default", (), types((4, 3)), 0, 48),
        ("aten.zeros_like.default", types((4, 3)), types((4, 3)), 0, 48),
        ("aten.embedding.default", (*types((1000, 3)), *types((5,), dtype=I64)), types((5, 3)), 0, 120 + 40),
        ("autopar.masked_embedding", (*types((500, 3)), *types((5,), dtype=I64)), types((5, 3)), 0, 120 + 40),
        (
            "aten.scatter_add.default",
            (*types((9,)), *types((5,), dtype=I64), *types((5,))),
            types((9,)),
            5,
            132,
        ),
        ("autopar.unheard_of", types((4, 3)), types((2,)), 12, 56),
        ("nosuch.op.default", types((4, 3)), types((2,)), 12, 56),
        ("param", (), types((4, 3)), 0, 0),
    ],
)
def test_other_families(
    op: str, inputs: tuple[TensorType, ...], outputs: tuple[TensorType, ...], work: int, nbytes: int
) -> None:
    node = Node("y", op, tuple(Value(f"x{i}") for i in range(len(inputs))), (), outputs)
    assert flops(node, inputs) == work
    assert bytes_moved(node, inputs) == nbytes


def test_results_that_are_no_tensors_count_nothing() -> None:
    node = Node("y", "aten.convolution_backward.default", (), (), (None, *types((6, 4, 1, 1)), None))
    inputs = types((2, 6, 8, 8), (2, 4, 8, 8), (6, 4, 1, 1))
    assert flops(node, inputs) == 2 * 2 * 64 * 24
    assert bytes_moved(node, inputs) == 4 * (768 + 512 + 24 + 24)


def test_every_name_in_the_table_is_an_operation() -> None:
    ours = {
        *PLACEHOLDERS,
        "scatter_value",
        "_linear_pointwise",
        "grouped_mm",
        "experts",
        "experts_backward",
    }
    ours |= {op.removeprefix("autopar.").removesuffix(".default") for op in LOCAL_OPS}
    ours |= {"some_experts", "some_experts_backward", *EXCHANGES}
    ours |= {"random_bits", "grouped_mm_fallback", "grouped_mm_fallback_backward"}  # the latter of transformers
    missing = [name for name in FAMILIES if name not in ours and not hasattr(aten, name)]
    assert missing == []


GRAPH = """
graph(b=8)
%w: f32[16, 4] = param("w")
%x: f32[b, 16] = input("x")
%y: f32[b, 4] = aten.mm.default(%x, %w)
%g: f32[b, 4] = aten.gelu.default(%y)
%v: f32[4*b] = aten.view.default(%g, [4*b])
%l: f32[] = aten.sum.default(%v)
backward %gw: f32[16, 4] = aten.mm.default(%v, %g)
return output "0" = %l
"""


def test_totals_are_polynomials_of_the_batch() -> None:
    graph = Graph.from_text(GRAPH.replace("backward %gw: f32[16, 4] = aten.mm.default(%v, %g)\n", ""))
    b = symbol("b")
    assert total_flops(graph) == 2 * 16 * 4 * b + 4 * b + 4 * b
    assert total_bytes(graph) == 4 * ((16 * b + 64 + 4 * b) + 8 * b + (4 * b + 1))
    for size in (3, 8):
        concrete = graph.at(b=size)
        assert total_flops(concrete) == total_flops(graph).subs(b, size)
        assert total_bytes(concrete) == total_bytes(graph).subs(b, size)


def test_the_larger_of_two_symbolic_sizes() -> None:
    b = symbol("b")
    assert larger(3, 5) == 5
    assert larger(2 * b, 5 * b) == 5 * b
    assert larger(b * (b + 1), 2 * b * (b + 1)) == 2 * b * (b + 1)
    assert larger(b, 100) == sympy.Max(b, 100)


def test_roofline_by_hand() -> None:
    # (8+4)(4+4)(4+4) / (8*4*4) = 6 times the work, at half of the peak.
    assert compute_seconds(TOY, 256, 0, F32, (8, 4, 4)) == pytest.approx(1e-3 + 256 * 6 / 0.5e6)
    assert compute_seconds(TOY, 256, 0, BF16, (8, 4, 4)) == pytest.approx(1e-3 + 256 * 6 / 2e6)
    assert compute_seconds(TOY, 256, 1000, F32, (8, 4, 4)) == pytest.approx(1e-3 + 1000 / 1e5)
    assert compute_seconds(TOY, 500, 10, F32) == pytest.approx(1e-3 + 500 / 1e6)
    assert compute_seconds(TOY, 0, 0, F32, (0, 4, 4)) == pytest.approx(1e-3)


def test_seconds_of_nodes() -> None:
    mm = Node("y", "aten.mm.default", (Value("a"), Value("b")), (), types((8, 4)))
    inputs = types((8, 4), (4, 4))
    assert node_seconds(TOY, mm, inputs) == pytest.approx(1e-3 + max(256 * 6 / 0.5e6, 4 * 80 / 1e5))
    half = node_seconds(TOY, mm, types((4, 4), (4, 4)), types((4, 4)))
    assert half < node_seconds(TOY, mm, inputs)
    assert node_seconds(TOY, Node("v", "aten.view.default"), inputs[:1], types((32,))) == 1e-4
    assert node_seconds(TOY, Node("w", "param", ("w",), (), types((8, 4))), ()) == 0.0
    table, rows = types((100, 8))[0], TensorType((2,), I64)
    lookup = Node("e", "aten.embedding.default", (Value("t"), Value("i")), (), types((2, 8)))
    local = node_seconds(TOY, lookup, (table, rows), local="autopar.masked_embedding")
    assert local == node_seconds(TOY, lookup, (table, rows)) == pytest.approx(1e-3 + (2 * 64 + 16) / 1e5)


@given(st.tuples(*[st.integers(1, 4096)] * 3), st.integers(0, 2), st.integers(1, 512))
def test_smaller_shards_are_never_dearer(shape: tuple[int, int, int], which: int, less: int) -> None:
    def price(m: int, n: int, k: int) -> float:
        node = Node("y", "aten.mm.default", (Value("a"), Value("b")))
        return node_seconds(Cluster.get("dgx-a100-80gb"), node, types((m, k), (k, n)), types((m, n)))

    small = list(shape)
    small[which] = max(1, small[which] - less)
    assert price(*small) <= price(*shape) * (1 + 1e-12)


def test_a_large_product_comes_near_the_efficiency_of_a_gpu() -> None:
    device = Cluster.get("dgx-a100-80gb").device
    node = Node("y", "aten.mm.default", (Value("a"), Value("b")))
    square, skinny = types((8192, 8192), dtype=BF16)[0], types((16, 8192), dtype=BF16)[0]
    seconds = node_seconds(Cluster.get("dgx-a100-80gb"), node, (square, square), (square,))
    reached = 2 * 8192**3 / seconds / device.peak_flops["bf16"] / device.sustained
    assert 0.75 < reached < device.matmul_efficiency
    # A product of few rows reads the matrix: bandwidth decides.
    seconds = node_seconds(Cluster.get("dgx-a100-80gb"), node, (skinny, square), (skinny,))
    moved = int(bytes_moved(node, (skinny, square), (skinny,)))
    assert seconds == pytest.approx(device.launch_seconds + moved / device.memory_bandwidth)


TILED = replace(TOY.device, processors=4, tile_depth=32, tile_border=16, matmul_efficiency=1.0)


def test_tiles_are_dealt_out_in_waves() -> None:
    """A product of one tile of 64 x 64 takes as long as four of them on four processors; a fifth opens a wave."""
    one = product_seconds(TILED, 1e9, 1, (64, 64, 100))
    assert one == pytest.approx(2 * 64 * 64 * (100 + 32 / 2) * (1 + 16 / 64 * 2) / (1e9 / 4))
    assert product_seconds(TILED, 1e9, 4, (64, 64, 100)) == one
    assert product_seconds(TILED, 1e9, 5, (64, 64, 100)) == 2 * one
    assert product_seconds(TILED, 1e9, 1, (65, 64, 100)) == one  # two tiles, or one of 128 x 64
    # Elements of four bytes fill the pipeline sooner.
    assert product_seconds(TILED, 1e9, 1, (64, 64, 100), 4) == pytest.approx(one * 108 / 116)


sides = st.integers(1, 5000)


@given(st.sampled_from(["dgx-h100", "dgx-a100-80gb", "mi300x"]), sides, sides, sides, st.integers(1, 64))
def test_no_product_is_quicker_than_the_peak_or_than_a_part_of_it(
    name: str, m: int, n: int, k: int, batch: int
) -> None:
    device = Cluster.get(name).device
    whole = product_seconds(device, 1e12, batch, (m, n, k))
    assert 2.0 * batch * m * n * k / whole <= 1e12 * (1 + 1e-9)
    parts = ((batch, -(-m // 2), n, k), (batch, m, -(-n // 2), k), (batch, m, n, -(-k // 2)), (-(-batch // 2), m, n, k))
    for count, *shape in parts:
        assert product_seconds(device, 1e12, count, (shape[0], shape[1], shape[2])) <= whole * (1 + 1e-12)


def test_wide_heads_use_more_of_the_peak() -> None:
    device = replace(TOY.device, attention_efficiency=0.8, attention_width=30)
    assert attention_seconds(device, 1e9, 1e6, 30, 9) == pytest.approx(2e6 / 0.8e9)
    assert attention_seconds(device, 1e9, 1e6, 1e9, 9) == pytest.approx(1e6 / 0.8e9)
    short = replace(device, attention_length=100)
    assert attention_seconds(short, 1e9, 1e6, 1e9, 100) == pytest.approx(2e6 / 0.8e9)


def test_the_last_shard_of_causal_queries_is_priced_not_the_average() -> None:
    node = Node("y", "autopar.attention.default", (None, None, None, None, True))
    whole, shard = types((2, 4, 64, 8)) * 3, (*types((2, 4, 16, 8)), *types((2, 4, 64, 8)) * 2)
    last = family_of("autopar.causal_attention").flops(node, shard, ())
    square = 2 * 4 * 16 * 16 * 16  # half of the corner, two products of 2 FLOPs each, width 8
    assert last == 2 * (2 * 4 * 16 * 48 * 16) + square
    assert 4 * last == pytest.approx(flops(node, whole) * 1.75)


@pytest.mark.parametrize("held", [8, 2])
def test_experts_do_their_share_of_the_rows(held: int) -> None:
    node = Node("y", "autopar.experts.default", (None, None, None, None, None, None, None, "", 8, 0))
    inputs = types((64, 16), (64, 2), (64, 2), (held, 48, 16), (held, 16, 24))
    rows = 128 * held // 8
    assert flops(node, inputs) == 2 * rows * (48 * 16 + 24 * 16)
    assert bytes_moved(node, inputs, types((64, 16))) > rows * 4 * (48 + 24)
    backward = replace(node, op="autopar.experts_backward.default")
    taken = (*types((64, 16)), *inputs)
    assert flops(backward, taken) == 2 * rows * (3 * 48 * 16 + 2 * 24 * 16), "the second product is not repeated"


def test_kernels_between_products_of_experts_take_time_of_their_own() -> None:
    act = activation_text(lambda x: x[:, :24].sigmoid() * x[:, 24:], 48, torch.float32)
    assert act is not None
    forward, backward = traffic(act, 48)
    assert forward == (2 * 24 + 3 * 24) / 48, "a sigmoid of one half, times the other"
    assert backward > forward
    assert traffic(act, 12) == traffic("", 12) == traffic(None, 48), "a shard of a row has no halves"
    node = Node("y", "autopar.experts.default", (None, None, None, None, None, None, None, act, 8, 0))
    inputs = types((64, 16), (64, 2), (64, 2), (8, 48, 16), (8, 16, 24))
    between = 4 * (128 * (3 * 16 + 2 * 24 + 48 * forward) + 64 * 16)
    quick = Cluster.get("dgx-h100")
    slow = replace(quick, device=replace(quick.device, memory_bandwidth=quick.device.memory_bandwidth / 1e6))
    moved = float(bytes_moved(node, inputs, types((64, 16)))) + between
    apart = node_seconds(slow, node, inputs, types((64, 16))) - node_seconds(quick, node, inputs, types((64, 16)))
    assert apart == pytest.approx(moved / slow.device.memory_bandwidth, rel=0.02)


def test_grouped_products_have_a_rate_of_their_own() -> None:
    node = Node("y", "autopar.experts.default", (None, None, None, None, None, None, None, "", 8, 0))
    inputs = types((65536, 4096), (65536, 2), (65536, 2), (8, 8192, 4096), (8, 4096, 4096), dtype=torch.bfloat16)
    preset = Cluster.get("dgx-h100")
    halved = replace(preset, device=replace(preset.device, grouped_products=preset.device.grouped_products / 2))
    found, slower = (node_seconds(cluster, node, inputs, inputs[:1]) for cluster in (preset, halved))
    assert 1.7 * found < slower < 2 * found
