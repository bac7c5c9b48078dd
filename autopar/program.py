"""The lowered program of one rank: straight-line local operations and collectives, nothing left to decide.

Operations are named as in the graph (``aten.mm.default``, run as they are), ``autopar.*`` (see :mod:`autopar.local_ops`)
or ``collective.*``:

=========================================== =========================================================================
``collective.all_reduce(x, axes, op)``        P(op) -> R
``collective.all_gather(x, axes, dim, size, before)``  S(dim/before) -> R; ``size`` is the length of ``dim`` afterwards
``collective.reduce_scatter(x, axes, op, dim, before)``  P(op) -> S(dim/before)
``collective.all_to_all(x, axes, gather_dim, gather_size, gather_before, scatter_dim, scatter_before)``
``collective.wait(handle)``                   the tensor of a collective started before
``collective.slice(x, axes, dim, before)``    R -> S, no communication
``collective.partial(x, axes)``               R -> P(sum): zero except on the first device of the axes
=========================================== =========================================================================

The four communicating ones start asynchronously and return a handle; every handle is awaited exactly once. Each has a
bucketed form, ``collective.all_reduce_bucket([x, y, ...], axes, op)`` and
``collective.reduce_scatter_bucket`` / ``all_gather_bucket`` with lists of dims, which ``collective.wait`` turns into as many results.
``before`` is counted on the device (see :func:`autopar.spec.local_before`); uneven shards are padded by the
runtime to the largest. ``axes`` are mesh axes, outermost first: the devices that differ only there, in row-major order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from .graph import Arg, Value
from .spec import Placements
from .text import print_arg

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
COLLECTIVES: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@dataclass(frozen=True, slots=True)
class Instruction:
    """``results = op(*args, **kwargs)``; arguments as in :class:`autopar.graph.Node`, values refer to ``Value(result name)``
    of one-result instructions or ``Value(first result name, index)`` of several."""

    name: str
    op: str
    args: tuple[Arg, ...] = ()
    kwargs: tuple[tuple[str, Arg], ...] = ()
    results: int = 1
    module: str = ""

    def __str__(self) -> str:
        names = ", ".join(str(Value(self.name, i)) for i in range(self.results))
        args = [print_arg(a) for a in self.args] + [f"{k}={print_arg(a)}" for k, a in self.kwargs]
        return f"{names} = {self.op}({', '.join(args)})"


@dataclass(frozen=True)
class Section:
    """A function of the program: ``inputs`` by name, ``outputs`` in order (None where there is none)."""

    name: str
    inputs: tuple[str, ...]
    instructions: tuple[Instruction, ...]
    outputs: tuple[Value | None, ...]

    def __str__(self) -> str:
        head = f"{self.name}({', '.join('%' + name for name in self.inputs)}):"
        tail = f"  return {', '.join('none' if v is None else str(v) for v in self.outputs)}"
        return "\n".join([head, *(f"  {instruction}" for instruction in self.instructions), tail])


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """A placeholder or result of the program: which tensor (``kind`` as in the graph: param, buffer, input, tangent, constant, output,
    gradient, mutation, input_gradient; ``target``: path, input name or output index) and how it lies on the mesh."""

    name: str
    kind: str
    target: str
    shape: tuple[int, ...]
    placements: Placements


@dataclass(frozen=True)
class Program:
    """What the rank at ``coordinate`` of the mesh runs for one step.

    ``forward`` takes ``placeholders`` in order and returns ``results`` (model outputs and buffer mutations), then the values
    ``saved`` for backward. ``backward`` takes the saved values, then one gradient per entry of ``tangents`` (placed as
    ``tangents`` says), and returns ``gradients``. A weight that works in another placement than it is stored in is gathered inside.
    """

    mesh: tuple[int, ...]
    coordinate: tuple[int, ...]
    placeholders: tuple[TensorSlot, ...]
    results: tuple[TensorSlot, ...]
    tangents: tuple[TensorSlot, ...]
    gradients: tuple[TensorSlot | None, ...]
    forward: Section
    backward: Section
    constants: dict[str, object] = field(default_factory=dict, compare=False)

    def __str__(self) -> str:
        return f"# rank at {self.coordinate} of mesh {self.mesh}\n{self.forward}\n{self.backward}\n"
