"""Records a model's forward as straight-line operations: what torch ran when the model ran once on fake tensors.

Everything that Python decided (loops over layers, branches on a layer's number, caches, closures) is fixed in such a
program; an operation refers to tensors by number, however the model passed them. Running the program again has the same
effect on autograd as the model, as long as the model does not change autograd itself. If it does (a custom
``autograd.Function``, a hook on a tensor), or if a tensor has no recorded origin, there is no program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar
from unittest.mock import patch

import torch
from torch import nn

from autopar.passes.base import LAYOUT_SENSITIVE
from autopar.torch_internals.fake_tensors import FakeTensor
from autopar.torch_internals.joint_graphs import notes
from autopar.torch_internals.modes import TorchDispatchMode
from autopar.torch_internals.operators import OpOverload, is_mutable
from autopar.torch_internals.replacements import autograd_functions_replaced, is_registered_derivative

from .loops import LoopWatch
from .patches import every_module

Leaf = TypeVar("Leaf")
PATH = "autopar_module"
PLACE = "autopar_place"


class UnrecordedError(Exception):
    """The model does something that a recorded program cannot repeat, so the model itself must be traced."""


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor of a program, by number."""

    number: int


@dataclass(frozen=True, slots=True)
class RecordedOp:
    """One operation; ``args`` and ``kwargs`` are trees with :class:`Ref` for tensors. ``operands`` are their numbers
    in order, ``requires_grad`` says of each whether it required a gradient; a result that is not a tensor has no
    number."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operands: tuple[int, ...]
    requires_grad: tuple[bool, ...]
    results: tuple[int | None, ...]
    grad_mode: bool
    path: str | None


@dataclass(slots=True)
class Region:
    """One call of a module: the instructions from ``start`` to before ``end``."""

    start: int
    end: int = -1
    children: list[Region] = field(default_factory=list)


@dataclass(frozen=True)
class Recording:
    """A recorded program. ``tensors[n]`` is tensor n as it was created: its shape, strides and dtype; the first ones
    are the inputs. Real tensors that the model created or captured are ``constants``, by number."""

    instructions: tuple[RecordedOp, ...]
    regions: tuple[Region, ...]
    tensors: Sequence[torch.Tensor]
    inputs: int
    constants: dict[int, torch.Tensor]
    outputs: tuple[int, ...]


def leaves(arg: Any, kind: type[Leaf]) -> Iterator[Leaf]:
    """The leaves of that type among the arguments of an operation, in order."""
    if isinstance(arg, kind):
        yield arg
    elif isinstance(arg, (tuple, list)):
        for item in arg:
            yield from leaves(item, kind)


def replaced(arg: Any, kind: type | tuple[type, ...], function: Callable[[Any], Any]) -> Any:
    """``arg`` with every leaf of that type, or of one of those types, replaced by ``function`` of it."""
    if isinstance(arg, kind):
        return function(arg)
    if isinstance(arg, (tuple, list)):
        return type(arg)(replaced(item, kind, function) for item in arg)
    return arg


class Recorder(TorchDispatchMode):
    """Records every operation and, by :meth:`listening`, the module calls they belong to."""

    def __init__(self, inputs: Sequence[torch.Tensor], modules: frozenset[int]) -> None:
        super().__init__()
        self.tensors: list[torch.Tensor] = []
        self.numbers: dict[int, int] = {}
        self.constants: dict[int, torch.Tensor] = {}
        self.instructions: list[RecordedOp] = []
        self.aliases: list[torch.Tensor] = []  # Kept alive, so that their ids are not reused.
        self.root = Region(0)
        self.refused: list[str] = []
        self.grad_mode: bool | None = None  # The user's grad mode, where torch has disabled gradients.
        self._modules = modules
        self._running: list[tuple[int, Region]] = []
        self.last_region: Region | None = None
        self._is_paused = False
        self._loops = LoopWatch()
        for tensor in inputs:
            self._number(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_paused:
            return func(*args, **kwargs)
        operands = [*leaves(args, torch.Tensor), *leaves(tuple(kwargs.values()), torch.Tensor)]
        numbers, requires_grad = (
            tuple(map(self._number_of, operands)),
            tuple(tensor.requires_grad for tensor in operands),
        )
        output = func(*args, **kwargs)
        results = output if isinstance(output, (tuple, list)) else (output,)
        if func is torch.ops.aten.detach.default and not requires_grad[0]:
            self.numbers[id(output)] = numbers[
                0
            ]  # Torch detaches on its own accord; where nothing is cut, it is not an operation.
            self.aliases.append(output)
        elif is_mutable(func) or any(isinstance(result, torch.Tensor) for result in results):
            refs = (replaced(arg, torch.Tensor, self._ref) for arg in (args, *kwargs.values()))
            first = next(refs)
            custom = notes() or {}
            self._loops.count(id(self._region), func, _named(custom.get(PATH)))
            self.instructions.append(
                RecordedOp(
                    op=func,
                    args=first,
                    kwargs=dict(zip(kwargs, refs, strict=True)),
                    operands=numbers,
                    requires_grad=requires_grad,
                    results=tuple(self._number(r) if isinstance(r, torch.Tensor) else None for r in results),
                    grad_mode=torch.is_grad_enabled() if self.grad_mode is None else self.grad_mode,
                    path=custom.get(PATH),
                )
            )
        return output

    def _number(self, tensor: torch.Tensor) -> int:
        """The number of a tensor, which is kept alive from now on, so that its id is not reused."""
        number = self.numbers.get(id(tensor))
        if number is None:
            number = self.numbers[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return number

    def _number_of(self, tensor: torch.Tensor) -> int:
        if id(tensor) not in self.numbers:
            if isinstance(tensor, FakeTensor):
                raise UnrecordedError("a tensor that no operation made")
            self.constants[self._number(tensor)] = tensor
        return self.numbers[id(tensor)]

    def _ref(self, tensor: torch.Tensor) -> Ref:
        return Ref(self.numbers[id(tensor)])

    @property
    def _region(self) -> Region:
        """The call of a module that is running."""
        return self._running[-1][1] if self._running else self.root

    def _enter(self, module: nn.Module, _args: Any) -> None:
        if id(module) in self._modules:
            self._loops.count_module(id(self._region), id(module), f"what calls {type(module).__name__}")
            self._running.append((id(module), Region(len(self.instructions))))

    def _leave(self, module: nn.Module, _args: Any, _output: Any) -> None:
        # Calls that ended with an exception that a caller caught are not regions.
        while any(identity == id(module) for identity, _ in self._running):
            identity, region = self._running.pop()
            if identity == id(module):
                region.end = len(self.instructions)
                self._region.children.append(region)
                self.last_region = region
                break

    def add_region(self, module: nn.Module, region: Region) -> None:
        """Adds a call of ``module`` whose operations have been added."""
        self._loops.count_module(id(self._region), id(module), f"what calls {type(module).__name__}")
        self._region.children.append(region)

    def stand_in(self, like: torch.Tensor, number: int) -> torch.Tensor:
        """A new tensor of the same kind as ``like``, the result ``number`` of an operation that did not run."""
        self._is_paused = True
        try:
            with torch.enable_grad():
                made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
                # A copy, since a tensor that is no result of an operation must not be changed in place.
                made = made.requires_grad_().clone() if like.requires_grad else made
        finally:
            self._is_paused = False
        self.tensors[number] = made
        self.numbers[id(made)] = number
        return made

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Records what happens inside."""
        with every_module(self._enter, self._leave), _plain_autograd(self), self:
            yield

    def program(self, inputs: int, outputs: Sequence[torch.Tensor]) -> Recording:
        """What was recorded. Raises :class:`UnrecordedError` if it cannot be repeated."""
        if self.refused:  # The model may have caught the exception.
            raise UnrecordedError(self.refused[0])
        for instruction in self.instructions:
            if str(instruction.op) in LAYOUT_SENSITIVE:
                # The strides of a gradient that leaves a call are only guessed.
                raise UnrecordedError(f"{instruction.op} depends on how tensors lie in memory")
            # Torch copies some views by an inner detach, which, unlike the user's, does not cut the gradient.
            if instruction.op is torch.ops.aten.detach.default and self.tensors[instruction.results[0]].requires_grad:  # type: ignore[index]
                raise UnrecordedError("a detached tensor that requires a gradient")
        numbers = tuple(map(self._number_of, outputs))
        return Recording(
            tuple(self.instructions), tuple(self.root.children), self.tensors, inputs, self.constants, numbers
        )


def _named(path: str | None) -> str:
    return f"module {path!r}" if path else "the model"


@contextmanager
def _plain_autograd(recorder: Recorder) -> Iterator[None]:
    """Makes everything that would compute a gradient other than that of the recorded operations raise
    :class:`UnrecordedError`."""

    def refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
        recorder.refused.append("the model changes what autograd does")
        raise UnrecordedError(recorder.refused[0])

    def apply_own(apply: Callable[..., Any], cls: type, *args: Any, **kwargs: Any) -> Any:
        # A Function that torch.library makes from an operator's derivative belongs to that operator, which runs inside.
        if not is_registered_derivative(cls):
            refuse()
        before, recorder.grad_mode = recorder.grad_mode, torch.is_grad_enabled()
        try:
            return apply(*args, **kwargs)
        finally:
            recorder.grad_mode = before

    with ExitStack() as stack:
        stack.enter_context(autograd_functions_replaced(apply_own))
        for owner, name in (
            (torch.Tensor, "register_hook"),
            (torch.Tensor, "register_post_accumulate_grad_hook"),
            (torch.Tensor, "backward"),
            (torch.autograd, "grad"),
            (torch.autograd, "backward"),
        ):
            stack.enter_context(patch.object(owner, name, refuse))
        yield
