"""Overlap, text in, text out: collectives start early, waits come late, and nothing else moves."""

from __future__ import annotations

import re

import pytest

from autopar.ir.graph import Graph
from autopar.ir.node import Value
from autopar.ir.placements import REPLICATE
from autopar.ir.program import Instruction, Program, Section, TensorSlot
from autopar.passes.lower.overlap import overlap, overlap_section


def parse_section(text: str) -> Section:
    """A section from its text form."""
    head, *body, tail = (line.strip() for line in text.strip().splitlines())
    name, _, listed = head.removesuffix("):").partition("(")
    inputs = tuple(word.removeprefix("%") for word in listed.split(", "))
    lines = ["graph()", *(f'%{word}: f32[1] = input("{word}")' for word in inputs)]
    for line in body:
        results, _, call = line.partition(" = ")
        lines.append(f"{', '.join(f'{r}: f32[1]' for r in results.split(', '))} = {call}")
    nodes = Graph.from_text("\n".join(lines)).nodes[len(inputs) :]
    returned = re.findall(r"%(\w+)(?:\.(\d+))?", tail)
    return Section(
        name,
        inputs,
        tuple(Instruction(n.name, n.op, n.args, n.kwargs, len(n.types)) for n in nodes),
        tuple(Value(word, int(index or 0)) for word, index in returned),
    )


def lines(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().splitlines())


def check(before: str, after: str) -> None:
    assert lines(str(overlap_section(parse_section(before)))) == lines(after)


def test_a_wait_moves_down_to_the_first_use() -> None:
    check(
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
    check(text, text)


def test_the_next_weight_is_on_its_way_while_one_is_awaited() -> None:
    """One gathered weight ahead and no more; what is gathered but no input (%a) stays where it is made."""
    check(
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


EMPTY = Section("refresh", (), (), ())


def overlapped(text: str, **kinds: str) -> str:
    """The text of the forward section of a program whose inputs and results are of the given kinds."""
    section = parse_section(text)
    slots = [TensorSlot(name, kind, name, (4,), (REPLICATE,)) for name, kind in kinds.items()]
    results = tuple(slot for slot in slots if slot.kind in ("output", "mutation"))
    placeholders = tuple(slot for slot in slots if slot not in results)
    backward = Section("backward", (), (), ())
    program = Program((2,), (0,), (), placeholders, results, (), (), EMPTY, section, backward)
    return lines(str(overlap(program).forward))


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


def test_what_depends_on_the_batch_alone_starts_first() -> None:
    assert overlapped(COUNT, w="param", labels="input", mean="output") == lines("""
        forward(%w, %labels):
          %valid = aten.ne.Scalar(%labels, -100)
          %count = aten.sum.default(%valid)
          %count_all_reduce = collective.all_reduce(%count, axes=[0], op="sum")
          %y = aten.tanh.default(%w)
          %count_wait = collective.wait(%count_all_reduce)
          %mean = aten.div.Tensor(%y, %count_wait)
          return %mean
    """)


def test_what_depends_on_a_parameter_does_not() -> None:
    assert overlapped(COUNT, w="param", labels="param", mean="output").startswith(
        lines("""
        forward(%w, %labels):
          %y = aten.tanh.default(%w)
          %valid = aten.ne.Scalar(%labels, -100)
    """)
    )


LOSS = """
forward(%x):
  %loss = aten.sum.default(%x)
  %loss_all_reduce = collective.all_reduce(%loss, axes=[0], op="sum")
  %loss_wait = collective.wait(%loss_all_reduce)
  %a = aten.relu.default(%x)
  return %loss_wait, %a
"""


def test_the_wait_for_a_loss_is_left_to_whoever_wants_it() -> None:
    assert overlapped(LOSS, x="param", loss="output") == lines("""
        forward(%x):
          %loss = aten.sum.default(%x)
          %loss_all_reduce = collective.all_reduce(%loss, axes=[0], op="sum")
          %a = aten.relu.default(%x)
          return %loss_all_reduce, %a
    """)


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        (LOSS, {"loss": "mutation"}),
        (LOSS.replace("%loss_wait, %a", "%loss_wait, %loss_wait"), {"loss": "output"}),
        (LOSS.replace("relu.default(%x)", "relu.default(%loss_wait)"), {"loss": "output"}),
    ],
    ids=["a new buffer", "saved for backward as well", "used as well"],
)
def test_a_wait_that_something_else_needs_stays(text: str, kinds: dict[str, str]) -> None:
    found = overlapped(text, x="param", **kinds)
    assert "%loss_wait = collective.wait(%loss_all_reduce)" in found
    assert "return %loss_wait" in found
