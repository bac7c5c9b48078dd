"""Job files: what a cluster would be told is what was asked for."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from autopar.command_line import main
from autopar.errors import OptionsError
from autopar.launchers.job import Job

from .schemas import PYTORCHJOB, TRAINJOB

SCRIPT = ("train.py", "--name", "it's a $HOME; name")
# What SLURM sets and offers, as far as the script uses it: hosts, more than a pipe holds the names of, and srun that
# starts its command on two of them.
SCONTROL = "#!/bin/bash\n[ \"$1 $2\" = 'show hostnames' ] && echo node07 && seq -f 'node%.0f' 10000 30000\n"
SRUN = '#!/bin/bash\nshift\nfor i in 0 1; do SLURM_NODEID=$i "$@"; done\n'
PYTHON = '#!/bin/bash\nprintf "%s\\n" "$@" > "$SEEN.$SLURM_NODEID"\n'


def job(**fields: Any) -> Job:
    return Job(**{"command": SCRIPT, "hosts": 2, "processes": 8, "gpus": 8, **fields})


def pods(**fields: Any) -> Job:
    return job(**{"image": "here/train:1", **fields})


def test_sbatch_starts_a_launcher_on_every_host(tmp_path: Path) -> None:
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN), ("python", PYTHON)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    script = tmp_path / "job.sbatch"
    script.write_text(job(restarts=3, setup=('export FROM_SETUP="$ACTIVATED_BEFORE"',)).write("slurm"))
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    slurm = {"SLURM_JOB_NODELIST": "node[07,12]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "99"}
    environment = {**os.environ, **slurm, "PATH": path, "SEEN": str(tmp_path / "seen")}
    done = subprocess.run(["bash", str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for host in range(2):
        words = (tmp_path / f"seen.{host}").read_text().splitlines()
        assert words[:3] == ["-m", "autopar", "run"]
        given = dict(zip(words[3:-3:2], words[4:-3:2], strict=True))
        assert given["--rendezvous"] == "node07:29400" and given["--rendezvous-id"] == "99"
        assert (given["--nnodes"], given["--nproc"], given["--max-restarts"]) == ("2", "8", "3")
        assert tuple(words[-3:]) == SCRIPT


def test_sbatch_asks_for_what_the_job_needs() -> None:
    text = job(time="1-12:00:00", partition="large", account="team", name="llama-8b").write("slurm")
    asked = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
    wanted = {"--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=8", "--time=1-12:00:00", "--partition=large"}
    assert {*wanted, "--account=team", "--job-name=llama-8b"} <= set(asked)
    first = next(i for i, line in enumerate(text.splitlines()) if line and not line.startswith("#"))
    assert not any(line.startswith("#SBATCH") for line in text.splitlines()[first:]), "SLURM stops reading there"
    assert "gpus" not in job(gpus=0).write("slurm")


@pytest.mark.parametrize(("kind", "schema"), [("trainjob", TRAINJOB), ("pytorchjob", PYTORCHJOB)])
@pytest.mark.parametrize("hosts", [1, 3])
def test_manifests_are_what_the_operators_take(kind: str, schema: dict[str, Any], hosts: int) -> None:
    yaml, jsonschema = pytest.importorskip("yaml"), pytest.importorskip("jsonschema")
    for gpus in (0, 8):
        found = yaml.safe_load(pods(hosts=hosts, gpus=gpus, namespace="ml", restarts=gpus).write(kind))
        jsonschema.Draft202012Validator(schema).validate(found)
        for container, count in containers(found):
            assert container["command"] == ["torchrun"] and container["args"][-3:] == list(SCRIPT)
            limits = container.get("resources", container.get("resourcesPerNode", {})).get("limits", {})
            assert limits.get("nvidia.com/gpu", 0) == gpus
            assert count >= 1
        assert sum(count for _, count in containers(found)) == hosts
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(schema).validate({**found, "spec": {**found["spec"], "nodes": 1}})


@pytest.mark.parametrize(("restarts", "policy", "limit"), [(0, "Never", None), (2, "OnFailure", 7)])
def test_pods_restart_as_often_as_was_said(restarts: int, policy: str, limit: int | None) -> None:
    yaml = pytest.importorskip("yaml")
    spec = yaml.safe_load(pods(hosts=3, restarts=restarts).write("pytorchjob"))["spec"]
    assert {replica["restartPolicy"] for replica in spec["pytorchReplicaSpecs"].values()} == {policy}
    assert spec.get("runPolicy", {}).get("backoffLimit") == limit


@pytest.mark.parametrize("kind", ["trainjob", "pytorchjob"])
@pytest.mark.parametrize("name", ["true", "null", "on", "y"])
def test_a_name_is_text(kind: str, name: str) -> None:
    yaml = pytest.importorskip("yaml")
    assert yaml.safe_load(pods(name=name).write(kind))["metadata"]["name"] == name


@pytest.mark.parametrize(
    ("system", "field", "says"),
    [
        ("trainjob", {"time": "12:00:00"}, "--time is an option for SLURM; a TrainJob does not take it"),
        ("pytorchjob", {"setup": ("module load cuda",)}, "--setup is an option for SLURM"),
        ("trainjob", {"shared_memory": "64Gi"}, "--shared-memory is an option for a PyTorchJob"),
        ("pytorchjob", {"runtime": "mine"}, "--runtime is an option for a TrainJob"),
        ("slurm", {"namespace": "ml"}, "--namespace is an option for a TrainJob or a PyTorchJob; SLURM does"),
    ],
)
def test_options_of_another_system_are_refused(system: str, field: dict[str, Any], says: str) -> None:
    made = job(**field) if system == "slurm" else pods(**field)
    with pytest.raises(OptionsError, match=says):
        made.write(system)


def containers(manifest: dict[str, Any]) -> list[tuple[dict[str, Any], int]]:
    """Each container, and of how many pods."""
    spec = manifest["spec"]
    if "trainer" in spec:
        return [(spec["trainer"], spec["trainer"]["numNodes"])]
    replicas = spec["pytorchReplicaSpecs"].values()
    return [(r["template"]["spec"]["containers"][0], r["replicas"]) for r in replicas]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"mesh": (2, 4)}, "has 8 devices, and 2 hosts with 8 processes have 16"),
        ({"processes": 6, "gpus": 6, "mesh": (3, 4)}, "end with an axis of 6"),
        ({"name": "My Job"}, "small letters"),
        ({"gpus": 4}, "a process takes one GPU"),
        ({"time": "soon"}, "HH:MM:SS"),
        ({"shared_memory": "much"}, "16Gi"),
        ({"port": 99999}, "1 to 65535"),
    ],
)
def test_what_no_cluster_can_start_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionsError, match=says):
        job(**fields)


@pytest.mark.parametrize("mesh", [(2, 8), (16,), (4, 4), (2, 2, 4)])
def test_meshes_whose_innermost_axis_is_inside_a_host_or_made_of_hosts(mesh: tuple[int, ...]) -> None:
    assert job(mesh=mesh).mesh == mesh


def test_the_command_prints_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "slurm", "--hosts", "4", "--nproc", "2", "--gpus", "0", "-m", "my.train", "--lr", "1"]) == 0
    assert "--nproc 2" in (text := capsys.readouterr().out) and "-m my.train --lr 1" in text
    assert main(["launch", "kubernetes", "train.py"]) == 2
    assert "--image" in capsys.readouterr().err
    assert main(["launch", "slurm", "--kind", "trainjob", "train.py"]) == 2
    assert "--kind trainjob is an option for Kubernetes" in capsys.readouterr().err


@pytest.mark.parametrize("field", ["partition", "account"])
def test_words_of_sbatch_end_no_line(field: str) -> None:
    with pytest.raises(OptionsError, match=f"--{field} "):
        job(**{field: "team\nrm -rf ~"})
