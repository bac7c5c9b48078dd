"""Caches are written where they rest; a section that reads one twice writes into a copy."""

from __future__ import annotations

from autopar.ir.node import Value
from autopar.ir.program import Instruction, Section
from autopar.ops.write_rows import WRITE_ROWS, WRITE_ROWS_IN_PLACE
from autopar.passes.lower.caches import in_place

WRITE = Instruction("new", WRITE_ROWS, (Value("c"), 2, Value("at"), Value("x")))
READ = Instruction("y", "aten.relu.default", (Value("new"),))


def test_a_cache_that_is_read_once_is_written_in_place() -> None:
    section = Section("forward", ("c", "at", "x"), (WRITE, READ), (Value("y"), Value("new")))
    assert [step.op for step in in_place(section, ["c"]).instructions] == [WRITE_ROWS_IN_PLACE, "aten.relu.default"]


def test_what_is_read_elsewhere_or_no_cache_is_not() -> None:
    old = Instruction("old", "aten.relu.default", (Value("c"),))
    for steps, outputs in (((WRITE, old), ()), ((old, WRITE), ()), ((WRITE,), (Value("c"),))):
        section = Section("forward", ("c", "at", "x"), steps, (Value("new"), *outputs))
        assert in_place(section, ["c"]) == section
    section = Section("forward", ("c", "at", "x"), (WRITE,), (Value("new"),))
    assert in_place(section, []) == section
