"""Runs the sections of a :class:`~autopar.program.Program`: each becomes one Python function of straight-line
calls.

The source is generated and read by Python once, so an instruction costs one call and no look-up; every value
is dropped after its last use, inputs included. The function takes one list of inputs, which it empties, so
that the caller keeps nothing alive either. An error in an instruction is raised as
:class:`~autopar.errors.ExecutionError` with its text, module path and operands.

>>> from autopar.graph import Value
>>> from autopar.program import Instruction, Section
>>> twice = Instruction("y", "aten.add.Tensor", (Value("x"), Value("x")))
>>> section = Section("forward", ("x",), (twice,), (Value("y"),))
>>> print(Source(section, {}, torch.device("cpu")).text)
def forward(inputs):
    x, = inputs
    inputs.clear()
    y = aten_add_Tensor(x, x)
    del x
    return [y]
>>> compile_section(section, {}, torch.device("cpu"))([torch.ones(2)])
[tensor([2., 2.])]
"""

from __future__ import annotations

import itertools
import keyword
import linecache
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType, TracebackType
from typing import Any

import sympy
import torch
from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import AutoparError, ExecutionError, GraphError
from autopar.graph import DTYPE_NAMES, Arg, Value, values_in
from autopar.program import Instruction, Program, Section, TensorSlot
from autopar.spec import take_local

from .collectives import Collectives
from .groups import MeshGroups, mesh_groups
from .randomness import draws, shared_random

Operation = Callable[..., Any]
Run = Callable[[list[torch.Tensor]], list[Any]]

# A shard's memory layout may differ from the traced tensor's, where a view was possible: these copy if they
# must.
_TOLERANT = {"aten.view.default": "aten.reshape.default", "aten._unsafe_view.default": "aten.reshape.default"}
_serial = itertools.count()
WAIT = "collective.wait"


def resolve_aten(op: str) -> torch._ops.OpOverload:
    """The torch operation called ``namespace.name.overload``. Raises :class:`GraphError` if there is none."""
    parts = _TOLERANT.get(op, op).split(".")
    found: Any = torch.ops
    try:
        for part in parts:
            found = getattr(found, part)
    except AttributeError:
        found = None
    if not isinstance(found, torch._ops.OpOverload):
        raise GraphError(f"{op!r} is no operation: expected namespace.name.overload, such as aten.mm.default")
    return found


def returns_sequence(operation: Operation) -> bool:
    """Whether a torch operation returns a tuple or list even if it has one result."""
    if not isinstance(operation, torch._ops.OpOverload):
        return False
    returns = operation._schema.returns
    return len(returns) != 1 or isinstance(returns[0].type, torch.ListType)


def instruction_axes(sections: Iterable[Section]) -> set[tuple[int, ...]]:
    """Every set of mesh axes that a collective of ``sections`` runs over."""
    found = (i for s in sections for i in s.instructions if i.op.startswith("collective."))
    axes = (dict(i.kwargs)["axes"] if "axes" in dict(i.kwargs) else (*i.args, ())[1] for i in found)
    return {tuple(each) for each in axes if each}


class Source:
    """The Python text of one section; ``namespace`` holds the operations and constants it refers to and
    ``instructions`` maps line numbers back. With ``pauses`` it is a generator that stops before each wait."""

    def __init__(
        self, section: Section, operations: Mapping[str, Operation], device: torch.device, pauses: bool = False
    ) -> None:
        self.namespace: dict[str, Any] = {}
        self.instructions: dict[int, Instruction] = {}
        self.names: dict[Value, str] = {}
        self._operations = operations
        self._device = device
        self._taken: set[str] = {"inputs", "float", "_"}
        self._called: dict[str, str] = {}
        self._bucketed: set[Value] = set()
        last = self._last_uses(section)
        self.function = self._fresh(section.name)
        lines = [f"def {self.function}(inputs):", *self._unpack(section, last)]
        if pauses:
            lines.append("    if False: yield")  # A generator also where there is nothing to wait for.
        for index, instruction in enumerate(section.instructions):
            if pauses and instruction.op == WAIT:
                lines.append("    yield")
            lines.append(f"    {self._line(instruction, last)}")
            self.instructions[len(lines)] = instruction
            dead = dict.fromkeys(self.names[value] for value in _operands(instruction) if last[value] == index)
            if dead:
                lines.append(f"    del {', '.join(dead)}")
        outputs = ", ".join("None" if value is None else self._name(value) for value in section.outputs)
        self.text = "\n".join([*lines, f"    return [{outputs}]"])

    @staticmethod
    def _last_uses(section: Section) -> dict[Value, int]:
        """For each used value the index of the last instruction that uses it; outputs live to the end."""
        last = {v: index for index, instruction in enumerate(section.instructions) for v in _operands(instruction)}
        return {**last, **{v: len(section.instructions) for v in section.outputs if v is not None}}

    def _fresh(self, name: str) -> str:
        """A Python identifier like ``name`` that nothing else in the function has."""
        base = re.sub(r"\W", "_", name)
        if keyword.iskeyword(base) or not base.isidentifier():
            base = f"v_{base}"
        found, count = base, itertools.count(1)
        while found in self._taken:
            found = f"{base}_{next(count)}"
        self._taken.add(found)
        return found

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
                here = self._device.type in (arg.type, "meta") or arg.type == "meta"
                return self._constant(self._device if here else arg, "device")
            case float() if arg != arg or abs(arg) == float("inf"):
                return f'float("{arg}")'
            case None | bool() | int() | float() | str() | complex():
                return repr(arg)
        return self._constant(arg, str(arg).replace("torch.", ""))

    def _operation(self, op: str) -> tuple[str, Operation]:
        operation = self._operations.get(op)
        if operation is None:
            if op.startswith(("autopar.", "collective.")):
                raise GraphError(f"{op!r} is no operation of this runtime; known: {', '.join(self._operations)}")
            operation = resolve_aten(op)
        if op not in self._called:
            self._called[op] = self._constant(operation, op.removesuffix(".default"))
        return self._called[op], operation

    def _line(self, instruction: Instruction, last: Mapping[Value, int]) -> str:
        function, operation = self._operation(instruction.op)
        args = [self._arg(arg) for arg in instruction.args]
        args += [f"{k}={self._arg(v)}" for k, v in instruction.kwargs if not keyword.iskeyword(k)]
        args += [f"**{{{k!r}: {self._arg(v)}}}" for k, v in instruction.kwargs if keyword.iskeyword(k)]
        call = f"{function}({', '.join(args)})"
        results = [Value(instruction.name, index) for index in range(instruction.results)]
        names = [self._define(value) if value in last else "_" for value in results]
        if instruction.op.endswith("_bucket"):
            self._bucketed.update(results)
        unpack = len(names) > 1 or returns_sequence(operation) or self._awaits_bucket(instruction)
        if not any(value in last for value in results):
            return call
        if not unpack:
            return f"{names[0]} = {call}"
        # A list of chunks may be longer than the results the graph has types for; what nobody uses is dropped
        # at once.
        return f"{', '.join(names)}, *_ = {call}; _ = None"

    def _awaits_bucket(self, instruction: Instruction) -> bool:
        return instruction.op == WAIT and instruction.args[0] in self._bucketed


def _operands(instruction: Instruction) -> tuple[Value, ...]:
    return (*values_in(instruction.args), *values_in(tuple(arg for _, arg in instruction.kwargs)))


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
    known = trace.tb_frame.f_locals
    operands = {v: _describe(known[source.names[v]]) for v in _operands(instruction) if source.names[v] in known}
    shapes = ", ".join(f"{value}: {text}" for value, text in operands.items())
    module = f" of module {instruction.module}" if instruction.module else ""
    return ExecutionError(
        f"{where}, in the instruction{module}\n  {instruction}\n  with {shapes or 'no tensors'}\n"
        f"{type(error).__name__}: {error}"
    )


def compile_section(
    section: Section, operations: Mapping[str, Operation], device: torch.device, where: str = ""
) -> Run:
    """``section`` as a function from the list of its inputs (which it empties) to the list of its outputs.

    ``operations`` has the ``autopar.*`` and ``collective.*`` operations; ATen ones are looked up. ``where``
    names the rank in errors. Raises :class:`GraphError` for an unknown operation or value, when run
    :class:`ExecutionError`.
    """
    code = SectionCode(section, Source(section, operations, device), where)

    def run(inputs: list[torch.Tensor]) -> list[Any]:
        code.check(inputs)
        with code.explaining():
            return code.function(inputs)  # type: ignore[no-any-return]

    return run


class SectionCode:
    """The function of a section, whose errors name the instruction."""

    def __init__(self, section: Section, source: Source, where: str) -> None:
        self.source, self.count = source, len(section.inputs)
        filename = f"<autopar {section.name} {next(_serial)}>"
        linecache.cache[filename] = (len(source.text), None, source.text.splitlines(keepends=True), filename)
        exec(compile(source.text, filename, "exec"), source.namespace)
        self.function = source.namespace[source.function]
        self.label = f"{section.name}{where and f' on {where}'}"

    def check(self, inputs: Sequence[torch.Tensor]) -> None:
        if len(inputs) != self.count:
            raise ExecutionError(f"{self.label} takes {self.count} values, got {len(inputs)}")

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Raises what an instruction within raises as :class:`ExecutionError`."""
        try:
            yield
        except AutoparError:
            raise
        except Exception as error:
            trace = _failed_at(error, self.function.__code__)
            if trace is None:
                raise
            raise _explain(error, trace, self.source, self.label) from error


def operations_of(collectives: Collectives) -> dict[str, Operation]:
    """The ``autopar.*`` and ``collective.*`` operations by name."""
    from autopar.local_ops import LOCAL_OPS

    public = [name for name in dir(collectives) if not name.startswith("_") and name != "groups"]
    bound = {f"collective.{name}": getattr(collectives, name) for name in public}
    return {**LOCAL_OPS, **bound}


def _with_shared_random(section: Section, run: Run, groups: MeshGroups) -> Run:
    """``run``, with one stream of random numbers for all ranks if ``section`` draws any."""
    if not draws(section) or groups.device.type == "meta":
        return run

    def drawing(values: list[torch.Tensor]) -> list[Any]:
        with shared_random(groups):
            return run(values)

    return drawing


@contextmanager
def plainly(device: torch.device) -> Iterator[None]:
    """Under ``no_grad`` and without autocast."""
    with torch.no_grad():
        if device.type == "meta" or not torch.is_autocast_enabled(device.type):
            yield
        else:
            with torch.autocast(device.type, enabled=False):
                yield


def _outside_autograd(run: Run, device: torch.device) -> Run:
    def outside(values: list[torch.Tensor]) -> list[Any]:
        with plainly(device):
            return run(values)

    return outside


def runner(section: Section, groups: MeshGroups, where: str) -> Run:
    """``section`` with its collectives on ``groups``, as :func:`compile_section` makes it, outside of autograd and
    autocast."""
    compiled = compile_section(section, operations_of(Collectives(groups)), groups.device, where)
    return _outside_autograd(_with_shared_random(section, compiled, groups), groups.device)


def own_constants(
    slots: Iterable[TensorSlot], constants: Mapping[str, torch.Tensor], groups: MeshGroups
) -> dict[str, torch.Tensor]:
    """This rank's part of each constant that is among ``slots``."""
    return {
        slot.target: take_local(
            constants[slot.target].to(groups.device), slot.placements, groups.shape, groups.coordinate
        )
        for slot in slots
        if slot.kind == "constant"
    }


def as_list(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """``values`` itself if it is a list, which a section empties."""
    return values if isinstance(values, list) else list(values)


class Executable:
    """A program ready to run on this rank of ``mesh``; each call is under ``no_grad`` and without autocast.

    Making one is collective: the process groups are made here. Raises :class:`ExecutionError` if the
    program is another rank's.
    """

    def __init__(self, program: Program, mesh: DeviceMesh) -> None:
        groups = mesh_groups(mesh)
        if groups.shape != program.mesh or groups.coordinate != program.coordinate:
            raise ExecutionError(
                f"the program is for coordinate {program.coordinate} of a mesh {program.mesh}, "
                f"but this rank is at {groups.coordinate} of a mesh {groups.shape}"
            )
        groups.prepare(instruction_axes((program.refresh, program.forward, program.backward)))
        self.program = program
        self.device = groups.device
        where = f"the rank at {program.coordinate} of mesh {program.mesh}"
        self._refresh, self._forward, self._backward = (
            runner(section, groups, where) for section in (program.refresh, program.forward, program.backward)
        )
        self.constants = own_constants(program.placeholders, program.constants, groups)

    def refresh(self, stored: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Working tensors from ``stored`` local ones, both in the order of ``program.parameters``."""
        return self._refresh(as_list(stored))

    def forward(self, placeholders: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """``(results, saved)`` from local tensors in the order of ``program.placeholders``."""
        values = self._forward(as_list(placeholders))
        count = len(self.program.results)
        return values[:count], values[count:]

    def backward(self, saved: list[torch.Tensor], tangents: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Local gradients in the order of ``program.gradients``; empties ``saved``."""
        values = [*saved, *tangents]
        saved.clear()
        return self._backward(values)
