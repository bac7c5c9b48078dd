"""The question that a plan answers, kept beside the plan for as long as it lives in the process that made it.

A plan is plain data and refers to no model. To solve again under other circumstances takes the model, so
:func:`autopar.plan` notes what it was called with; model and batch are kept for as long as the plan is. A plan from a
file has no question.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from autopar.errors import OptionsError
from autopar.ir.plan_record import PlanRecord
from autopar.torch_internals.trees import tree_map

AnyPlan = TypeVar("AnyPlan", bound=PlanRecord)
# By the identity of a plan: plans are not hashable, since they hold dicts.
_questions: dict[int, Question] = {}


@dataclass(frozen=True)
class Question:
    """What :func:`autopar.plan` was called with. ``ask`` is that function; ``shape`` the mesh as a shape, outermost
    axis first; ``samples`` the rows of the global ``batch``; ``arguments`` the other keyword arguments, ``options`` and
    ``cluster`` among them. ``begin`` returns a new ``work``: what is computed once for all that is asked with it."""

    ask: Callable[..., Any]
    model: nn.Module
    mesh: Any
    shape: tuple[int, ...]
    batch: Any
    samples: int
    arguments: Mapping[str, Any]
    begin: Callable[[], Any]

    @property
    def options(self) -> Any:
        return self.arguments["options"]

    def again(self, *, mesh: Any = None, samples: int | None = None, work: Any = None, **changed: Any) -> Any:
        """The plan for this question with some arguments ``changed``. ``samples``: another global batch
        size; ``work``: of :attr:`begin`. Raises what :func:`autopar.plan` raises."""
        arguments, batch = {**self.arguments, **changed}, self.batch
        if samples is not None:
            batch = resized(batch, self.samples, samples)
            arguments["targets"] = resized(arguments["targets"], self.samples, samples)
        return self.ask(self.model, self.mesh if mesh is None else mesh, batch, work=work, **arguments)

    def mesh_of(self, devices: int) -> tuple[int, ...]:
        """The mesh with so many devices: the outermost axis is longer or shorter, since it is nodes that are added.
        Where rows of the other axes would not be full, one axis, which the search divides."""
        inner = math.prod(self.shape[1:])
        return (devices,) if devices % inner else (devices // inner, *self.shape[1:])


def resized(tree: Any, samples: int, wanted: int) -> Any:
    """The tensors of ``tree`` that have ``samples`` rows, with as many rows as ``wanted``: repeated or cut off, so that
    all values are valid ones."""

    def resize(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0 or leaf.shape[0] != samples:
            return leaf
        return leaf[torch.arange(wanted, device=leaf.device) % samples]

    return tree_map(resize, tree)


def remember(plan: AnyPlan, question: Question) -> AnyPlan:
    """Notes which question ``plan`` answers, and returns the plan."""
    key = id(plan)
    _questions[key] = question
    weakref.finalize(plan, _questions.pop, key, None)
    return plan


def question_of(plan: PlanRecord) -> Question:
    """The question that ``plan`` answers. Raises :class:`OptionsError` for a plan that was not made in this process."""
    question = _questions.get(id(plan))
    if question is None:
        raise OptionsError(
            "to solve again takes the model, which a plan from a file, a copy of a plan and the plan of a parallel "
            "module do not know: ask the plan that autopar.plan(model, mesh, batch, ...) returns"
        )
    return question
