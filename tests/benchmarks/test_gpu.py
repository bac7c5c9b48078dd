"""The kit for the first hour on a GPU, on processors: what becomes of cases that fail, hang or take their process with
them; and a part of it from end to end."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.gpu import __main__ as kit
from benchmarks.gpu import messages, models, programs, supervise, tables, train, worker
from benchmarks.gpu.setting import Row, Setting
from benchmarks.gpu.worker import Work

TINY = Setting("cpu", tiny=True)


def _run(case: str, setting: Setting) -> list[Row]:
    match case:
        case "fails":
            raise ValueError("wrong")
        case "poisons":
            raise RuntimeError("CUDA error: device-side assert triggered")
        case "hangs":
            while True:
                time.sleep(0.001)
    return [{"case": case, "equal": True}]


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Work:
    monkeypatch.setattr(worker, "module_of", lambda part: SimpleNamespace(run=_run))
    return Work("programs", ("fine",), time.time() + 60.0, str(tmp_path / "rows"), TINY)


def _rows(work: Work) -> list[Any]:
    return supervise._read(Path(work.path))[0]


def test_a_failing_case_is_a_row(work: Work) -> None:
    assert worker.work_through(replace(work, cases=("fails", "fine"))) == 0
    failed, fine = _rows(work)
    assert failed["case"] == "fails" and failed["error"] == "ValueError: wrong"
    assert fine == {"case": "fine", "equal": True}


def test_a_hanging_case_is_left_and_those_after_it_too(work: Work) -> None:
    assert worker.work_through(replace(work, cases=("hangs", "fine"), deadline=time.time() + 0.2)) == 0
    assert [(row["case"], "left" in row) for row in _rows(work)] == [("hangs", True), ("fine", True)]


def test_an_error_that_the_device_keeps_ends_the_process(work: Work) -> None:
    assert worker.work_through(replace(work, cases=("poisons", "fine"))) == worker.STOPPED
    assert [row["case"] for row in _rows(work)] == ["poisons"]


def test_cases_go_on_in_another_process(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []

    def run(work: Work) -> str | None:
        runs.append(work.cases)
        if work.cases[0] == "crashes":
            Path(work.path).write_text(json.dumps({"begin": "crashes"}) + "\n")
            return "ended (exit code -11): a trace"
        return None if worker.work_through(work) == 0 else "ended (exit code 3)"

    monkeypatch.setattr(supervise, "_run", run)
    rows = supervise._all_cases(replace(work, cases=("poisons", "crashes", "fine")))
    assert runs == [("poisons", "crashes", "fine"), ("crashes", "fine"), ("fine",)]
    assert [(row["case"], row.get("error", "")[:16]) for row in rows] == [
        ("poisons", "RuntimeError: CU"), ("crashes", "ended (exit code"), ("fine", ""),
    ]  # fmt: skip


def test_losses_are_compared_with_eagers() -> None:
    like = {"case": "llama eager", "losses": [4.0, 3.0], "step_seconds": 2.0}
    near, far = {**like, "case": "llama DDP", "losses": [4.0, 3.01]}, {**like, "case": "llama TP", "losses": [4.0, 3.1]}
    _, near, far = tables.with_ratios([like, near, far])
    assert near["equal"] and not far["equal"]
    assert near["of_eager"] == 1.0
    assert not tables.with_ratios([like, {**far, "losses": [4.0, float("nan")]}])[1]["equal"]


def test_gradients_are_compared_where_they_are_most_beyond() -> None:
    expected = {"loss": torch.tensor(2.0), "a": torch.ones(3), "b": torch.full((3,), 1e-6)}
    found = {**expected, "b": torch.zeros(3)}  # Nothing but rounding, beside the largest.
    assert programs.compare(found, expected, expected, 1e-3)["equal"]
    wrong = programs.compare({**expected, "a": torch.tensor([1.0, 1.0, 1.1])}, expected, expected, 1e-3)
    assert not wrong["equal"] and wrong["at"] == "a"
    nan = programs.compare({**expected, "a": torch.full((3,), float("nan"))}, expected, expected, 1e-3)
    assert not nan["equal"]


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert kit.main([]) == 2
    assert "--device cpu --tiny" in capsys.readouterr().err


@pytest.fixture
def joined() -> Any:
    TINY.join()
    yield
    dist.destroy_process_group()


def test_each_collective_through_a_group_of_one(joined: None) -> None:
    for case in messages.cases(TINY):
        assert messages.run(case, TINY)[0]["wrong"] == []


def test_eager_and_autopar_train_alike(joined: None) -> None:
    rows = tables.with_ratios([row for case in ("llama eager", "llama autopar") for row in train.run(case, TINY)])
    assert rows[1]["equal"] and rows[1]["loss_error"] < 1e-4
    assert rows[1]["predicted_bytes"] > 0


@pytest.mark.slow
def test_parts_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gpu.json"
    words = ["--device", "cpu", "--tiny", "--parts", "messages", "programs", "ops", "--output", str(path)]
    assert kit.main([*words, "--seconds", "240"]) == 0
    figures = json.loads(path.read_text())
    rows = {part: found["rows"] for part, found in figures["parts"].items()}
    assert all(row["equal"] for part in ("messages", "programs") for row in rows[part])
    assert len(rows["programs"]) == 4
    assert {row["case"].split(" ")[0] for row in rows["ops"]} == set(models.TRAINED)
    assert "0 failed, 0 were left" in " ".join(capsys.readouterr().out.split())
