"""Commands whose files are URLs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

import autopar
from autopar.arguments import PLAN_VARIABLE
from autopar.calibration.machine import write_cluster
from autopar.cli.arguments import load_target
from autopar.cli.commands import calibrate as calibrate_command
from autopar.cluster.description import Cluster
from autopar.command_line import main
from autopar.files import read_text, write_text
from autopar.plans.plan import Plan
from tests.helpers.http_files import HttpFiles, http_files

from .test_command_line import MODEL_FILE


@pytest.fixture
def memory() -> Iterator[str]:
    fsspec.filesystem("memory").store.clear()
    yield "memory://team"
    fsspec.filesystem("memory").store.clear()


@pytest.fixture
def served() -> Iterator[HttpFiles]:
    pytest.importorskip("aiohttp")
    with http_files() as files:
        yield files


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path / "cache"))
    (tmp_path / "tiny_model.py").write_text(MODEL_FILE)
    monkeypatch.delitem(sys.modules, "tiny_model", raising=False)
    return f"{tmp_path / 'tiny_model.py'}:make"


def test_a_plan_goes_from_command_to_command(target: str, memory: str, capsys: pytest.CaptureFixture[str]) -> None:
    cluster, first, second = f"{memory}/pod.toml", f"{memory}/plan.json", f"{memory}/plan.txt"
    write_text(cluster, Cluster.get("dgx-a100-80gb").to_toml())
    plan = ["plan", target, "--mesh", "2,2", "--cluster", cluster]
    assert main([*plan, "--output", first, "--html", f"{memory}/plan.html"]) == 0
    assert read_text(first).startswith("{") and "<html" in read_text(f"{memory}/plan.html")
    assert main([*plan, "--output", second, "--pin", "first.weight=S(0),R"]) == 0
    assert read_text(second).startswith("autopar plan")
    capsys.readouterr()
    assert main(["diff", first, first]) == 0
    assert main(["diff", first, second]) == 1
    assert "first.weight" in capsys.readouterr().out
    assert main(["explain", first, "first.weight", "--timeline", f"{memory}/step.json"]) == 0
    assert json.loads(read_text(f"{memory}/step.json"))["traceEvents"]
    record = f"{memory}/steps.jsonl"
    write_text(record, "".join(f'{{"step": {step}, "seconds": 0.5}}\n' for step in range(3)))
    assert main(["show", second, "--html", f"{memory}/run.html", "--record", record, "--output", first]) == 0
    assert Plan.load(first) == Plan.load(second)


def test_plans_and_clusters_of_a_server(target: str, served: HttpFiles, capsys: pytest.CaptureFixture[str]) -> None:
    served.files["/pod.toml"] = Cluster.get("dgx-h100").to_toml().encode()
    served.writable = True
    url = f"{served.url}/plan.json"
    words = ["plan", target, "--mesh", "2", "--cluster", f"{served.url}/pod.toml", "--output", url]
    assert main(words) == 0
    assert main(["show", url, "--json"]) == 0
    served.statuses["/plan.json"] = 403
    capsys.readouterr()
    assert main(["explain", url, "first.weight"]) == 2
    assert f"cannot read the plan '{url}': no permission (403" in capsys.readouterr().err
    assert main(["plan", target, "--mesh", "2", "--cluster", f"{served.url}/none.toml"]) == 2
    assert "cannot read the cluster" in capsys.readouterr().err
    served.files["/noise.json"] = b"{}"
    assert main(["diff", f"{served.url}/noise.json", url]) == 2
    assert "not a plan" in capsys.readouterr().err


def test_a_calibration_is_written_once(
    memory: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[str] = []

    def calibrate(_processes: int, _seconds: float, path: str) -> Cluster:
        made.append(path)
        cluster = Cluster.get("dgx-h100")
        write_cluster(path, cluster)
        return cluster

    monkeypatch.setattr(calibrate_command, "calibrate_machine", calibrate)
    url = f"{memory}/clusters/here.toml"
    for _ in range(2):
        assert main(["calibrate", "--if-missing", "--output", url]) == 0
    assert made == [url] and Cluster.get(url) == Cluster.get("dgx-h100")
    assert f"calibrated already, in {url}" in capsys.readouterr().err


def test_a_plan_by_its_url_is_what_runs(target: str, memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"{memory}/plan.json"
    assert main(["plan", target, "--mesh", "1", "--pin", "first.weight=R", "--output", url]) == 0
    model, batch = load_target(target)
    parallel = autopar.parallelize(model, (1,), batch, plan=url)
    assert parallel.plan == Plan.load(url)
    monkeypatch.setenv(PLAN_VARIABLE, url)
    assert autopar.parallelize(load_target(target)[0], (1,), batch).plan == Plan.load(url)
    monkeypatch.setenv(PLAN_VARIABLE, f"{memory}/none.json")
    with pytest.raises(autopar.OptionsError, match="there is no such file"):
        autopar.parallelize(load_target(target)[0], (1,), batch)


def test_run_tells_a_script_which_plan(target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.json"
    assert main(["plan", target, "--mesh", "1", "--output", str(plan)]) == 0
    script = tmp_path / "script.py"
    said = tmp_path / "said"
    script.write_text(f"import os, pathlib\npathlib.Path({str(said)!r}).write_text(os.environ[{PLAN_VARIABLE!r}])")
    assert main(["run", "--nproc", "1", "--plan", f"file://{plan}", str(script)]) == 0
    assert said.read_text() == f"file://{plan}"
    capsys.readouterr()
    assert main(["run", "--nproc", "1", "--plan", "s4://b/plan.json", str(script)]) == 2
    assert "no protocol is called s4://" in capsys.readouterr().err
