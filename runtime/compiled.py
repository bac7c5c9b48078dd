"""What a parallel module asks of its compiler, and what it gets back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import nn

from autopar.pipeline import PipelineProgram
from autopar.program import Program
from autopar.signature import Signature

OutputsWanted = Literal["all", "each", "loss"]


@dataclass(frozen=True)
class Request:
    """A call to be compiled: the model's own ``args`` and ``kwargs`` (global tensors or DTensors), whether
    its modules are in ``training`` mode, whether gradients are wanted, and which outputs are used: only the ``loss``;
    ``all``, of which the loss alone is differentiated if the model returns one; or ``all``, ``each`` of which may
    be."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    training: bool
    grad: bool
    outputs: OutputsWanted


class Guards(Protocol):
    """What a program takes for granted about Python objects that the model reads and a call does not show: attributes
    of modules, lists, random numbers of Python."""

    def changed(self, module: nn.Module) -> str | None:
        """What is no longer as it was when ``module`` was traced, such as ``drop.p was 0.1 and is 0.5``; None if all
        is."""
        ...


class Padding(Protocol):
    """What it takes to run a program for ``batch`` rows with fewer (:mod:`autopar.padded_rows`)."""

    @property
    def batch(self) -> int: ...

    @property
    def inputs(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype, bool]]:
        """Of each input its shape, dtype, and whether dim 0 counts rows."""
        ...

    def holds_for(self, rows: int) -> bool:
        """Whether the program is one for so many rows, filled up."""
        ...

    def outputs(self, named: Callable[[str], str]) -> Mapping[str, int | None]:
        """The dim of each output along which its rows lie. Collective until it returns. Raises :class:`AutoparError` if
        rows influence each other."""
        ...


@dataclass(frozen=True)
class Compiled:
    """The answer: this rank's ``program`` (a :class:`PipelineProgram` if a step goes in microbatches), how the model is
    called, and the ``plan`` shown to the user. ``fingerprint`` identifies plan and graph: the same on all ranks.
    ``guards`` (None: nothing) must hold for the program to be used; ``planned`` says that the plan was made for just
    this program. ``padding`` (None: none) lets it run smaller batches."""

    program: Program | PipelineProgram
    signature: Signature
    plan: object
    fingerprint: str = field(default="")
    guards: Guards | None = None
    planned: bool = False
    padding: Padding | None = None


Compile = Callable[[Request], Compiled]
