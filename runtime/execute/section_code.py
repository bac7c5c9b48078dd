"""Sections as functions whose errors name the instruction that failed, its module path and its operands.

>>> from autopar.ir.graph import Value
>>> from autopar.ir.program import Instruction, Section
>>> twice = Instruction("y", "aten.add.Tensor", (Value("x"), Value("x")))
>>> section = Section("forward", ("x",), (twice,), (Value("y"),))
>>> compile_section(section, {}, torch.device("cpu"))([torch.ones(2)])
[tensor([2., 2.])]
"""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from types import CodeType, TracebackType
from typing import Any
from weakref import WeakValueDictionary

import torch

from autopar.errors import AutoparError, ExecutionError
from autopar.ir.node import DTYPE_NAMES
from autopar.ir.program import Section
from autopar.ops.index_range import PROGRAM_FILE
from autopar.runtime.torch_internals.profiling import profiling, span

from .section_source import Source
from .torch_operations import Operation

Run = Callable[[list[torch.Tensor]], list[Any]]
# How many operands, and characters of an instruction, an error shows: a bucket has dozens.
# Chosen: a few lines.
_LISTED, _LONGEST = 8, 400
_serial = itertools.count()
_CODE: WeakValueDictionary[str, SectionCode] = WeakValueDictionary()


class SectionCode:
    """The function of a section, whose errors name the instruction."""

    def __init__(self, section: Section, source: Source, where: str) -> None:
        self.source, self.count = source, len(section.inputs)
        filename = f"{PROGRAM_FILE}{section.name} {next(_serial)}>"
        _CODE[filename] = self
        linecache.cache[filename] = (len(source.text), None, source.text.splitlines(keepends=True), filename)
        exec(compile(source.text, filename, "exec"), source.namespace)
        self.function = source.namespace[source.function]
        self.label = f"{section.name}{where and f' on {where}'}"

    def check(self, inputs: Sequence[torch.Tensor]) -> None:
        if len(inputs) != self.count:
            raise ExecutionError(f"{self.label} takes {self.count} values, got {len(inputs)}")

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Converts errors of instructions to :class:`ExecutionError`."""
        try:
            yield
        except AutoparError:
            raise
        except Exception as error:
            trace = _failed_at(error, self.function.__code__)
            if trace is None:
                raise
            raise _explain(error, trace, self.source, self.label) from error


def compile_section(
    section: Section,
    operations: Mapping[str, Operation],
    device: torch.device,
    where: str = "",
    replaced: Mapping[str, Operation] | None = None,
) -> Run:
    """Compiles ``section`` to a function from the list of its inputs (which it empties) to the list of its outputs.

    ``operations``: the ``autopar.*`` and ``collective.*`` operations; ATen ones are looked up. ``where``: names the
    rank in errors; ``replaced``: what runs instead of some instructions, by name. While ``torch.profiler`` records,
    modules and instructions are ranges of its trace. Raises :class:`GraphError` for an unknown operation or value; the
    function raises :class:`ExecutionError`.
    """
    plain = SectionCode(section, Source(section, operations, device, replaced=replaced), where)

    @cache
    def recorded() -> SectionCode:
        return SectionCode(section, Source(section, operations, device, spans=span, replaced=replaced), where)

    def run(inputs: list[torch.Tensor]) -> list[Any]:
        code = recorded() if profiling() else plain
        code.check(inputs)
        with code.explaining():
            return code.function(inputs)  # type: ignore[no-any-return]

    return run


def describe_place(place: tuple[str, int] | None) -> str:
    """Describes the instruction at a line of a section's function: its module. What the model's own forward or a loss
    function does is of no module inside, and forward and backward of it are described alike."""
    code = None if place is None else _CODE.get(place[0])
    instruction = None if code is None or place is None else code.source.instructions.get(place[1])
    if code is None or instruction is None:
        return ""
    return f"in module {instruction.module}" if instruction.module else "in the model's own forward or loss_fn"


def instruction_at(file: str, line: int) -> str:
    """The instruction at a line of a section's function: its name and operation, its module, and the section."""
    code = _CODE.get(file)
    instruction = None if code is None else code.source.instructions.get(line)
    if code is None or instruction is None:
        return ""
    module = f" of module {instruction.module}" if instruction.module else ""
    return f"the instruction %{instruction.name} ({instruction.op}){module}, {code.label}"


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{DTYPE_NAMES.get(value.dtype, value.dtype)}{list(value.shape)}"
    return type(value).__name__


def _failed_at(error: BaseException, code: CodeType) -> TracebackType | None:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code is not code:
        trace = trace.tb_next
    return trace


def _explain(error: Exception, trace: TracebackType, source: Source, where: str) -> ExecutionError:
    instruction = source.instructions.get(trace.tb_lineno)
    if instruction is None:
        return ExecutionError(f"{where}: {type(error).__name__}: {error}")
    values = trace.tb_frame.f_locals
    operands = {v: _describe(values[source.names[v]]) for v in instruction.operands if source.names[v] in values}
    listed = [f"{value}: {text}" for value, text in operands.items()]
    shapes = ", ".join(listed[:_LISTED]) + (f" and {len(listed) - _LISTED} more" if len(listed) > _LISTED else "")
    text = str(instruction)
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
    first, _, rest = str(error).strip().partition("\n")
    module = f" of module {instruction.module}" if instruction.module else ""
    return ExecutionError(
        f"{type(error).__name__}: {first}\n  {where}, in the instruction{module}\n  {text}\n  with "
        f"{shapes or 'no tensors'}{rest and chr(10)}{rest}"
    )
