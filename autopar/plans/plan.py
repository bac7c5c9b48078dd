"""A plan: what was chosen, what it costs and why. It is frozen, refers to no solver or torch model, and equals its
JSON.

Invariants: ``predicted.step_seconds`` is the sum of ``lines`` (with stages: of the lines of the stage that is busy
longest, and the bubble); ``collectives()`` are those of ``lines``; ``predicted.peak_bytes`` is the sum of ``holdings``
and the temporary bytes; ``Plan.from_json(plan.to_json()) == plan == Plan.from_text(plan.to_text())``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

from autopar.cluster.description import Cluster
from autopar.errors import OptionsError
from autopar.files import FileName, extension, read_text, write_text
from autopar.ir.plan_record import PlanRecord
from autopar.keywords import suggests
from autopar.plans.page.page import embedded, write_html
from autopar.plans.views.diff import Difference, difference
from autopar.plans.views.summary import plan_in_short, plan_text
from autopar.plans.views.table import PlanTable, plan_table
from autopar.plans.views.tree import PlanTree
from autopar.plans.views.what_if import WhatIf
from autopar.plans.views.why import Explanation, explain
from autopar.rare_collections import collecting_rarely

from .as_written import check_tables_as_written
from .forbid import with_forbidden
from .from_data import fields_from_dict
from .json import BYTE_ORDER_MARK, data_from_json, plan_to_json
from .text import data_from_lines, plan_to_lines
from .validate import validate
from .what_if import what_if


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

    def __repr__(self) -> str:
        return plan_in_short(self)

    def why(self, name: str, *, solve: bool = False) -> Explanation:
        """Explains why ``name`` (the path of a parameter or module, or a node of the graph, an activation) is placed as
        it is: the choice, who made it, what it costs, and what the alternatives would cost.

        Args:
            solve: whether the plan is also solved again with the choice forbidden, all others free to follow it: what
                the choice is worth. Takes as long as making the plan.

        Raises:
            OptionsError: the plan has no such name; the message suggests similar ones. With ``solve``, also if this
                plan was not returned by :func:`autopar.plan` in this process.
        """
        explanation = explain(self, name)
        return with_forbidden(self, explanation) if solve else explanation

    def diff(self, other: Plan) -> Difference:
        """What ``other`` does differently, and how its predictions differ from this plan's.

        Raises:
            OptionsError: ``other`` is no plan.
        """
        if not isinstance(other, PlanRecord):
            hint = f"; autopar.Plan.load({other!r}) reads one from a file" if isinstance(other, (str, PathLike)) else ""
            raise OptionsError(f"diff compares two plans, and {other!r} is a {type(other).__name__}{hint}")
        return difference(self, other)

    def tree(self) -> PlanTree:
        """The tree of modules with their placements and shares of a step."""
        return PlanTree(self)

    def table(self, by: str = "module") -> PlanTable:
        """The step's seconds and bytes summed ``by`` "module", "kind", "op", "rule", "phase", "collective" or "stage".
        By "division": what the search knows of each division of the devices into stages, data and tensor ranks.

        Raises:
            OptionsError: for another ``by``.
        """
        return plan_table(self, by)

    @suggests
    def whatif(
        self,
        *,
        memory_limit: Sequence[int | str] | int | str | None = None,
        devices: Sequence[int | tuple[int, ...]] | int | None = None,
        batch: Sequence[int] | int | None = None,
        precision: Sequence[str] | str | None = None,
        cluster: Sequence[str | Cluster] | str | Cluster | None = None,
    ) -> WhatIf[Plan]:
        """What the plan would be under other circumstances: one thing is changed at a time, and the rest is as this
        plan was asked for. Each answer is the plan that :func:`autopar.plan` returns for the changed question.

        Args:
            memory_limit: bytes per device, as numbers or as text such as "40GiB".
            devices: numbers of devices, of which the outermost axis takes more or fewer (one axis those that would not
                fill rows of the others), or shapes of meshes.
            batch: global batch sizes; the example batch is repeated or cut to them.
            precision: "fp32", "bf16", "fp16".
            cluster: names, files or :class:`~autopar.Cluster`.

        Without any, memory from this plan's peak down to a quarter of it, and half to four times the devices. A
        circumstance under which there is no plan is an answer too, which says why.

        Raises:
            OptionsError: a value is none, or this plan was not returned by :func:`autopar.plan` in this process.
        """
        asked = {
            "memory_limit": memory_limit,
            "devices": devices,
            "batch": batch,
            "precision": precision,
            "cluster": cluster,
        }
        return what_if(self, asked)  # type: ignore[arg-type]

    def to_html(self, path: FileName, record: FileName | None = None, whatif: WhatIf[Plan] | None = None) -> None:
        """Writes the plan as one self-contained page. ``record``: the ``steps.jsonl`` of a run of this plan
        (:class:`autopar.monitor.Monitor`), whose steps are then shown beside the predicted one. Either may be a URL.
        ``whatif``: what :meth:`whatif` returned, drawn as the frontier of step time against memory and devices.

        Raises:
            OptionsError: the page cannot be written, or the record cannot be read.
        """
        write_html(self, path, record, whatif)

    def _repr_html_(self) -> str:
        """What notebooks show."""
        return embedded(self)

    def to_json(self) -> str:
        """The whole plan as JSON; placements in short form."""
        return plan_to_json(self)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Reads a plan that :meth:`to_json` wrote. Raises :class:`~autopar.errors.OptionsError` for other texts."""
        with collecting_rarely():
            return Plan._read(data_from_json(text))

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
        with collecting_rarely():
            return Plan._read(data_from_lines(text))

    def save(self, path: FileName) -> None:
        """Writes the plan to ``path``, a local path or a URL (``s3://bucket/plan.json``): as JSON if it is called
        ``.json``, else as lines of text.

        Raises:
            OptionsError: it cannot be written.
        """
        write_text(path, self.to_json() if extension(path) == ".json" else self.to_text())

    @staticmethod
    def load(path: FileName) -> Plan:
        """Reads a plan in either of its forms, whatever the name, from a local path or a URL.

        Raises:
            OptionsError: it cannot be read, or is not a plan.
        """
        text = read_text(path, "the plan")
        try:
            is_json = text.lstrip(f"{BYTE_ORDER_MARK} \t\r\n").startswith("{")
            return Plan.from_json(text) if is_json else Plan.from_text(text)
        except OptionsError as error:
            raise OptionsError(f"{fspath(path)!r}: {error}; `autopar plan --output` writes one") from error

    @staticmethod
    def _read(data: Any) -> Plan:
        plan = Plan(**fields_from_dict(data))
        plan.validate()
        check_tables_as_written(data)
        return plan
