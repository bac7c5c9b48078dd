"""A plan: what was chosen, what it costs and why. It is frozen, refers to no solver or torch model, and equals its
JSON.

Invariants: ``predicted.step_seconds`` is the sum of ``lines`` (with stages: of the lines of the stage that is busy
longest, and the bubble); ``collectives()`` are those of ``lines``; ``predicted.peak_bytes`` is the sum of ``holdings``
and the temporary bytes; ``Plan.from_json(plan.to_json()) == plan == Plan.from_text(plan.to_text())``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

from autopar.ir.plan_record import PlanRecord
from autopar.plans.page.page import embedded, write_html
from autopar.plans.views.diff import Difference, difference
from autopar.plans.views.summary import plan_text
from autopar.plans.views.table import PlanTable, plan_table
from autopar.plans.views.tree import PlanTree
from autopar.plans.views.why import Explanation, explain

from .json import fields_from_json, plan_to_json
from .text import fields_from_lines, plan_to_lines
from .validate import validate


@dataclass(frozen=True)
class Plan(PlanRecord):
    """A plan; see the module docstring, and :class:`.PlanRecord` for its fields."""

    def validate(self) -> None:
        """Checks that every field has its type, that names, placements and shapes fit together, and that figures are
        the sums of their parts. Plans are checked when they are read and before they are run. Before a run, each
        strategy must also be one that the rules offer for its operation.

        Raises:
            OptionsError: names what is wrong.
        """
        validate(self)

    def __str__(self) -> str:
        return plan_text(self)

    def why(self, name: str) -> Explanation:
        """Explains why ``name`` (the path of a parameter or module, or a node of the graph) is placed as it is: the
        choice, who made it, what it costs, and what the alternatives would cost.

        Raises:
            OptionsError: the plan has no such name; the message suggests similar ones.
        """
        return explain(self, name)

    def diff(self, other: Plan) -> Difference:
        """What ``other`` does differently, and how its predictions differ from this plan's."""
        return difference(self, other)

    def tree(self) -> PlanTree:
        """The tree of modules with their placements and shares of a step."""
        return PlanTree(self)

    def table(self, by: str = "module") -> PlanTable:
        """The step's seconds and bytes summed ``by`` "module", "kind", "op", "rule", "phase", "collective" or "stage".

        Raises:
            OptionsError: for another ``by``.
        """
        return plan_table(self, by)

    def to_html(self, path: str | PathLike[str], record: str | PathLike[str] | None = None) -> None:
        """Writes the plan as one self-contained page. ``record``: the ``steps.jsonl`` of a run of this plan
        (:class:`autopar.monitor.Monitor`), whose steps are then shown beside the predicted one.

        Raises:
            OptionsError: the page cannot be written, or the record cannot be read.
        """
        write_html(self, path, record)

    def _repr_html_(self) -> str:
        """What notebooks show."""
        return embedded(self)

    def to_json(self) -> str:
        """The whole plan as JSON; placements in short form."""
        return plan_to_json(self)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Reads a plan that :meth:`to_json` wrote. Raises :class:`~autopar.errors.OptionsError` for other texts."""
        return Plan._read(fields_from_json(text))

    def to_text(self) -> str:
        """The whole plan as lines of text, for people, diff and version control: the summary (``str``) as comments,
        then every choice and price.
        """
        return plan_to_lines(self)

    @staticmethod
    def from_text(text: str) -> Plan:
        """Reads a plan that :meth:`to_text` wrote. Raises :class:`~autopar.errors.OptionsError`, naming the line, for
        other texts.
        """
        return Plan._read(fields_from_lines(text))

    @staticmethod
    def _read(fields: Mapping[str, Any]) -> Plan:
        plan = Plan(**fields)
        plan.validate()
        return plan
