"""The registry of sharding rules: which placements an operation accepts and produces on one mesh axis.

A rule takes one :class:`OpCall` and yields :class:`AxisStrategy` s. Each is a claim that running the operation's local
form on every device of the axis gives the operation's result with the claimed placements. ``R ... -> R`` needs no rule:
it is added for every operation. The rule oracle (``tests/oracle``) executes every claim.

A rule may be called with shapes that an outer axis has divided already. It must use only the types in the call, never
size arguments (a view's target size is read from the result type).

The local form is the same operation with the same arguments, unless a *localiser* is registered for the operation (size
arguments: ``view``, ``expand``, ``full``, ...) or for ``strategy.local``; it returns the call to run on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from autopar.ir.node import Arg, TensorType
from autopar.ir.placements import AxisStrategy, Placements, local_offset, local_shape


@dataclass(frozen=True, slots=True)
class Operand:
    """Represents tensor operand ``index`` in the arguments of an :class:`OpCall`."""

    index: int


@dataclass(frozen=True)
class OpCall:
    """An operation with types but without tensors, on one axis of ``size`` devices; all sizes are integers.

    ``args`` and ``kwargs`` are as in :class:`autopar.ir.node.Node`, with :class:`Operand` for tensors. ``inputs[i]`` is
    the type of operand i (the same tensor passed twice is two operands); ``outputs`` has None for results that are not
    tensors. ``shares``: those in which the axis may divide rows, besides equal ones. Rules do not see them.
    """

    op: str
    inputs: tuple[TensorType, ...]
    outputs: tuple[TensorType | None, ...]
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    size: int
    shares: tuple[int, ...] = ()

    @property
    def tensors(self) -> tuple[TensorType | None, ...]:
        """The types of operands, then of results, in the order of the ``places`` of a strategy."""
        return (*self.inputs, *self.outputs)

    def arg(self, position: int, name: str, default: Arg = None) -> Arg:
        """The argument at ``position``, or called ``name``, or ``default``."""
        if position < len(self.args):
            return self.args[position]
        return dict(self.kwargs).get(name, default)


@dataclass(frozen=True)
class LocalContext:
    """The input of a localiser: the global call, the placements of its tensors, and the device's coordinate."""

    call: OpCall
    inputs: tuple[Placements, ...]
    outputs: tuple[Placements, ...]
    mesh: tuple[int, ...]
    coordinate: tuple[int, ...]

    def input_shape(self, index: int) -> tuple[int, ...]:
        """Local shape of operand ``index``."""
        return local_shape(_ints(self.call.inputs[index]), self.inputs[index], self.mesh, self.coordinate)

    def output_shape(self, index: int = 0) -> tuple[int, ...]:
        """Local shape of result ``index``."""
        result = self.call.outputs[index]
        assert result is not None
        return local_shape(_ints(result), self.outputs[index], self.mesh, self.coordinate)

    def input_offset(self, index: int, dim: int) -> int:
        """Global position along ``dim`` of the first local element of operand ``index``."""
        return local_offset(_ints(self.call.inputs[index]), self.inputs[index], self.mesh, self.coordinate, dim)

    def output_offset(self, index: int, dim: int) -> int:
        """Global position along ``dim`` of the first local element of result ``index``."""
        result = self.call.outputs[index]
        assert result is not None
        return local_offset(_ints(result), self.outputs[index], self.mesh, self.coordinate, dim)


def _ints(tensor: TensorType) -> tuple[int, ...]:
    return tuple(int(size) for size in tensor.shape)


LocalCall = tuple[str, tuple[Arg, ...], tuple[tuple[str, Arg], ...]]
Rule = Callable[[OpCall], Iterable[AxisStrategy]]
Localiser = Callable[[LocalContext], LocalCall]
Function = TypeVar("Function")

RULES: dict[str, Rule] = {}
LOCALISERS: dict[str, Localiser] = {}


def rule(*ops: str) -> Callable[[Rule], Rule]:
    """Registers a rule for the operations with these overload names (``aten.mm.default``)."""
    return _registers(RULES, "rule", ops)


def localiser(*names: str) -> Callable[[Localiser], Localiser]:
    """Registers a function that gives the call on one device, for operations or for the local operations of
    strategies."""
    return _registers(LOCALISERS, "localiser", names)


def _registers(table: dict[str, Function], kind: str, names: tuple[str, ...]) -> Callable[[Function], Function]:
    def register(function: Function) -> Function:
        for name in names:
            if name in table:
                raise ValueError(f"{name} has a {kind} already: {table[name]}")
            table[name] = function
        return function

    return register


def local_call(context: LocalContext, local: str = "") -> LocalCall:
    """The call that one device runs for a strategy with the given ``local``: by its localiser, or the operation
    unchanged."""
    name = local or context.call.op
    if name in LOCALISERS:
        return LOCALISERS[name](context)
    return name, context.call.args, context.call.kwargs
