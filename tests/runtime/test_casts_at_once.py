"""Casts of all weights are one operation, which gives what each cast gave."""

from __future__ import annotations

import pytest
import torch

from autopar.ir.program import Section
from autopar.runtime.execute.casts_at_once import OPERATION, cast_all, with_casts_at_once
from autopar.runtime.execute.section_code import compile_section

CPU = torch.device("cpu")
CASTS = """
refresh(%w, %b, %n, %l):
  %x = aten._to_copy.default(%w, dtype=torch.bfloat16)
  %y = aten._to_copy.default(%b, dtype=torch.bfloat16)
  %t = aten.permute.default(%y, [1, 0])
  %m = aten._to_copy.default(%n, dtype=torch.bfloat16)
  %h = aten._to_copy.default(%m, dtype=torch.float16)
  %k = aten._to_copy.default(%l, dtype=torch.float16)
  %again = aten._to_copy.default(%k, dtype=torch.float16)
  return %x, %y, %t, %m, %h, %k, %again
"""
TOGETHER = """
refresh(%w, %b, %n, %l):
  %x, %x.1 = autopar.cast_all([%w, %b], torch.bfloat16)
  %t = aten.permute.default(%x.1, [1, 0])
  %m = aten._to_copy.default(%n, dtype=torch.bfloat16)
  %h, %h.1 = autopar.cast_all([%m, %l], torch.float16)
  %again = aten._to_copy.default(%h.1, dtype=torch.float16)
  return %x, %x.1, %t, %m, %h, %h.1, %again
"""


def test_casts_to_one_dtype_that_follow_each_other_are_one() -> None:
    assert str(with_casts_at_once(Section.from_text(CASTS))).strip() == TOGETHER.strip()


@pytest.mark.parametrize(
    "kwargs", ["dtype=torch.bfloat16, memory_format=torch.channels_last", "memory_format=torch.contiguous_format"]
)
def test_casts_that_change_more_stay(kwargs: str) -> None:
    section = Section.from_text(
        f"refresh(%w, %b):\n  %x = aten._to_copy.default(%w, {kwargs})\n  %y = aten._to_copy.default(%b, {kwargs})\n"
        "  return %x, %y\n"
    )
    assert with_casts_at_once(section) == section


def test_values_and_strides_are_those_of_each_cast() -> None:
    inputs = [
        torch.randn(3, 4).t(),
        torch.randn(2, 3),
        torch.randn(()),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ]
    sections = (Section.from_text(CASTS), with_casts_at_once(Section.from_text(CASTS)))
    expected, found = (compile_section(s, {OPERATION: cast_all}, CPU)(list(inputs)) for s in sections)
    for own, other in zip(found, expected, strict=True):
        assert own.dtype == other.dtype and own.stride() == other.stride()
        assert torch.equal(own, other)
