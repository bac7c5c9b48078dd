"""The tests on the versions of torch that autopar supports, from PyPI's default builds (CUDA builds, on Linux). With
the newest torch come the newest releases of whatever else requirements-newest.txt names, transformers above all.

    nox                      a smoke test on the oldest and the newest
    nox -s tests             the quick suite on each version; nox -s 'tests(2.15.0)' on one

An environment for each version is kept outside of the checkout, in $AUTOPAR_NOX or ~/.cache/autopar/nox, and installed
once (3 GB of download, about 6 GB of disk). A session uses it alone. If it cannot be installed because the package
index cannot be reached at all, or because a constraint in this machine's own configuration of pip forbids that torch,
the session is skipped and says so; any other failure to install fails it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import nox

ROOT = Path(__file__).parent
CACHE = Path(os.environ.get("AUTOPAR_NOX", "~/.cache/autopar/nox")).expanduser()
NEWEST = dict(re.findall(r"^([\w-]+)==(.+)$", (ROOT / "requirements-newest.txt").read_text(), re.M))
VERSIONS = ("2.11.0", "2.13.0", "2.14.1", NEWEST["torch"])
JOBS = os.environ.get("JOBS", "2")
# Seconds: one command of pip, the question whether the index answers, a smoke test, the suite.
INSTALLING, ASKING, SMOKING, TESTING = 1500, 60, 900, 5400

# Trace, lower, plan, run on processes, verify, generate, the command line, versions, and what differed between versions
# of torch and of transformers.
SMOKE = (
    "tests/test_supported.py",
    "tests/trace/test_tracer.py",
    "tests/trace/test_lengths.py",
    "tests/compiler/test_traces.py",
    "tests/passes/test_lower.py",
    "tests/passes/test_probe.py::test_a_trial_has_an_end",
    "tests/runtime/test_launch.py",
    "tests/runtime/test_executor.py",
    "tests/runtime/generation/test_generate.py",
    "tests/test_inference.py",
    "tests/torch_internals/test_hugging_face.py",
    "tests/verification/test_verify.py",
    "tests/cli/test_command_line.py",
)

# Not those that a machine has only seconds for: they say nothing about a version, and fail on a busy machine.
NOT_SMOKE = "not (a_rank_that_fails or fresh_process or hang)"

nox.options.sessions = ["smoke"]
nox.options.error_on_missing_interpreters = True


@nox.session(venv_backend="none")
@nox.parametrize("torch", VERSIONS, ids=VERSIONS)
def tests(session: nox.Session, torch: str) -> None:
    """The quick suite."""
    with environment(session, torch) as python:
        run_pytest(session, python, session.posargs, TESTING)


@nox.session(venv_backend="none")
@nox.parametrize("torch", (VERSIONS[0], VERSIONS[-1]), ids=(VERSIONS[0], VERSIONS[-1]))
def smoke(session: nox.Session, torch: str) -> None:
    """Some of each thing that users do."""
    with environment(session, torch) as python:
        run_pytest(session, python, ["-k", NOT_SMOKE, *SMOKE], SMOKING)


def run_pytest(session: nox.Session, python: Path, what: Sequence[str], seconds: int) -> None:
    """Runs these tests; fails if they take longer."""
    command = [str(python), "-m", "pytest", "-q", "-n", JOBS, "-p", "no:cacheprovider", *what]
    said = run(command, seconds, capture=False)
    if said is not None:
        session.error(f"{' '.join(command)}: {said}")


@contextmanager
def environment(session: nox.Session, torch: str) -> Iterator[Path]:
    """The interpreter of an environment with that torch and this checkout, which no other session uses meanwhile."""
    folder = CACHE / f"torch-{torch}-python{sys.version_info.major}.{sys.version_info.minor}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        python = folder / "bin" / "python"
        for command in commands(folder, torch):
            session.log(" ".join(command))
            said = run(command, INSTALLING)
            if said is not None and (why := not_for_us(said)):
                session.skip(f"NOT RUN on torch {torch}: {why}")
            if said is not None:
                session.error(f"torch {torch} could not be installed: {' '.join(command)}: {said}")
        stamp(folder).write_text(wanted(torch))
        yield python


def commands(folder: Path, torch: str) -> list[list[str]]:
    """What to run so that the environment is as wanted; only the checkout's link if it was before."""
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--timeout", "60", "--retries", "2"]
    checkout = ["--no-build-isolation", "--editable", str(ROOT)]
    if stamp(folder).exists() and stamp(folder).read_text() == wanted(torch):
        return [[*pip, "--no-deps", *checkout]]
    folder.mkdir(exist_ok=True)
    kept = folder / "constraints.txt"
    kept.write_text("\n".join([*pins(torch), f"torch==={torch}"]) + "\n")
    return [
        [sys.executable, "-m", "venv", str(folder)],
        [*pip, "setuptools>=77", f"torch==={torch}"],
        [*pip, "--constraint", str(kept), *checkout[:-1], f"{ROOT}[dev]"],
    ]


def pins(torch: str) -> list[str]:
    """The versions of everything else: the pinned ones, with the newest torch the newest."""
    newest = {name: version for name, version in NEWEST.items() if torch == NEWEST["torch"]}
    # torch says which setuptools it takes: 2.11 none of the newest.
    apart = {"torch", "setuptools", *newest}
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    newer = [f"{name}=={version}" for name, version in newest.items() if name != "torch"]
    return [*(line for line in pinned if line.partition("==")[0] not in apart), *newer]


def wanted(torch: str) -> str:
    """Changes when an environment has to be installed again."""
    return hashlib.sha256(f"{torch} {pins(torch)} {(ROOT / 'pyproject.toml').read_text()}".encode()).hexdigest()


def stamp(folder: Path) -> Path:
    """The file that says how an environment was installed."""
    return folder / ".installed"


def not_for_us(said: str) -> str:
    """Why an installation failed, if that is this machine's doing; else nothing."""
    if capped := re.search(r"The user requested \(constraint\) (torch\S*)", said):
        return f"the configuration of pip on this machine admits only {capped[1]} (`pip config list`, PIP_CONSTRAINT)"
    return "" if index_answers() else "the package index cannot be reached from this machine"


def index_answers() -> bool:
    """Whether the package index can be reached at all."""
    asked = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--no-cache-dir",
        "--timeout",
        "20",
        "--retries",
        "1",
    ]
    folder = CACHE / "asked"
    return run([*asked, "--dest", str(folder), "pip"], ASKING) is None


def run(command: Sequence[str], seconds: int, capture: bool = True) -> str | None:
    """Runs a command; None if it succeeded, else what went wrong."""
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=capture, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"not done after {seconds} s"
    said = f"{(done.stdout or '')[-2000:]}\n{(done.stderr or '')[-2000:]}"
    return f"exit code {done.returncode}\n{said}" if done.returncode else None
