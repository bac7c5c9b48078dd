"""Writes a result into an operand that nothing reads afterwards, as autograd does where it adds up gradients.

A new tensor is memory that is touched for the first time: for large ones the system takes longer to hand out its pages
than the operation takes. A result may have the memory of an operand if this is the last use of everything that shares
the memory, and the memory was allocated in this section by an operation of torch's. Inputs, outputs, constants, and
what collectives or compiled pieces have seen are never written to.

>>> from autopar.ir.program import Instruction, Section
>>> exp = Instruction("a", "aten.exp.default", (Value("x"),))
>>> twice = Instruction("y", "aten.mul.Tensor", (Value("a"), 2.0))
>>> in_place(Section("forward", ("x",), (exp, twice), (Value("y"),)))
{'y': (0,)}
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from autopar.ir.node import Value
from autopar.ir.program import Instruction, Section
from autopar.torch_internals.operators import aliased_argument

from .torch_operations import Operation, resolve_aten

# Gradients of activations: their forms write into `grad_input`, which may be the gradient that arrives.
GRADIENTS = {
    f"aten.{name}_backward.default": f"aten.{name}_backward.grad_input"
    for name in ("threshold", "gelu", "silu", "sigmoid", "tanh")
}
# Operations whose result can have the shape, strides and dtype of an operand, and their forms that write into the
# first.
WRITING = {
    **GRADIENTS,
    **{f"aten.{name}.default": f"aten.{name}_.default" for name in ("relu", "gelu", "silu", "sigmoid", "tanh", "exp")},
    "aten.add.Tensor": "aten.add_.Tensor",
    "aten.sub.Tensor": "aten.sub_.Tensor",
    "aten.mul.Tensor": "aten.mul_.Tensor",
    "aten.div.Tensor": "aten.div_.Tensor",
    "aten.scatter.src": "aten.scatter_.src",
    "aten.scatter.value": "aten.scatter_.value",
}
# Unless the second operand is scaled (`alpha`).
_COMMUTATIVE = frozenset(("aten.add.Tensor", "aten.mul.Tensor"))
# What allocates each of its results, whatever its arguments, and keeps no operand. Of others nothing is assumed: some
# return an operand (`conj_physical` of real numbers). Held against torch by `tests/runtime/test_in_place.py`.
ALLOCATING = frozenset((
    "aten.add.Tensor", "aten.sub.Tensor", "aten.mul.Tensor", "aten.div.Tensor", "aten.neg.default",
    "aten.exp.default", "aten.pow.Tensor_Scalar", "aten.rsqrt.default", "aten.tanh.default",
    "aten.tanh_backward.default", "aten.sigmoid.default", "aten.sigmoid_backward.default", "aten.gelu.default",
    "aten.gelu_backward.default", "aten.silu.default", "aten.silu_backward.default", "aten.relu.default",
    "aten.clamp_min.default", "aten.threshold_backward.default", "aten.where.self", "aten.masked_fill.Scalar",
    "aten.clone.default", "aten.cat.default", "aten.full.default", "aten.mm.default", "aten.addmm.default",
    "aten.bmm.default", "aten.sum.dim_IntList", "aten.mean.dim", "aten.amax.default", "aten.gather.default",
    "aten.scatter.src", "aten.scatter.value", "aten.index_select.default", "aten.embedding.default",
    "aten.embedding_dense_backward.default", "aten.convolution.default", "aten.convolution_backward.default",
    "aten.max_pool2d_with_indices.default", "aten.max_pool2d_with_indices_backward.default",
    "aten._log_softmax.default", "aten._log_softmax_backward_data.default", "aten._softmax.default",
    "aten._softmax_backward_data.default", "aten.native_layer_norm.default",
    "aten.native_layer_norm_backward.default", "aten._native_batch_norm_legit_functional.default",
    "aten._native_batch_norm_legit.no_stats", "aten.native_batch_norm_backward.default",
))  # fmt: skip


def in_place(section: Section) -> dict[str, tuple[int, ...]]:
    """For each instruction, by name, whose result may be written into an operand: the positions of such operands."""
    memory = _memory(section)
    last = {memory[v]: i for i, step in enumerate(section.instructions) for v in step.operands if v in memory}
    last.update((memory[v], len(section.instructions)) for v in section.outputs if v in memory)
    found: dict[str, tuple[int, ...]] = {}
    for index, instruction in enumerate(section.instructions):
        if instruction.op not in WRITING:
            continue
        written = {place: _written(instruction, place, memory) for place in _places(instruction)}
        places = tuple(place for place, name in written.items() if name is not None and last[name] == index)
        if places:
            found[instruction.name] = places
    return found


def _places(instruction: Instruction) -> tuple[int, ...]:
    """The positions of the operands that one of the operations ``WRITING`` could write into."""
    return (0, 1) if instruction.op in _COMMUTATIVE and not instruction.kwargs else (0,)


def _written(instruction: Instruction, place: int, memory: Mapping[Value, str]) -> str | None:
    """The memory of that operand; None if it may not be written to, or another operand has it too."""
    operand = instruction.args[place]
    own = memory.get(operand) if isinstance(operand, Value) else None
    return own if [memory.get(value) for value in instruction.operands].count(own) == 1 else None


def _memory(section: Section) -> dict[Value, str]:
    """For values in memory that was allocated in this section, a name of that memory; none for memory of which a part
    may be kept by what is not known to keep nothing."""
    memory: dict[Value, str] = {}
    seen: set[str] = set()
    for instruction in section.instructions:
        viewed = _viewed(instruction)
        if instruction.op in ALLOCATING:
            for index in range(instruction.results):
                value = Value(instruction.name, index)
                memory[value] = str(value)
        elif viewed is None:
            seen.update(memory[value] for value in instruction.operands if value in memory)
        elif viewed in memory:
            memory[Value(instruction.name)] = memory[viewed]
    return {value: name for value, name in memory.items() if name not in seen}


def _viewed(instruction: Instruction) -> Value | None:
    """The operand of which the instruction's one result is a view, or possibly is."""
    position = _aliased(instruction.op)
    if position is None or instruction.results != 1 or position >= len(instruction.args):
        return None
    operand = instruction.args[position]
    return operand if isinstance(operand, Value) else None


@cache
def _aliased(op: str) -> int | None:
    """The position of the argument that a result may be a view of, for an operation of torch's."""
    return aliased_argument(resolve_aten(op)) if op.startswith("aten.") else None


def writing(op: str, places: tuple[int, ...], plain: Operation, into: Operation) -> Operation:
    """``op``, which writes into one of the operands at ``places`` if the result has its shape, strides and dtype. It
    runs by ``plain``, and by ``into``, which writes into the first operand."""
    if op.startswith("aten.scatter."):
        return into
    if op in GRADIENTS:
        return _writing_gradient(plain, into)
    if op.endswith(".default"):
        return _writing_activation(plain, into)

    def run(left: torch.Tensor, right: Any, **kwargs: Any) -> Any:
        fitting = _fitting(left, right)
        if 0 in places and fitting >= 1:
            return into(left, right, **kwargs)
        if 1 in places and fitting == 2:
            return into(right, left)
        return plain(left, right, **kwargs)

    return run


def _writing_gradient(plain: Operation, into: Operation) -> Operation:
    def run(gradient: torch.Tensor, value: torch.Tensor, *rest: Any, **kwargs: Any) -> Any:
        if _fitting(gradient, value) == 2:
            return into(gradient, value, *rest, grad_input=gradient, **kwargs)
        return plain(gradient, value, *rest, **kwargs)

    return run


def _writing_activation(plain: Operation, into: Operation) -> Operation:
    def run(value: torch.Tensor, **kwargs: Any) -> Any:
        return (into if _can_hold_a_result(value) else plain)(value, **kwargs)

    return run


def _can_hold_a_result(operand: torch.Tensor) -> bool:
    return operand.is_floating_point() and operand.is_contiguous()


def _fitting(left: torch.Tensor, right: Any) -> int:
    """How many of two operands, in order, are as the result of a pointwise operation on both."""
    if not _can_hold_a_result(left):
        return 0
    if not isinstance(right, torch.Tensor):
        return 1 if isinstance(right, int | float) else 0
    if left.dtype != right.dtype or left.shape != right.shape:
        return 0
    return 2 if right.is_contiguous() else 1
