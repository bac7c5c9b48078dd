"""What is printed to a terminal fits it; what goes into a file has one width everywhere."""

from __future__ import annotations

import os

import pytest

import autopar
from autopar.plans.plan import Plan
from autopar.plans.views import page_width
from tests.helpers.plan_model import solved

NAME = "blocks.1.first.weight"


def _everything(plan: Plan) -> list[str]:
    tables = [str(plan.table(by=by)) for by in ("module", "kind", "op", "rule", "phase", "collective", "stage")]
    return [str(plan), str(plan.tree()), str(plan.why(NAME)), str(plan.why("blocks.1")), *tables]


@pytest.mark.parametrize("columns", [80, 90])
def test_lines_fit_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, _, _ = solved()
    in_a_file = plan.to_text()
    monkeypatch.setattr(page_width.os, "get_terminal_size", lambda _: os.terminal_size((columns, 24)))
    monkeypatch.setattr(page_width.sys, "stdout", _Terminal())
    for text in _everything(plan):
        assert max(map(len, text.splitlines())) <= columns, text
    assert plan.to_text() == in_a_file


class _Terminal:
    def fileno(self) -> int:
        return 1


def test_only_public_names_are_completed() -> None:
    assert {name for name in dir(autopar) if not name.startswith("__")} == set(autopar.__all__)


def test_json_has_an_entry_a_line() -> None:
    plan, _, _ = solved()
    lines = plan.to_json().splitlines()
    assert any(line.strip().startswith(f'"{NAME}": [') for line in lines)
    assert len(lines) > len(plan.nodes)
    assert Plan.from_json(plan.to_json()) == plan
