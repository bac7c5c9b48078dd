"""``autopar whatif``: what it shows of what was asked, and what it says where the model is not named."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.command_line import main
from tests.helpers.plan_model import make_plan

MODEL_FILE = """
import torch
def make():
    return torch.nn.Linear(16, 4), torch.randn(8, 16)
"""


@pytest.mark.filterwarnings("ignore:.*no loss")
def test_limits_are_shown_as_they_were_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "linear_target.py").write_text(MODEL_FILE)
    words = ["whatif", f"{tmp_path / 'linear_target.py'}:make", "--mesh", "2", "--cluster", "dgx-a100-80gb"]
    assert main([*words, "--memory-limits", "2MB,1073741824B, 2 GiB,4000000000B"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.endswith("optimal")]
    assert [row[2:].partition("  ")[0] for row in rows] == ["2MB", "1073741824B", "2 GiB", "4000000000B"]


def test_given_a_plan_it_says_what_to_give_instead(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, plan = tmp_path / "plan.json", make_plan(stages=1)
    plan.save(file)
    mesh = ",".join(map(str, plan.mesh))
    assert main(["whatif", str(file)]) == 2
    assert f"autopar whatif train.py:make --mesh {mesh} (the plan's mesh)" in capsys.readouterr().err
    assert main(["whatif", "train.py:make"]) == 2
    assert "give the mesh" in capsys.readouterr().err
