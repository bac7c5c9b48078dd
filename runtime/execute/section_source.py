"""The Python text of a section: one straight-line function.

It is compiled once, so that an instruction costs one call and no look-up. Every value, including inputs, is dropped
after its last use: the function takes one list of inputs and empties it, so that the caller keeps no references either.

>>> from autopar.ir.program import Instruction, Section
>>> twice = Instruction("y", "aten.add.Tensor", (Value("x"), Value("x")))
>>> section = Section("forward", ("x",), (twice,), (Value("y"),))
>>> print(Source(section, {}, torch.device("cpu")).text)
def forward(inputs):
    x, = inputs
    inputs.clear()
    y = aten_add_Tensor(x, x)
    del x
    return [y]
"""

from __future__ import annotations

import itertools
import keyword
import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import sympy
import torch

from autopar.errors import GraphError
from autopar.ir.node import Arg, Value
from autopar.ir.program import Instruction, Section

from .in_place import WRITING, in_place, writing
from .torch_operations import Operation, function_of, resolve_aten, returns_sequence

WAIT = "collective.wait"
# How operations that run a piece (`pieces.py`) begin: they take one list, which they empty, and return a list.
COMPILED = "compiled."


class Source:
    """The Python text of one section. ``namespace``: the operations and constants it refers to; ``instructions``: the
    instruction of each line. With ``pauses`` the function is a generator that stops before each wait. ``spans`` (not
    with pauses): makes a context of a name; each instruction, and each run of instructions of one module, is inside of
    one. ``reuse``: results are written into operands that nothing reads afterwards. ``replaced``: what runs
    instead of the operation of some instructions, by name."""

    def __init__(
        self,
        section: Section,
        operations: Mapping[str, Operation],
        device: torch.device,
        pauses: bool = False,
        spans: Callable[[str], object] | None = None,
        reuse: bool = True,
        replaced: Mapping[str, Operation] | None = None,
    ) -> None:
        self.namespace: dict[str, Any] = {} if spans is None else {"span": spans}
        self.instructions: dict[int, Instruction] = {}
        self.names: dict[Value, str] = {}
        self._operations = operations
        self._device = device
        self._taken: set[str] = {"inputs", "float", "piece", "span", "_"}
        self._counts: dict[str, Iterator[int]] = {}
        self._called: dict[str, str] = {}
        self._bound: dict[object, str] = {}
        self._bucketed: set[Value] = set()
        self._written = in_place(section) if reuse else {}
        self._replaced = replaced or {}
        last = self._last_uses(section)
        self.function = self._fresh(section.name)
        lines = [f"def {self.function}(inputs):", *self._unpack(section, last)]
        if pauses:
            lines.append("    if False: yield")  # Makes it a generator even without waits.
        module = ""
        for index, instruction in enumerate(section.instructions):
            if pauses and instruction.op == WAIT:
                lines.append("    yield")
            if spans is not None and instruction.module != module:
                module = instruction.module
                lines += [f"    with span({f'{section.name} {module}'!r}):"] if module else []
            own = self._operands_of_piece(instruction, last, index)
            within = f"with span({f'%{instruction.name} {instruction.op}'!r}): " if spans is not None else ""
            own.append(f"    {within}{self._line(instruction, last)}")
            self.instructions[len(lines) + len(own)] = instruction
            if not instruction.op.startswith(COMPILED):
                own += self._drop(instruction, last, index)
            lines += [f"    {line}" for line in own] if module else own
        outputs = ", ".join("None" if value is None else self._name(value) for value in section.outputs)
        self.text = "\n".join([*lines, f"    return [{outputs}]"])

    def _operands_of_piece(self, instruction: Instruction, last: Mapping[Value, int], index: int) -> list[str]:
        """Moves the operands of a piece to a list, which has the only references to those that nothing else reads."""
        if not instruction.op.startswith(COMPILED):
            return []
        return [f"    piece = {self._arg(instruction.args[0])}", *self._drop(instruction, last, index)]

    def _drop(self, instruction: Instruction, last: Mapping[Value, int], index: int) -> list[str]:
        """Drops the operands whose last use is the instruction at ``index``."""
        dead = dict.fromkeys(self.names[value] for value in instruction.operands if last[value] == index)
        return [f"    del {', '.join(dead)}"] if dead else []

    @staticmethod
    def _last_uses(section: Section) -> dict[Value, int]:
        """For each used value the index of the last instruction that uses it; outputs live to the end."""
        last = {v: index for index, instruction in enumerate(section.instructions) for v in instruction.operands}
        return {**last, **{v: len(section.instructions) for v in section.outputs if v is not None}}

    def _fresh(self, name: str) -> str:
        """A Python identifier like ``name`` that is unused in the function."""
        base = re.sub(r"\W", "_", name)
        if keyword.iskeyword(base) or not base.isidentifier():
            base = f"v_{base}"
        identifier, count = base, self._counts.setdefault(base, itertools.count(1))
        while identifier in self._taken:
            identifier = f"{base}_{next(count)}"
        self._taken.add(identifier)
        return identifier

    def _name(self, value: Value) -> str:
        if value not in self.names:
            raise GraphError(f"{value} is used before its definition")
        return self.names[value]

    def _define(self, value: Value) -> str:
        if value in self.names:
            raise GraphError(f"{value} is defined twice")
        self.names[value] = self._fresh(f"{value.node}_{value.index}" if value.index else value.node)
        return self.names[value]

    def _unpack(self, section: Section, last: Mapping[Value, int]) -> list[str]:
        names = [self._define(Value(name)) for name in section.inputs]
        unused = [name for name, value in zip(names, section.inputs, strict=True) if Value(value) not in last]
        lines = [f"    {', '.join(names)}, = inputs", "    inputs.clear()"] if names else []
        return [*lines, f"    del {', '.join(unused)}"] if unused else lines

    def _constant(self, arg: object, name: str) -> str:
        bound = self._fresh(name)
        self.namespace[bound] = arg
        return bound

    def _shared(self, arg: Hashable, name: str) -> str:
        """One name for a constant that many instructions have."""
        if arg not in self._bound:
            self._bound[arg] = self._constant(arg, name)
        return self._bound[arg]

    def _arg(self, arg: Arg) -> str:
        match arg:
            case Value():
                return self._name(arg)
            case tuple() | list():
                return f"[{', '.join(map(self._arg, arg))}]"
            case sympy.Expr():
                if not arg.is_number:
                    raise GraphError(f"the size {arg} still has symbols; lower the graph at concrete sizes")
                return repr(int(arg) if arg.is_integer else float(arg))
            case torch.device():
                # A graph names one device, that of its trace: here it is this rank's.
                return self._shared(self._device, "device")
            case torch.dtype() | torch.layout() | torch.memory_format():
                return self._shared(arg, str(arg).replace("torch.", ""))
            case float() if arg != arg or abs(arg) == float("inf"):
                return f'float("{arg}")'
            case None | bool() | int() | float() | str() | complex():
                return repr(arg)
        return self._constant(arg, str(arg).replace("torch.", ""))

    def _operation(self, op: str) -> tuple[str, Operation]:
        """The name in the namespace, and the function, of an operation, or of the piece of that name."""
        operation = self._operations.get(op)
        if operation is None:
            if op.startswith(("autopar.", "collective.", "host.")):
                raise GraphError(f"{op!r} is not an operation of this runtime; known: {', '.join(self._operations)}")
            operation = resolve_aten(op)
        if op not in self._called:
            self._called[op] = self._constant(function_of(operation), op.removesuffix(".default"))
        return self._called[op], operation

    def _writing(self, instruction: Instruction) -> str | None:
        """The name of what runs the instruction and writes its result into an operand, if it may."""
        replaced, places = self._replaced.get(instruction.name), self._written.get(instruction.name)
        if replaced is not None:
            return self._constant(replaced, f"{instruction.op}_update")
        if places is None:
            return None
        key = f"{instruction.op} {places}"
        if key not in self._called:
            plain, into = (self._operation(op)[1] for op in (instruction.op, WRITING[instruction.op]))
            run = writing(instruction.op, places, plain, into)
            self._called[key] = self._constant(run, f"{instruction.op}_in_place")
        return self._called[key]

    def _line(self, instruction: Instruction, last: Mapping[Value, int]) -> str:
        runs_piece = instruction.op.startswith(COMPILED)
        function, operation = self._operation(instruction.name if runs_piece else instruction.op)
        function = self._writing(instruction) or function
        args = ["piece"] if runs_piece else [self._arg(arg) for arg in instruction.args]
        args += [f"{k}={self._arg(v)}" for k, v in instruction.kwargs if not keyword.iskeyword(k)]
        args += [f"**{{{k!r}: {self._arg(v)}}}" for k, v in instruction.kwargs if keyword.iskeyword(k)]
        call = f"{function}({', '.join(args)})"
        results = [Value(instruction.name, index) for index in range(instruction.results)]
        names = [self._define(value) if value in last else "_" for value in results]
        if instruction.op.endswith("_bucket"):
            self._bucketed.update(results)
        unpack = len(names) > 1 or runs_piece or returns_sequence(operation) or self._awaits_bucket(instruction)
        if not any(value in last for value in results):
            return call
        if not unpack:
            return f"{names[0]} = {call}"
        # A list of chunks may be longer than the results the graph has types for; unused ones are dropped at once.
        # Not ``*_``: of starred names Python unpacks at most 255 others.
        return f"{', '.join(names)}, = tuple({call})[:{len(names)}]{'; _ = None' * ('_' in names)}"

    def _awaits_bucket(self, instruction: Instruction) -> bool:
        return instruction.op == WAIT and instruction.args[0] in self._bucketed
