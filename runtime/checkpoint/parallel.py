"""What saving and loading need to know of a parallel module, beside its public methods."""

from __future__ import annotations

from dataclasses import asdict, is_dataclass
from typing import Any

from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.state.weights import Weights


def mesh_ranks(model: ParallelModule) -> tuple[int, ...]:
    """The ranks of the mesh in row-major order."""
    return tuple(model._groups.mesh.mesh.flatten().tolist())


def mesh_shape(model: ParallelModule) -> tuple[int, ...]:
    """The mesh in the plan's shape."""
    return model._groups.shape


def weights_of(model: ParallelModule) -> Weights:
    """The parameters, and how they are placed."""
    return model._weights


def plan_text(model: ParallelModule) -> str | None:
    """The plan as JSON; None before there is one, or of a program that was not planned."""
    plan = model._plan
    return str(plan.to_json()) if hasattr(plan, "to_json") else None


def options_dict(model: ParallelModule) -> dict[str, Any] | None:
    """The options of planning."""
    options = getattr(model._compile, "options", None)
    return asdict(options) if is_dataclass(options) and not isinstance(options, type) else None


def rests_in_host_memory(model: ParallelModule, name: str) -> bool:
    """Whether the plan keeps the optimizer state of the parameter in host memory."""
    return model._rests_in_host_memory(name)
