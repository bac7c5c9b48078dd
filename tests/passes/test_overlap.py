"""Overlap, text in, text out: collectives start early, waits come late, and nothing else moves."""

from __future__ import annotations

import pytest

from autopar.passes.lower.overlap import overlap, overlap_section
from tests.helpers.pass_text import check


def test_a_wait_moves_down_to_the_first_use() -> None:
    check(
        overlap_section,
        """
        backward(%x, %w):
          %y = aten.mm.default(%x, %w)
          %y_all_reduce = collective.all_reduce(%y, axes=[0], op="sum")
          %y_wait = collective.wait(%y_all_reduce)
          %z = aten.mm.default(%w, %x)
          %a = aten.add.Tensor(%z, %y_wait)
          %b = aten.mul.Tensor(%y_wait, %a)
          return %b
        """,
        """
        backward(%x, %w):
          %y = aten.mm.default(%x, %w)
          %y_all_reduce = collective.all_reduce(%y, axes=[0], op="sum")
          %z = aten.mm.default(%w, %x)
          %y_wait = collective.wait(%y_all_reduce)
          %a = aten.add.Tensor(%z, %y_wait)
          %b = aten.mul.Tensor(%y_wait, %a)
          return %b
        """,
    )


def test_what_is_only_returned_is_awaited_last_and_in_order() -> None:
    check(
        overlap_section,
        """
        backward(%x, %y):
          %g = collective.all_reduce_bucket([%x, %y], axes=[0], op="sum")
          %g_wait, %g_wait.1 = collective.wait(%g)
          %h = collective.all_reduce(%y, axes=[1], op="sum")
          %h_wait = collective.wait(%h)
          %a = aten.relu.default(%x)
          return %h_wait, %g_wait, %a
        """,
        """
        backward(%x, %y):
          %g = collective.all_reduce_bucket([%x, %y], axes=[0], op="sum")
          %h = collective.all_reduce(%y, axes=[1], op="sum")
          %a = aten.relu.default(%x)
          %g_wait, %g_wait.1 = collective.wait(%g)
          %h_wait = collective.wait(%h)
          return %h_wait, %g_wait, %a
        """,
    )


def test_a_wait_put_elsewhere_on_purpose_stays() -> None:
    """Two buckets are on their way at once and no more: the wait for the first stands before the third."""
    text = """
        backward(%x, %y):
          %g = collective.all_reduce(%x, axes=[0], op="sum")
          %a = aten.relu.default(%y)
          %g_wait = collective.wait(%g)
          %b = aten.relu.default(%a)
          return %g_wait, %b
        """
    check(overlap_section, text, text)


def test_the_next_weight_is_on_its_way_while_one_is_awaited() -> None:
    """One gathered weight ahead and no more; what is gathered but no input (%a) stays where it is made."""
    check(
        overlap_section,
        """
        forward(%x, %u, %v, %w):
          %gu = collective.all_gather(%u, axes=[0], dim=0, size=4, before=1)
          %u_whole = collective.wait(%gu)
          %a = aten.mm.default(%x, %u_whole)
          %gv = collective.all_gather(%v, axes=[0], dim=0, size=4, before=1)
          %v_whole = collective.wait(%gv)
          %b = aten.mm.default(%a, %v_whole)
          %gb = collective.all_gather(%b, axes=[0], dim=0, size=4, before=1)
          %b_whole = collective.wait(%gb)
          %gw = collective.all_gather(%w, axes=[0], dim=0, size=4, before=1)
          %w_whole = collective.wait(%gw)
          %c = aten.mm.default(%b_whole, %w_whole)
          return %c
        """,
        """
        forward(%x, %u, %v, %w):
          %gu = collective.all_gather(%u, axes=[0], dim=0, size=4, before=1)
          %gv = collective.all_gather(%v, axes=[0], dim=0, size=4, before=1)
          %u_whole = collective.wait(%gu)
          %a = aten.mm.default(%x, %u_whole)
          %gw = collective.all_gather(%w, axes=[0], dim=0, size=4, before=1)
          %v_whole = collective.wait(%gv)
          %b = aten.mm.default(%a, %v_whole)
          %gb = collective.all_gather(%b, axes=[0], dim=0, size=4, before=1)
          %b_whole = collective.wait(%gb)
          %w_whole = collective.wait(%gw)
          %c = aten.mm.default(%b_whole, %w_whole)
          return %c
        """,
    )


PROGRAM = """
# rank at (0,) of mesh (2,)
{slots}
refresh():
  return
{forward}
backward():
  return
"""


def program(forward: str, **kinds: str) -> str:
    """The text of a program with that forward section, whose inputs and results are of the given kinds."""
    groups = {name: "result" if kind in ("output", "mutation") else "placeholder" for name, kind in kinds.items()}
    slots = [f'{groups[name]} "{name}" = {kind} "{name}": f32[4] at (R)' for name, kind in kinds.items()]
    return PROGRAM.format(slots="\n".join(slots), forward=forward.strip())


COUNT = """
forward(%w, %labels):
  %y = aten.tanh.default(%w)
  %valid = aten.ne.Scalar(%labels, -100)
  %count = aten.sum.default(%valid)
  %count_all_reduce = collective.all_reduce(%count, axes=[0], op="sum")
  %count_wait = collective.wait(%count_all_reduce)
  %mean = aten.div.Tensor(%y, %count_wait)
  return %mean
"""
EARLY_COUNT = """
forward(%w, %labels):
  %valid = aten.ne.Scalar(%labels, -100)
  %count = aten.sum.default(%valid)
  %count_all_reduce = collective.all_reduce(%count, axes=[0], op="sum")
  %y = aten.tanh.default(%w)
  %count_wait = collective.wait(%count_all_reduce)
  %mean = aten.div.Tensor(%y, %count_wait)
  return %mean
"""


def test_what_depends_on_the_batch_alone_starts_first() -> None:
    kinds = {"w": "param", "labels": "input", "mean": "output"}
    check(overlap, program(COUNT, **kinds), program(EARLY_COUNT, **kinds))


def test_what_depends_on_a_parameter_does_not() -> None:
    same = program(COUNT, w="param", labels="param", mean="output")
    check(overlap, same, same)


LOSS = """
forward(%x):
  %loss = aten.sum.default(%x)
  %loss_all_reduce = collective.all_reduce(%loss, axes=[0], op="sum")
  %loss_wait = collective.wait(%loss_all_reduce)
  %a = aten.relu.default(%x)
  return %loss_wait, %a
"""
LATE_WAIT = """
forward(%x):
  %loss = aten.sum.default(%x)
  %loss_all_reduce = collective.all_reduce(%loss, axes=[0], op="sum")
  %a = aten.relu.default(%x)
  %loss_wait = collective.wait(%loss_all_reduce)
  return %loss_wait, %a
"""
NO_WAIT = """
forward(%x):
  %loss = aten.sum.default(%x)
  %loss_all_reduce = collective.all_reduce(%loss, axes=[0], op="sum")
  %a = aten.relu.default(%x)
  return %loss_all_reduce, %a
"""


def test_the_wait_for_a_loss_is_left_to_whoever_wants_it() -> None:
    kinds = {"x": "param", "loss": "output"}
    check(overlap, program(LOSS, **kinds), program(NO_WAIT, **kinds))


USED = LOSS.replace("relu.default(%x)", "relu.default(%loss_wait)")
SAVED = ("%loss_wait, %a", "%loss_wait, %loss_wait")


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        pytest.param(LOSS, LATE_WAIT, "mutation", id="a new buffer"),
        pytest.param(LOSS.replace(*SAVED), LATE_WAIT.replace(*SAVED), "output", id="saved for backward as well"),
        pytest.param(USED, USED, "output", id="used as well"),
    ],
)
def test_a_wait_that_something_else_needs_stays(before: str, after: str, kind: str) -> None:
    kinds = {"x": "param", "loss": kind}
    check(overlap, program(before, **kinds), program(after, **kinds))
