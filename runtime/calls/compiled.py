"""The interface between a parallel module and its compiler: requests and compiled programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import nn

from autopar.ir.pipeline_program import PipelineProgram
from autopar.ir.placements import Placements
from autopar.ir.program import Program
from autopar.ir.signature import Signature

OutputsWanted = Literal["all", "each", "loss"]


@dataclass(frozen=True)
class Request:
    """A call to compile: the model's ``args`` and ``kwargs`` (global tensors or DTensors), whether its modules are in
    ``training`` mode, whether gradients are needed, and which ``outputs`` are used: ``"loss"`` only; ``"all"``, with
    only the loss differentiated if the model returns one; or ``"each"``, all of which may be differentiated."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    training: bool
    grad: bool
    outputs: OutputsWanted


class Guards(Protocol):
    """The assumptions of a program about Python objects that the model reads and that are not part of a call:
    attributes of modules, lists, Python's random numbers."""

    def changed(self, module: nn.Module) -> str | None:
        """What has changed since ``module`` was traced, such as ``drop.p was 0.1 and is 0.5``; None if nothing has."""
        ...


class Padding(Protocol):
    """Lets a program for ``batch`` rows run with fewer (:mod:`autopar.compiler.padded_rows`)."""

    @property
    def batch(self) -> int: ...

    @property
    def inputs(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype, bool]]:
        """The shape and dtype of each input, and whether its dim 0 is the rows."""
        ...

    def holds_for(self, rows: int) -> bool:
        """Whether the program can run that many rows, padded."""
        ...

    def outputs(self, named: Callable[[str], str]) -> Mapping[str, int | None]:
        """The dim of each output that is the rows. Collective at the first call. Raises :class:`AutoparError` if rows
        influence each other."""
        ...


@dataclass(frozen=True)
class Compiled:
    """A compiled call: this rank's ``program`` (a :class:`PipelineProgram` if a step has microbatches), the model's
    ``signature``, and the ``plan`` shown to the user. ``fingerprint``: identifies plan and graph, the same on all
    ranks. ``guards`` (None: none) must hold for the program to be used. ``planned``: whether the plan was made for
    exactly this program. ``padding`` (None: none) lets it run smaller batches. ``caches``: where each cache
    that it takes rests, by name."""

    program: Program | PipelineProgram
    signature: Signature
    plan: object
    fingerprint: str = field(default="")
    guards: Guards | None = None
    planned: bool = False
    padding: Padding | None = None
    caches: Mapping[str, Placements] = field(default_factory=dict)


Compile = Callable[[Request], Compiled]
