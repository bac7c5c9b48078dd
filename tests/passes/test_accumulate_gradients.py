"""Products with a bias run as one operation, and sections that add gradients up make no tensor for a product."""

from __future__ import annotations

import torch

from autopar.ir.graph import Graph
from autopar.ir.node import Node
from autopar.ir.placements import REPLICATE, Strategy, parse_placement
from autopar.ir.program import Section
from autopar.passes.lower.accumulate_gradients import adding
from autopar.passes.lower.fuse_bias import biased_products
from autopar.runtime.execute.section_code import compile_section
from tests.helpers.pass_text import check

MADE = """weight_gradient(%x, %y, %bias):
  %t = aten.permute.default(%x, [1, 0])
  %product = aten.mm.default(%t, %y)
  %twice = aten.mm.default(%t, %y)
  %more = aten.add.Tensor(%twice, 1)
  %values, %values.1 = aten.max.dim(%y, 0)
  return %more, %product, %twice, %values, %bias
"""
ADDING = """more_weight_gradient(%x, %y, %bias, %sum_so_far_0, %sum_so_far_1, %sum_so_far_2, %sum_so_far_3):
  %sum_so_far_3_more = aten.add_.Tensor(%sum_so_far_3, %bias)
  %t = aten.permute.default(%x, [1, 0])
  %sum_so_far_0_more = aten.addmm_.default(%sum_so_far_0, %t, %y)
  %twice = aten.mm.default(%t, %y)
  %sum_so_far_1_more = aten.add_.Tensor(%sum_so_far_1, %twice)
  %more = aten.add.Tensor(%twice, 1)
  %values, %values.1 = aten.max.dim(%y, 0)
  %sum_so_far_2_more = aten.add_.Tensor(%sum_so_far_2, %values)
  return %more, %sum_so_far_0_more, %sum_so_far_1_more, %sum_so_far_2_more, %sum_so_far_3_more
"""


def test_a_section_that_adds() -> None:
    """What comes before the gradients is returned as it is."""
    check(lambda section: adding(section, 4), MADE, ADDING)


def test_sums_are_changed_in_place() -> None:
    first, more = (compile_section(s, {}, torch.device("cpu")) for s in map(Section.from_text, (MADE, ADDING)))
    torch.manual_seed(0)
    batches = [[torch.randn(5, 3), torch.randn(5, 4), torch.randn(2)] for _ in range(3)]
    wanted = [first([*batch]) for batch in batches]
    sums = [value.clone() for value in first([*batches[0]])[1:]]
    kept = list(sums)
    for batch, alone in zip(batches[1:], wanted[1:], strict=True):
        other, *sums = more([*batch, *sums])
        torch.testing.assert_close(other, alone[0])
    for position, total in enumerate(sums):
        assert total is kept[position]
        torch.testing.assert_close(total, sum(one[position + 1] for one in wanted))


GRAPH = """graph()
%w: f32[3, 4] = param("w")
%b: f32[4] = param("b")
%x: f32[6, 3] = input("x")
%wide: f32[6, 4] = input("wide")
%one: f32[6, 4] = aten.mm.default(%x, %w)
%biased: f32[6, 4] = aten.add.Tensor(%one, %b)
%two: f32[6, 4] = aten.mm.default(%x, %w)
%other_side: f32[6, 4] = aten.add.Tensor(%b, %two)
%three: f32[6, 4] = aten.mm.default(%x, %w)
%used_twice: f32[6, 4] = aten.add.Tensor(%three, %b)
%relu: f32[6, 4] = aten.relu.default(%three)
%four: f32[6, 4] = aten.mm.default(%x, %w)
%no_vector: f32[6, 4] = aten.add.Tensor(%four, %wide)
%five: f32[6, 4] = aten.mm.default(%x, %w)
%scaled: f32[6, 4] = aten.add.Tensor(%five, %b, alpha=2)
%six: f32[6, 4] = aten.mm.default(%x, %w)
%returned: f32[6, 4] = aten.add.Tensor(%six, %b)
return output "0" = %six
"""


def test_which_sums_run_with_their_product() -> None:
    graph = Graph.from_text(GRAPH)
    (whole, by_rows) = ((REPLICATE,), (parse_placement("S(0)"),))

    def everywhere(node: Node) -> Strategy:
        return Strategy((whole,) * len(node.operands), (whole,) * len(node.types))

    def resharded(node: Node) -> Strategy:
        """The products are gathered before the sum."""
        if node.op != "aten.mm.default":
            return everywhere(node)
        return Strategy((by_rows, whole), (by_rows,))

    assert biased_products(graph, everywhere) == {"biased": "one", "other_side": "two"}
    assert biased_products(graph, resharded) == {}


CAST_MADE = """weight_gradient(%x, %y, %narrow):
  %product = aten.mm.default(%x, %y)
  %wide = aten._to_copy.default(%product, dtype=torch.float32)
  %other = aten._to_copy.default(%product, dtype=torch.float32)
  %rounded = aten._to_copy.default(%narrow, dtype=torch.bfloat16)
  %again = aten.neg.default(%other)
  return %again, %wide, %other, %rounded
"""
CAST_ADDING = """more_weight_gradient(%x, %y, %narrow, %sum_so_far_0, %sum_so_far_1, %sum_so_far_2):
  %product = aten.mm.default(%x, %y)
  %sum_so_far_0_more = aten.add_.Tensor(%sum_so_far_0, %product)
  %other = aten._to_copy.default(%product, dtype=torch.float32)
  %sum_so_far_1_more = aten.add_.Tensor(%sum_so_far_1, %other)
  %rounded = aten._to_copy.default(%narrow, dtype=torch.bfloat16)
  %sum_so_far_2_more = aten.add_.Tensor(%sum_so_far_2, %rounded)
  %again = aten.neg.default(%other)
  return %again, %sum_so_far_0_more, %sum_so_far_1_more, %sum_so_far_2_more
"""


def test_a_cast_gradient_is_widened_by_its_sum() -> None:
    """A cast that something else reads stays, and so does one to fewer bits, which would be rounded otherwise."""
    check(lambda section: adding(section, 3), CAST_MADE, CAST_ADDING)


def test_sums_of_cast_gradients_are_bit_equal() -> None:
    first, more = (
        compile_section(s, {}, torch.device("cpu")) for s in map(Section.from_text, (CAST_MADE, CAST_ADDING))
    )
    torch.manual_seed(0)
    x, y = torch.randn(2, 7, 5).bfloat16(), torch.randn(2, 5, 3).bfloat16()
    narrow = torch.randn(2, 4)
    wanted = [first([x[i], y[i], narrow[i]])[1:] for i in range(2)]
    sums = [value.clone() for value in wanted[0]]
    _, *sums = more([x[1], y[1], narrow[1], *sums])
    for total, (one, two) in zip(sums, zip(*wanted, strict=True), strict=True):
        torch.testing.assert_close(total, one + two, rtol=0, atol=0)
