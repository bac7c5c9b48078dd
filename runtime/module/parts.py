"""What other packages of autopar need of a parallel module, beside its public methods."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

from autopar.runtime.state.weights import Weights


@dataclass(frozen=True)
class Parts:
    """``weights``: the parameters, and how they are placed; ``in_host(name)``: the tier in which the plan keeps the
    optimizer state of the parameter, "" for the device; ``plan`` is None before there is one; ``call(name)``: a context
    for what all ranks do together, so that the watch names those that do not."""

    weights: Weights
    plan: Any
    compile: Any
    in_host: Callable[[str], str]
    call: Callable[[str], AbstractContextManager[None]]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the mesh in row-major order."""
        return tuple(self.weights.groups.mesh.mesh.flatten().tolist())

    @property
    def plan_text(self) -> str | None:
        """The plan as JSON; None if there is none, or the program was not planned."""
        return str(self.plan.to_json()) if hasattr(self.plan, "to_json") else None

    @property
    def options(self) -> dict[str, Any] | None:
        """The options of planning."""
        options = getattr(self.compile, "options", None)
        return asdict(options) if is_dataclass(options) and not isinstance(options, type) else None
