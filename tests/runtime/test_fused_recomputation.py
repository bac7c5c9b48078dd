"""Saved values that backward computes again, since compiled code does not store them otherwise."""

from __future__ import annotations

from dataclasses import replace

import torch

from autopar.ir.placements import parse_placements
from autopar.ir.program import Program, TensorSlot
from autopar.ops.masked import LOCAL_OPS
from autopar.runtime.execute.fused_recomputation import recomputed_in_backward
from autopar.runtime.execute.section_code import compile_section

CPU = torch.device("cpu")
BEFORE = """
# rank at (0,) of mesh (1,)
refresh():
  return
forward(%x, %w):
  %mm = aten.mm.default(%x, %w)  @h.0.fc
  %tanh = aten.tanh.default(%mm)  @h.0
  %add = aten.add.Tensor(%tanh, 1.0)  @h.0
  %mul = aten.mul.Tensor(%add, %mm)  @h.0
  %mm_1 = aten.mm.default(%mul, %w)  @h.0.fc
  return %mm_1, %add, %tanh, %mul, %w
backward(%add_rest, %tanh_rest, %mul_rest, %w, %tangent):
  %view = aten.reshape.default(%tanh_rest, [4, 4])  @h.0
  %a = aten.mul.Tensor(%add_rest, %tangent)  @h.0
  %b = aten.mul.Tensor(%a, %view)  @h.0
  %c = aten.mm.default(%mul_rest, %b)  @h.0
  return %c, %w
"""
AFTER = """
forward(%x, %w):
  %mm = aten.mm.default(%x, %w)
  %tanh = aten.tanh.default(%mm)
  %add = aten.add.Tensor(%tanh, 1.0)
  %mul = aten.mul.Tensor(%add, %mm)
  %mm_1 = aten.mm.default(%mul, %w)
  return %mm_1, %mul, %w, %mm
backward(%mul_rest, %w, %mm_kept, %tangent):
  %tanh_fused = aten.tanh.default(%mm_kept)
  %add_fused = aten.add.Tensor(%tanh_fused, 1.0)
  %a = aten.mul.Tensor(%add_fused, %tangent)
  %view = aten.reshape.default(%tanh_fused, [4, 4])
  %b = aten.mul.Tensor(%a, %view)
  %c = aten.mm.default(%mul_rest, %b)
  return %c, %w
"""


def program() -> Program:
    result = TensorSlot("y", "output", "0", (4, 4), parse_placements("R"))
    return replace(Program.from_text(BEFORE.strip()), results=(result,))


def test_only_what_is_stored_anyway_is_saved() -> None:
    after = recomputed_in_backward(program())
    assert f"\n{after.forward}\n{after.backward}\n" == AFTER


def test_the_numbers_are_bit_equal() -> None:
    x, w, tangent = (torch.randn(4, 4) for _ in range(3))
    found = []
    for each in (program(), recomputed_in_backward(program())):
        forward, backward = (compile_section(s, LOCAL_OPS, CPU) for s in (each.forward, each.backward))
        y, *saved = forward([x, w])
        found.append([y, *backward([*saved, tangent])])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_small_values_stay_saved() -> None:
    """The scale of a norm is computed from a sum alone."""
    text = """
    # rank at (0,) of mesh (1,)
    refresh():
      return
    forward(%x):
      %sum = aten.sum.dim_IntList(%x, [1], True)
      %rsqrt = aten.rsqrt.default(%sum)
      %mul = aten.mul.Tensor(%x, %rsqrt)
      return %rsqrt
    backward(%rsqrt_rest):
      %neg = aten.neg.default(%rsqrt_rest)
      return %neg
    """
    before = Program.from_text(text)
    assert recomputed_in_backward(before) is before


def of_forward(lines: str, saved: str, results: str = "%z") -> Program:
    """A program that saves one value of ``lines``, of which ``results`` are given."""
    head = "# rank at (0,) of mesh (1,)\nrefresh():\n  return\n"
    text = (
        f"{head}forward(%x, %w, %i):\n{lines}\n  return {results}, {saved}\n"
        "backward(%saved, %tangent):\n  %c = aten.mul.Tensor(%saved, %tangent)\n  return %c\n"
    )
    result = TensorSlot("y", "output", "0", (4, 4), parse_placements("R"))
    return replace(Program.from_text(text), results=(result,))


def test_a_gathered_value_is_not_small() -> None:
    """One sum is saved, not the three tensors of its size that it is computed from."""
    lines = """  %lin = aten.mm.default(%x, %w)  @h.0
  %a = aten.index.Tensor(%x, [%i])  @h.0
  %b = aten.cumsum.default(%x, 0)  @h.0
  %ab = aten.add.Tensor(%a, %b)  @h.0
  %u = aten.add.Tensor(%lin, %ab)  @h.0
  %z = aten.sigmoid.default(%u)  @h.0"""
    before = of_forward(lines, "%u")
    assert recomputed_in_backward(before) == before


def test_a_part_is_not_computed_from_the_whole() -> None:
    lines = """  %lin = aten.mm.default(%x, %w)  @h.0
  %part = aten.slice.Tensor(%lin, 1, 0, 1)  @h.0
  %u = aten.add.Tensor(%part, 1.0)  @h.0
  %z = aten.sigmoid.default(%u)  @h.0"""
    before = of_forward(lines, "%u")
    assert recomputed_in_backward(before) == before


def test_long_chains_take_no_longer_than_short_ones() -> None:
    """``x = x * sigmoid(x)`` forty times: two ways lead to each value, and a thousand billion to the first."""
    lines, outputs = ["  %y0 = aten.mm.default(%x, %w)  @h.0"], []
    for n in range(40):
        lines.append(f"  %s{n} = aten.sigmoid.default(%y{n})  @h.0")
        lines.append(f"  %y{n + 1} = aten.mul.Tensor(%y{n}, %s{n})  @h.0")
        outputs += [f"%y{n + 1}", f"%s{n}"]
    saved = ", ".join(f"%r{n}" for n in range(80))
    uses = "\n".join(f"  %c{n} = aten.mul.Tensor(%r{n}, %tangent)" for n in range(80))
    gradients = ", ".join(f"%c{n}" for n in range(80))
    text = "# rank at (0,) of mesh (1,)\nrefresh():\n  return\nforward(%x, %w):\n" + "\n".join(lines)
    text += f"\n  %z = aten.neg.default(%y40)  @h.0\n  return %z, {', '.join(outputs)}\n"
    text += f"backward({saved}, %tangent):\n{uses}\n  return {gradients}\n"
    result = TensorSlot("y", "output", "0", (4, 4), parse_placements("R"))
    before = replace(Program.from_text(text), results=(result,))
    after = recomputed_in_backward(before)
    assert len(after.backward.instructions) <= 80 + 80
    assert len(after.forward.outputs) < len(before.forward.outputs)


DROPPING = """
# rank at (0,) of mesh (1,)
refresh():
  return
forward(%state, %x, %w):
  %mm = aten.mm.default(%x, %w)  @h.0.fc
  %mask = autopar.bernoulli.default(%state, [4, 4], 0.5, dtype=torch.bool, device=device("cpu"), place=3)  @h.0.drop
  %cast = aten._to_copy.default(%mask, dtype=torch.float32)  @h.0.drop
  %drop = aten.mul.Tensor(%mm, %cast)  @h.0.drop
  %y = aten.mm.default(%drop, %w)  @h.0.fc
  return %y, %mm, %mask, %w
backward(%mm_rest, %mask_rest, %w, %tangent):
  %back = aten._to_copy.default(%mask_rest, dtype=torch.float32)  @h.0.drop
  %a = aten.mul.Tensor(%mm_rest, %tangent)  @h.0
  %b = aten.mul.Tensor(%a, %back)  @h.0
  return %b, %w
"""


def test_masks_are_drawn_again() -> None:
    """Also under a plan that saves them: what is saved in their place is the state of the step."""
    result = TensorSlot("y", "output", "0", (4, 4), parse_placements("R"))
    before = replace(Program.from_text(DROPPING.strip()), results=(result,))
    after = recomputed_in_backward(before)
    assert [str(value) for value in after.forward.outputs] == ["%y", "%mm", "%w", "%state"]
    assert "autopar.bernoulli.default(%state_kept" in str(after.backward)
    x, w, tangent = (torch.randn(4, 4) for _ in range(3))
    state, found = torch.tensor([1, 0, 2, 0]), []
    for each in (before, after):
        forward, backward = (compile_section(s, LOCAL_OPS, CPU) for s in (each.forward, each.backward))
        y, *saved = forward([state, x, w])
        found.append([y, *backward([*saved, tangent])])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
