"""The commands, from words to exit status: 0 well, 1 a check failed, 2 bad usage or one error message."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autopar.cli.arguments import options_from
from autopar.cli.commands import calibrate as calibrate_command
from autopar.cli.commands import verify as verify_command
from autopar.cluster.description import Cluster, local_file
from autopar.command_line import main, make_parser
from autopar.errors import InfeasibleError, WorkerError
from autopar.plans.plan import Plan
from autopar.verification.gradients import Noise

ROOT = Path(__file__).resolve().parent.parent.parent
MODEL_FILE = """
import torch

class Tiny(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(16, 32)
        self.second = torch.nn.Linear(32, 4)
    def forward(self, x, labels):
        return torch.nn.functional.cross_entropy(self.second(torch.relu(self.first(x))), labels)

def make():
    torch.manual_seed(0)
    return Tiny(), {"x": torch.randn(8, 16), "labels": torch.arange(8) % 4}
"""


@pytest.fixture(autouse=True)
def no_calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests read and write no calibration of this machine."""
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "tiny_model.py").write_text(MODEL_FILE)
    monkeypatch.delitem(sys.modules, "tiny_model", raising=False)
    return f"{tmp_path / 'tiny_model.py'}:make"


@pytest.fixture
def plan_file(target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Path]:
    def write(name: str, *words: str) -> Path:
        path = tmp_path / name
        assert main(["plan", target, "--mesh", "2,2", "--output", str(path), *words]) == 0
        capsys.readouterr()
        return path

    return write


def test_every_command_has_help_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("plan", "explain", "diff", "run", "verify", "doctor", "calibrate", "bench"):
        with pytest.raises(SystemExit) as stopped:
            make_parser().parse_args([command, "--help"])
        assert stopped.value.code == 0
        assert "--json" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["nonsense"],
        ["plan", "m:f"],
        ["plan", "m:f", "--mesh", "2,zero"],
        ["plan", "m:f", "--mesh", "2", "--memory-limit", "much"],
        ["plan", "m:f", "--mesh", "2", "--zero", "4"],
        ["plan", "m:f", "--mesh", "2", "--device", "8"],  # No abbreviation of --devices.
        ["run", "--nproc", "0", "x.py"],
        ["explain", "plan.json", "first", "--json", "second"],
        ["diff", "a.json", "b.json", "c.json"],
    ],
)
def test_bad_words_are_bad_usage(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    assert "usage: autopar" in capsys.readouterr().err


def test_options_reach_the_planner() -> None:
    words = ["plan", "m:f", "--mesh", "2,2", "--memory-limit", "10GiB", "--zero", "3", "--gap", "0.02"]
    words += [
        "--seed",
        "7",
        "--optimizer",
        "sgd",
        "--no-mesh-search",
        "--pin",
        "a.*=S(0),R",
        "--pin",
        "b=R,R",
    ]
    arguments = make_parser().parse_args(words)
    options = options_from(arguments)
    assert (options.memory_limit, options.zero, options.gap, options.seed) == (10 * 2**30, 3, 0.02, 7)
    assert (options.optimizer, options.mesh_search) == ("sgd", False)
    assert options.pins == {"a.*": "S(0),R", "b": "R,R"}
    assert options.time_limit == type(options)().time_limit


def test_plan_prints_the_plan(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", target, "--mesh", "2,2", "--cluster", "dgx-a100-80gb"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Plan") and len(text.splitlines()) <= 40


def test_plan_of_a_meta_model(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", target, "--mesh", "4", "--meta", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["status"] in ("optimal", "feasible")


def test_plan_explain_diff(plan_file: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    best = plan_file("best.json")
    pinned = plan_file("pinned.json", "--pin", "first.weight=S(0),S(1)")
    assert main(["diff", str(best), str(best)]) == 0
    capsys.readouterr()
    assert main(["diff", str(best), str(pinned), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["same"] is False
    assert main(["explain", str(pinned), "first.weight"]) == 0
    assert "first.weight" in capsys.readouterr().out


def test_a_plan_as_text_is_the_same_plan(
    plan_file: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--cluster", "dgx-a100-80gb", "--html", str(tmp_path / "plan.html"))
    lines = plan_file("plan.txt", *words)
    assert lines.read_text().startswith("autopar plan ")
    assert "first.weight" in (tmp_path / "plan.html").read_text()
    document = tmp_path / "plan.json"
    document.write_text(Plan.from_text(lines.read_text()).to_json())
    assert main(["diff", str(document), str(lines)]) == 0
    assert "the same" in capsys.readouterr().out
    assert main(["explain", str(lines), "first.wieght"]) == 2
    assert "did you mean 'first.weight'" in capsys.readouterr().err
    timeline = str(tmp_path / "step.json")
    assert main(["explain", str(lines), "--timeline", timeline, "first.weight"]) == 0
    assert capsys.readouterr().out.startswith("parameter  first.weight")
    assert main(["explain", str(lines), "second", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["why"]["kind"] == "module" and found["why"]["alternatives"]["possible"] > 0


@pytest.mark.parametrize(("view", "word"), [("tree", "├── first"), ("op", "aten.mm.default"), ("collective", "")])
def test_views_of_a_plan(view: str, word: str, target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", target, "--mesh", "2", "--cluster", "dgx-a100-80gb", "--zero", "3", "--show", view]) == 0
    text = capsys.readouterr().out
    assert word in text and not text.startswith("Plan ")


def test_explain_needs_a_plan_or_a_mesh(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", target, "first.weight"]) == 2
    assert "--mesh" in capsys.readouterr().err
    assert main(["explain", target, "first.weight", "--mesh", "2"]) == 0


def test_a_file_that_is_no_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.json").write_text("{}")
    for name, message in (("other.json", "not a plan"), ("none.json", "No such file")):
        assert main(["diff", str(tmp_path / name), str(tmp_path / name)]) == 2
        assert message in capsys.readouterr().err


def test_errors_are_one_message_and_status_2(
    target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise InfeasibleError("nothing fits into 1 KiB; 3 KiB would")

    monkeypatch.setattr("autopar.api.plan", refuse)
    assert main(["plan", target, "--mesh", "2", "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.err == "autopar: nothing fits into 1 KiB; 3 KiB would\n"
    assert json.loads(captured.out)["kind"] == "InfeasibleError"


def fake_report(ok: bool) -> Any:
    """A report of what a run found; only its verdict matters here."""
    return SimpleNamespace(
        ok=ok,
        loss_error=0.0,
        max_error=0.1,
        gradient_errors={"w": 0.1},
        noise={"b": Noise(1e-16, 2e-8)},
        unmeasured="rank 1 died",
        steps=1,
        later_errors={},
        seconds=1.0,
        plan=None,
        __str__=lambda: "report",
    )


@pytest.mark.parametrize("ok", [True, False])
def test_verify_status_and_arguments(
    ok: bool, target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: dict[str, Any] = {}

    def verify(model: object, mesh: object, batch: object, **keywords: Any) -> Any:
        seen.update(keywords, mesh=mesh, batch=batch)
        return fake_report(ok)

    monkeypatch.setattr(verify_command, "verify_model", verify)
    words = [
        "verify",
        target,
        "--mesh",
        "2,2",
        "--timeout",
        "120",
        "--cluster",
        "dgx-a100-80gb",
        "--zero",
        "3",
        "--json",
    ]
    assert main(words) == (0 if ok else 1)
    assert (seen["mesh"], seen["timeout"], seen["cluster"]) == ((2, 2), 120.0, "dgx-a100-80gb")
    assert seen["plan"] is None
    assert seen["options"].zero == 3 and set(seen["batch"]) == {"x", "labels"}
    assert json.loads(capsys.readouterr().out) | {"plan": None} == {
        "ok": ok,
        "loss_error": 0.0,
        "max_error": 0.1,
        "gradient_errors": {"w": 0.1},
        "noise": {"b": {"alone": 1e-16, "planned": 2e-8, "moved": None}},
        "unmeasured": "rank 1 died",
        "steps": 1,
        "later_errors": {},
        "seconds": 1.0,
        "plan": None,
    }


def test_a_dead_worker_is_an_error(
    target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def die(*_: object, **__: object) -> None:
        raise WorkerError("rank 1 died: Traceback ...")

    monkeypatch.setattr(verify_command, "verify_model", die)
    assert main(["verify", target, "--mesh", "2"]) == 2
    assert "rank 1 died" in capsys.readouterr().err


def test_verify_on_processes(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", target, "--mesh", "2,2", "--timeout", "120", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and found["max_error"] <= 1e-5
    assert set(found["gradient_errors"]) == {"first.weight", "first.bias", "second.weight", "second.bias"}


def test_verify_a_plan_from_a_file(
    plan_file: Callable[..., Path], target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = plan_file("pinned.json", "--pin", "first.weight=S(0),S(1)")
    seen: list[Plan] = []

    def verify(*_: object, plan: Plan, **__: object) -> Any:
        seen.append(plan)
        return fake_report(True)

    monkeypatch.setattr(verify_command, "verify_model", verify)
    assert main(["verify", target, "--mesh", "2,2", "--plan", str(path)]) == 0
    assert seen == [Plan.from_json(path.read_text())]
    path.write_text("{}")
    assert main(["verify", target, "--mesh", "2,2", "--plan", str(path)]) == 2
    assert "not a plan" in capsys.readouterr().err


@pytest.mark.slow
def test_python_m_autopar() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "autopar", "diff", "none.json", "none.json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "autopar: cannot read the plan 'none.json': No such file or directory\n"


def test_run_starts_processes_with_arguments(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib, sys\n"
        "rank, size, threads = (os.environ[k] for k in ('RANK', 'WORLD_SIZE', 'OMP_NUM_THREADS'))\n"
        "name = f'{rank} of {size} threads {threads}'\n"
        "(pathlib.Path(sys.argv[1]) / name).write_text(' '.join(sys.argv[2:]))\n"
    )
    out = tmp_path / "out"
    out.mkdir()
    assert main(["run", "--json", "--nproc", "2", str(script), str(out), "--json", "-x"]) == 0
    assert {path.name: path.read_text() for path in out.iterdir()} == {
        "0 of 2 threads 1": "--json -x",
        "1 of 2 threads 1": "--json -x",
    }
    assert json.loads(capfd.readouterr().out)["ok"] is True


def test_run_reports_failure(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit(3)")
    assert main(["run", "--nproc", "2", str(script)]) == 1
    assert main(["run", str(tmp_path / "none.py")]) == 2
    assert main(["run", "--nnodes", "2", str(script)]) == 2
    assert "--rendezvous HOST:PORT" in capfd.readouterr().err


def test_calibrate_only_if_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[int] = []

    def calibrate(processes: int, seconds: float, path: str | None) -> Cluster:
        calls.append(processes)
        found = Cluster.get("local")
        local_file().parent.mkdir(parents=True)
        local_file().write_text(found.to_toml())
        return found

    monkeypatch.setattr(calibrate_command, "calibrate_machine", calibrate)
    assert main(["calibrate", "--nproc", "2", "--if-missing"]) == 0
    assert main(["calibrate", "--nproc", "2", "--if-missing", "--json"]) == 0
    assert calls == [2]
    captured = capsys.readouterr()
    assert "calibrated already" in captured.err
    assert '"name": "local"' in captured.out


def test_doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["doctor", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert findings["torch"]["ok"]
    assert findings["gloo"]["ok"] and findings["calibration"]["value"] == "none"
    local_file().parent.mkdir(parents=True)
    local_file().write_text("not = [toml")
    assert main(["doctor"]) == 1
    assert "!!  calibration" in capsys.readouterr().out


def test_bench_needs_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if Path(p or ".").resolve() != ROOT])
    for name in [name for name in sys.modules if name.split(".")[0] == "benchmarks"]:
        monkeypatch.delitem(sys.modules, name)
    assert main(["bench", "planning"]) == 2
    assert "checkout" in capsys.readouterr().err


@pytest.mark.slow
def test_the_reader_may_close_the_pipe() -> None:
    command = f"{sys.executable} -m autopar.command_line doctor --json | head -c 1"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "{", "")


def test_show_prints_tables_and_renders_a_saved_plan(
    plan_file: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = plan_file("plan.json")
    plan = Plan.from_json(path.read_text())
    for words, expected in (
        ([], str(plan)),
        (["--by", "tree"], str(plan.tree())),
        (["--by", "op"], str(plan.table(by="op"))),
    ):
        assert main(["show", str(path), *words]) == 0
        assert capsys.readouterr().out.strip() == expected.strip()
    page, text = tmp_path / "plan.html", tmp_path / "plan.txt"
    assert main(["show", str(path), "--html", str(page), "--output", str(text)]) == 0
    assert "<html" in page.read_text() and Plan.from_text(text.read_text()) == plan
    assert main(["show", str(tmp_path / "none.json")]) == 2
