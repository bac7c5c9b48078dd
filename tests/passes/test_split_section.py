"""Sections in two, text in, text out: the first half returns what the second needs of it."""

from __future__ import annotations

from autopar.passes.lower.split_section import split_section
from tests.helpers.pass_text import check

WHOLE = """
    backward(%x, %w, %dy):
      %xt = aten.permute.default(%x, [1, 0])
      %dw = aten.mm.default(%xt, %dy)
      %dx, %dx.1 = aten.max.dim(%dy, 0)
      %sent = aten.mul.Tensor(%dx, %w)
      %more = aten.mul.Tensor(%dx.1, %dw)
      return %sent, %dw, none, %more, %dx.1
    """


def test_the_first_half_does_what_the_first_outputs_need() -> None:
    """And carries inputs, and results of several, to the second."""
    check(
        lambda section: split_section(section, 1, "input_gradient", "weight_gradient")[0],
        WHOLE,
        """
        input_gradient(%x, %w, %dy):
          %dx, %dx.1 = aten.max.dim(%dy, 0)
          %sent = aten.mul.Tensor(%dx, %w)
          return %sent, %x, %dy, %dx.1
        """,
    )


def test_the_second_half_does_the_rest() -> None:
    """An input is a single value: the second result of an operation comes under a name of its own."""
    check(
        lambda section: split_section(section, 1, "input_gradient", "weight_gradient")[1],
        WHOLE,
        """
        weight_gradient(%x, %dy, %dx_result1):
          %xt = aten.permute.default(%x, [1, 0])
          %dw = aten.mm.default(%xt, %dy)
          %more = aten.mul.Tensor(%dx_result1, %dw)
          return %dw, none, %more, %dx_result1
        """,
    )


def test_no_output_is_waited_for() -> None:
    """The first half of a section that sends nothing carries its inputs only."""
    check(
        lambda section: split_section(section, 0, "input_gradient", "weight_gradient")[0],
        "backward(%x, %y):\n  %z = aten.relu.default(%x)\n  return %z\n",
        "input_gradient(%x, %y):\n  return %x\n",
    )
