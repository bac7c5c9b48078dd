"""Splitting sections into pieces: text in, text out."""

from __future__ import annotations

import pytest

from autopar.ir.program import Section
from autopar.runtime.execute.index_guards import GUARDED
from autopar.runtime.execute.piece_lookups import LOOKUPS
from autopar.runtime.execute.pieces import kind_of, split


def check(before: str, after: str) -> None:
    found = split(Section.from_text(before), lambda instruction: kind_of(instruction, {*GUARDED, *LOOKUPS}))
    assert str(found).strip() == after.strip()


def test_equal_layers_are_one_piece() -> None:
    check(
        """
        forward(%x, %w0, %w1):
          %mm = aten.mm.default(%x, %w0)  @h.0.fc
          %tanh = aten.tanh.default(%mm)  @h.0
          %sin = aten.sin.default(%tanh)  @h.0
          %mm_1 = aten.mm.default(%sin, %w1)  @h.1.fc
          %tanh_1 = aten.tanh.default(%mm_1)  @h.1
          %sin_1 = aten.sin.default(%tanh_1)  @h.1
          return %sin_1, %tanh, %tanh_1
        """,
        """
forward(%x, %w0, %w1):
  %forward_piece_0, %forward_piece_0.1 = compiled.0([%x, %w0])
  %forward_piece_1, %forward_piece_1.1 = compiled.0([%forward_piece_0.1, %w1])
  return %forward_piece_1.1, %forward_piece_0, %forward_piece_1
piece(%a0, %a1):
  %v0 = aten.mm.default(%a0, %a1)
  %v1 = aten.tanh.default(%v0)
  %v2 = aten.sin.default(%v1)
  return %v1, %v2
        """,
    )


def test_blocks_without_an_equal_are_one_piece() -> None:
    check(
        """
        forward(%x):
          %tanh = aten.tanh.default(%x)  @h.0.own
          %sin = aten.sin.default(%tanh)  @h.0.own
          %exp = aten.exp.default(%sin)  @h.1.own
          %cos = aten.cos.default(%exp)  @h.1.own
          %abs = aten.abs.default(%cos)  @h.2.own
          %neg = aten.neg.default(%abs)  @h.2.own
          %abs_1 = aten.abs.default(%neg)  @h.3.own
          %neg_1 = aten.neg.default(%abs_1)  @h.3.own
          return %neg_1
        """,
        """
forward(%x):
  %forward_piece_0 = compiled.0([%x])
  %forward_piece_1 = compiled.1([%forward_piece_0])
  %forward_piece_2 = compiled.1([%forward_piece_1])
  return %forward_piece_2
piece(%a0):
  %v0 = aten.tanh.default(%a0)
  %v1 = aten.sin.default(%v0)
  %v2 = aten.exp.default(%v1)
  %v3 = aten.cos.default(%v2)
  return %v3
piece(%a0):
  %v0 = aten.abs.default(%a0)
  %v1 = aten.neg.default(%v0)
  return %v1
        """,
    )


def test_leaves_of_a_container_are_no_layers() -> None:
    check(
        """
        forward(%x):
          %tanh = aten.tanh.default(%x)  @0
          %sin = aten.sin.default(%tanh)  @1
          return %sin
        """,
        """
forward(%x):
  %forward_piece_0 = compiled.0([%x])
  return %forward_piece_0
piece(%a0):
  %v0 = aten.tanh.default(%a0)
  %v1 = aten.sin.default(%v0)
  return %v1
        """,
    )


def test_collectives_start_and_end_where_they_did() -> None:
    check(
        """
        forward(%x, %w):
          %sin = aten.sin.default(%x)
          %cos = aten.cos.default(%sin)
          %started = collective.all_gather(%w, (0,), 0, 8, 1)
          %exp = aten.exp.default(%cos)
          %neg = aten.neg.default(%exp)
          %whole = collective.wait(%started)
          %mm = aten.mm.default(%neg, %whole)
          %tanh = aten.tanh.default(%mm)
          return %tanh
        """,
        """
forward(%x, %w):
  %forward_piece_0 = compiled.0([%x])
  %started = collective.all_gather(%w, [0], 0, 8, 1)
  %forward_piece_1 = compiled.1([%forward_piece_0])
  %whole = collective.wait(%started)
  %mm = aten.mm.default(%forward_piece_1, %whole)
  %tanh = aten.tanh.default(%mm)
  return %tanh
piece(%a0):
  %v0 = aten.sin.default(%a0)
  %v1 = aten.cos.default(%v0)
  return %v1
piece(%a0):
  %v0 = aten.exp.default(%a0)
  %v1 = aten.neg.default(%v0)
  return %v1
        """,
    )


def test_draws_move_in_front_and_sums_behind() -> None:
    check(
        """
        backward(%state, %x, %sum):
          %sin = aten.sin.default(%x)
          %kept = autopar.bernoulli.default(%state, [4], 0.9)
          %mul = aten.mul.Tensor(%sin, %kept)
          %more = aten.add_.Tensor(%sum, %mul)
          %cos = aten.cos.default(%mul)
          return %cos, %more
        """,
        """
backward(%state, %x, %sum):
  %kept = autopar.bernoulli.default(%state, [4], 0.9)
  %backward_piece_0, %backward_piece_0.1 = compiled.0([%x, %kept])
  %more = aten.add_.Tensor(%sum, %backward_piece_0)
  return %backward_piece_0.1, %more
piece(%a0, %a1):
  %v0 = aten.sin.default(%a0)
  %v1 = aten.mul.Tensor(%v0, %a1)
  %v2 = aten.cos.default(%v1)
  return %v1, %v2
        """,
    )


def test_what_reads_the_piece_on_the_host_ends_it() -> None:
    check(
        """
        forward(%x, %n):
          %sin = aten.sin.default(%x)
          %cos = aten.cos.default(%sin)
          %found = aten.nonzero.default(%cos)
          %random = aten.binomial.default(%n, %cos)
          %exp = aten.exp.default(%cos)
          return %found, %random, %exp
        """,
        """
forward(%x, %n):
  %forward_piece_0 = compiled.0([%x])
  %found = aten.nonzero.default(%forward_piece_0)
  %random = aten.binomial.default(%n, %forward_piece_0)
  %exp = aten.exp.default(%forward_piece_0)
  return %found, %random, %exp
piece(%a0):
  %v0 = aten.sin.default(%a0)
  %v1 = aten.cos.default(%v0)
  return %v1
        """,
    )


def test_what_an_index_is_computed_by_moves_in_front() -> None:
    check(
        """
        forward(%x, %labels):
          %sin = aten.sin.default(%x)
          %ne = aten.ne.Scalar(%labels, -100)
          %where = aten.where.self(%ne, %labels, 0)
          %gather = aten.gather.default(%sin, 1, %where)
          %cos = aten.cos.default(%gather)
          return %cos
        """,
        """
forward(%x, %labels):
  %forward_piece_0 = compiled.0([%labels])
  %forward_piece_1 = compiled.1([%x, %forward_piece_0])
  return %forward_piece_1
piece(%a0):
  %v0 = aten.ne.Scalar(%a0, -100)
  %v1 = aten.where.self(%v0, %a0, 0)
  return %v1
piece(%a0, %a1):
  %v0 = aten.sin.default(%a0)
  %v1 = aten.gather.default(%v0, 1, %a1)
  %v2 = aten.cos.default(%v1)
  return %v2
        """,
    )


def test_several_results() -> None:
    check(
        """
        forward(%x, %x_result1):
          %y, %y.1 = aten.max.dim(%x, 1)
          %z, %z.1 = autopar.other(%y)
          %a = aten.add.Tensor(%z.1, %x_result1)
          %b = aten.mul.Tensor(%a, %y)
          return %b, none, %z
        """,
        """
forward(%x, %x_result1):
  %y, %y.1 = aten.max.dim(%x, 1)
  %z, %z.1 = autopar.other(%y)
  %forward_piece_0 = compiled.0([%z.1, %x_result1, %y])
  return %forward_piece_0, none, %z
piece(%a0, %a1, %a2):
  %v0 = aten.add.Tensor(%a0, %a1)
  %v1 = aten.mul.Tensor(%v0, %a2)
  return %v1
        """,
    )


@pytest.mark.parametrize("depth", [2, 5])
def test_pieces_do_not_grow_in_number_with_depth(depth: int) -> None:
    lines, x = [], "%x"
    for layer in range(depth):
        lines.append(f"  %mm_{layer} = aten.mm.default({x}, %w{layer})  @layers.{layer}.up")
        lines.append(f"  %act_{layer} = aten.relu.default(%mm_{layer})  @layers.{layer}")
        lines.append(f"  %add_{layer} = aten.add.Tensor(%act_{layer}, {x})  @layers.{layer}")
        x = f"%add_{layer}"
    weights = ", ".join(f"%w{layer}" for layer in range(depth))
    text = "\n".join([f"forward(%x, {weights}):", *lines, f"  return {x}"])
    found = split(Section.from_text(text))
    assert len(found.pieces) == depth
    assert len({piece.canonical for piece in found.pieces.values()}) == 1
    assert [piece.section.instructions[0].module for piece in found.pieces.values()] == [
        f"layers.{layer}.up" for layer in range(depth)
    ]
