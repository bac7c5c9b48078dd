"""What each command does: takes parsed arguments, prints through :class:`Output`, returns the exit status.

Every function here is a thin shell over the library call of the same name.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.api import plan as plan_model
from autopar.calibration.job import calibrate_job, in_job
from autopar.calibration.machine import calibrate as calibrate_machine
from autopar.cluster.description import Cluster, local_file
from autopar.errors import OptionsError
from autopar.options import CHOICES, Options
from autopar.plans.plan import Plan
from autopar.plans.timeline import step_timeline
from autopar.verification.verify import verify as verify_model

from .arguments import load_target, parse_pins
from .doctor import examine
from .layouts import OF_LAYOUTS, plan_by_layouts
from .output import Output

if TYPE_CHECKING:
    from torch import nn

OK, FAILED, USAGE = 0, 1, 2
# Fields of Options that a command line may leave out.
GIVEN = (
    *("memory_limit", "precision", "zero", "recompute", "offload", "microbatches", "stages", "schedule"),
    *("time_limit", "gap", "seed", "optimizer"),
)
TABLES = ("module", "kind", "op", "rule", "phase", "collective", "stage")
BENCHMARKS = ("planning", "step_time")

Command = Callable[[argparse.Namespace, Output], int]


def options_from(arguments: argparse.Namespace) -> Options:
    """The :class:`Options` a command line asks for; what it leaves out keeps its default."""
    given = {name: getattr(arguments, name) for name in GIVEN if getattr(arguments, name) is not None}
    return Options(**given, pins=parse_pins(arguments.pin), mesh_search=arguments.mesh_search)


def _read_plan(path: str) -> Plan:
    """A plan in either of its forms, whatever the file is called."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        return Plan.from_text(text) if text.startswith("autopar plan") else Plan.from_json(text)
    except OSError as error:
        raise OptionsError(f"cannot read the plan {path!r}: {error.strerror}") from error
    except (OptionsError, UnicodeDecodeError) as error:
        raise OptionsError(f"{path!r}: {error}; `autopar plan --output` writes one") from error


def _make_plan(arguments: argparse.Namespace, output: Output) -> Plan:
    options = options_from(arguments)
    model, batch = load_target(arguments.target, meta=arguments.meta)
    with output.progress(f"planning {_describe(model)} on {arguments.mesh}"):
        return plan_model(model, arguments.mesh, batch, cluster=arguments.cluster, options=options)


def _describe(model: nn.Module) -> str:
    count = sum(parameter.numel() for parameter in model.parameters())
    return f"{type(model).__name__} ({count / 1e6:,.1f}M parameters)"


def plan(arguments: argparse.Namespace, output: Output) -> int:
    """Plans a model; no processes and no devices needed."""
    if arguments.devices is not None:
        return plan_by_layouts(arguments, output)
    for name in OF_LAYOUTS:
        if getattr(arguments, name) not in (None, []):
            raise OptionsError(f"--{name} is for plans with --devices; with --mesh the batch is the model's own")
    for name in ("precision", "recompute"):
        if getattr(arguments, name) not in (None, *CHOICES[name]):
            raise OptionsError(
                f"--{name} {getattr(arguments, name)} is for layouts, with --devices; with --mesh one of "
                f"{', '.join(map(str, CHOICES[name]))}"
            )
    made = _make_plan(arguments, output)
    _write_files(made, arguments)
    output.result(_view(made, arguments.show), made)
    return OK


def show(arguments: argparse.Namespace, output: Output) -> int:
    """Prints a saved plan, its tree or a table of it, or writes it as a page or in its other form."""
    found = _read_plan(arguments.plan)
    _write_files(found, arguments)
    output.result(_view(found, arguments.by), found)
    return OK


def _write_files(made: Plan, arguments: argparse.Namespace) -> None:
    """What ``--output`` and ``--html`` ask for."""
    if arguments.output:
        path = Path(arguments.output)
        _write(path, made.to_json() if path.suffix == ".json" else made.to_text())
    if arguments.html:
        made.to_html(arguments.html)


def _view(made: Plan, what: str) -> object:
    """The plan as a whole, as a tree, or a table of it."""
    if what in TABLES:
        return made.table(by=what)
    return made.tree() if what == "tree" else made


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OptionsError(f"cannot write {str(path)!r}: {error.strerror}") from error


def explain(arguments: argparse.Namespace, output: Output) -> int:
    """Why the plan places a tensor or module as it does; and when each pipeline rank does what."""
    if ":" not in arguments.target or Path(arguments.target).is_file():
        found = _read_plan(arguments.target)
    elif arguments.mesh is None:
        raise OptionsError("to plan the model first, give --mesh (or name a plan written by `autopar plan --output`)")
    else:
        found = _make_plan(arguments, output)
    if arguments.timeline:
        _write(Path(arguments.timeline), json.dumps(step_timeline(found).to_chrome_trace(), allow_nan=False) + "\n")
    if arguments.name is None:
        if not arguments.timeline:
            raise OptionsError("name a parameter or module to explain, or a file for --timeline")
        output.result(f"timeline written to {arguments.timeline}", {"timeline": arguments.timeline})
        return OK
    reason = found.why(arguments.name)
    output.result(reason, {"name": arguments.name, "why": reason, "text": str(reason)})
    return OK


def diff(arguments: argparse.Namespace, output: Output) -> int:
    """What differs between two plans; 1 if anything does, as diff(1)."""
    first, second = _read_plan(arguments.first), _read_plan(arguments.second)
    found = first.diff(second)
    output.result(found, {"same": found.same, "diff": found, "text": str(found)})
    return OK if found.same else FAILED


def verify(arguments: argparse.Namespace, output: Output) -> int:
    """Compares loss and every gradient on local processes with one process."""
    options = options_from(arguments)
    chosen = _read_plan(arguments.plan) if arguments.plan else None
    model, batch = load_target(arguments.target)
    with output.progress(f"verifying {_describe(model)} on {arguments.mesh}"):
        report = verify_model(
            model,
            arguments.mesh,
            batch,
            options=options,
            cluster=arguments.cluster,
            plan=chosen,
            steps=arguments.steps,
            timeout=arguments.timeout,
        )
    data = {
        "ok": report.ok,
        "loss_error": report.loss_error,
        "max_error": report.max_error,
        "gradient_errors": report.gradient_errors,
        "steps": report.steps,
        "later_errors": report.later_errors,
        "seconds": report.seconds,
        "plan": report.plan,
    }
    output.result(report, data)
    return OK if report.ok else FAILED


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Starts a training script on several processes through torch's elastic launcher."""
    if not arguments.module and not Path(arguments.script).is_file():
        raise OptionsError(f"there is no script {arguments.script!r} in {os.getcwd()}")
    command = [sys.executable, "-m", "torch.distributed.run", *_launcher_options(arguments)]
    command += [*(["--module"] if arguments.module else []), arguments.script, *arguments.arguments]
    start = time.perf_counter()
    status = subprocess.run(command, env=_launch_environment(), check=False).returncode
    if output.json:
        seconds = time.perf_counter() - start
        output.result("", {"ok": status == 0, "returncode": status, "seconds": seconds, "command": command})
    return OK if status == 0 else FAILED


def _launcher_options(arguments: argparse.Namespace) -> list[str]:
    """Options of ``torch.distributed.run``; several hosts meet at ``--rendezvous``."""
    options = [f"--nproc-per-node={arguments.nproc}", f"--max-restarts={arguments.max_restarts}"]
    if arguments.rendezvous is None:
        if arguments.nnodes != "1":
            raise OptionsError(f"--nnodes {arguments.nnodes} needs --rendezvous HOST:PORT, the same on every host")
        return [*options, "--standalone"]
    return [
        *options,
        f"--nnodes={arguments.nnodes}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={arguments.rendezvous}",
        f"--rdzv-id={arguments.rendezvous_id}",
    ]


def _launch_environment() -> dict[str, str]:
    """One thread per process unless asked otherwise, and a store of its own for every restart: gloo
    reconnects badly on the launcher's."""
    defaults = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return {**defaults, **os.environ}


def calibrate(arguments: argparse.Namespace, output: Output) -> int:
    """Measures this machine as the cluster ``local``, or, started by torchrun, the devices of all its processes."""
    if in_job():
        return _calibrate_job(arguments, output)
    target = Path(arguments.output or local_file())
    if arguments.if_missing and target.is_file():
        output.note(f"calibrated already, in {target}; leave out --if-missing to measure again")
        found = Cluster.get(arguments.output or "local")
    else:
        with output.progress(f"measuring compute and collectives on {arguments.nproc} processes"):
            found = calibrate_machine(arguments.nproc, arguments.seconds, arguments.output)
    output.result(found, found)
    return OK


def _calibrate_job(arguments: argparse.Namespace, output: Output) -> int:
    if arguments.if_missing:
        raise OptionsError("--if-missing is for one machine: hosts of a job need not have the same files")
    found = calibrate_job(arguments.output, arguments.seconds)
    if os.environ["RANK"] == "0":
        output.result(f"{found}\nwritten to {arguments.output or local_file(found.name)}", found)
    return OK


def doctor(arguments: argparse.Namespace, output: Output) -> int:
    """Whether this machine has what autopar needs."""
    report = examine()
    output.result(report, report.data())
    return OK if report.ok else FAILED


def bench(arguments: argparse.Namespace, output: Output) -> int:
    """Runs the benchmarks of a checkout: ``python -m benchmarks.<name>``."""
    sys.path.insert(0, os.getcwd())
    names = BENCHMARKS if arguments.name == "all" else (arguments.name,)
    if importlib.util.find_spec("benchmarks") is None:
        raise OptionsError("the benchmarks are not part of the installed package; run this in a checkout of autopar")
    statuses = [_run_benchmark(name, arguments.arguments, output) for name in names]
    return OK if not any(statuses) else FAILED


def _run_benchmark(name: str, arguments: list[str], output: Output) -> int:
    extra: list[Any] = ["--json"] if output.json else []
    return subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *extra, *arguments], check=False).returncode
