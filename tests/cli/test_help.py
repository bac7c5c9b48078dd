"""``autopar --help`` and completions of shells."""

from __future__ import annotations

import pytest

from autopar.cli.commands import NAMES
from autopar.command_line import main


def test_help_fits_a_screen(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80


def test_completions_know_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    assert main(["completion", "bash"]) == 0
    text = capsys.readouterr().out
    names = list(NAMES)
    assert [name for name in names if f"_shtab_autopar_{name}_option_strings=" not in text] == []
    assert "--memory-limit" in text
