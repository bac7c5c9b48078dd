"""The tree of all modules of a plan: placements, shares of a step, communication. Equal layers are folded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autopar.ir.plan_record import PlanRecord

from .module_tree import ModuleRow, module_rows


@dataclass(frozen=True)
class PlanTree:
    """The result of :meth:`autopar.plans.plan.Plan.tree`: ``str`` draws it, rich prints it in colour, ``rows`` are its
    modules.
    """

    plan: PlanRecord

    @property
    def rows(self) -> tuple[ModuleRow, ...]:
        return module_rows(self.plan)

    def __str__(self) -> str:
        from .drawn_tree import tree_text

        return tree_text(self.plan)

    def __rich__(self) -> Any:
        from .drawn_tree import drawn_tree

        return drawn_tree(self.plan)
