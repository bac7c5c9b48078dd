"""Looking at a plan file takes little more than loading torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.helpers.plan_model import make_plan

# What traces, plans and runs models, and what draws progress and pages.
HEAVY = (
    *("ortools", "transformers", "cloudpickle", "rich", "jinja2", "torch._dynamo", "torch._inductor"),
    *("autopar.api", "autopar.trace", "autopar.planner", "autopar.search", "autopar.solver", "autopar.passes"),
)


CODE = f"""
import sys
from autopar.command_line import main
main(sys.argv[1:])
print(*(name for name in {HEAVY} if name in sys.modules))
"""


def test_a_plan_is_shown_without_what_makes_and_runs_plans(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    make_plan(stages=1).save(file)
    for words in (["show", str(file)], ["explain", str(file), "head.weight"]):
        command = [sys.executable, "-c", CODE, *words]
        shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        *text, loaded = shown.stdout.split("\n")[:-1]
        assert loaded == "" and any("head" in line for line in text)
