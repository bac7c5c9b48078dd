"""A job on a cluster, and its file for the system that starts it."""

from __future__ import annotations

import itertools
import json
import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined

from autopar.errors import OptionsError

# The systems that jobs are written for, and the template of each.
TEMPLATES: Mapping[str, str] = {
    "slurm": "job.sbatch.jinja",
    "trainjob": "trainjob.yaml.jinja",
    "pytorchjob": "pytorchjob.yaml.jinja",
}
# What people call them, and the fields of a job that each alone takes.
_CALLED: Mapping[str, str] = {"slurm": "SLURM", "trainjob": "a TrainJob", "pytorchjob": "a PyTorchJob"}
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "slurm": ("time", "partition", "account", "port", "setup"),
    "trainjob": ("image", "namespace", "runtime"),
    "pytorchjob": ("image", "namespace", "shared_memory"),
}
# What Kubernetes takes as the name of an object that names pods and a service too (RFC 1035, with room for suffixes).
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?")
_TIME = re.compile(r"(\d+-)?\d+(:\d{2}){0,2}")
_WORD = re.compile(r"[\w.,@+-]+")
_SIZE = re.compile(r"\d+(Ki|Mi|Gi|Ti|K|M|G|T)?")


@dataclass(frozen=True)
class Job:
    """A training script on ``hosts`` with ``processes`` on each. The launcher numbers the ranks of a host one after the
    other, so the innermost axis of the mesh is inside a host if its size divides ``processes``. None of a field is the
    template's value.

    Attributes:
        command: the script and its arguments; with ``module`` the first is the name of a module.
        gpus: of a host; 0 for processes of the CPU.
        mesh: the shape that the script uses, outermost first, if it is to be checked here.
        port: at which hosts meet.
        setup: lines of the batch script before the job starts: ``module load``, ``source .venv/bin/activate``.
        shared_memory: size of ``/dev/shm`` of a pod, in Kubernetes' notation. Data loaders need more than the 64 MB
            that pods have by default.

    Raises :class:`OptionsError` for what no cluster can start, and for a mesh that does not fit.
    """

    command: tuple[str, ...]
    hosts: int
    processes: int
    gpus: int
    module: bool = False
    name: str = "autopar"
    mesh: tuple[int, ...] | None = None
    port: int | None = None
    restarts: int = 0
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    setup: tuple[str, ...] = ()
    image: str | None = None
    namespace: str | None = None
    runtime: str | None = None
    shared_memory: str | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise OptionsError(f"--name {self.name}: write small letters, digits and dashes, beginning with a letter")
        if self.time is not None and not _TIME.fullmatch(self.time):
            raise OptionsError(f"--time {self.time}: write minutes, HH:MM:SS or DAYS-HH:MM:SS, as sbatch has it")
        for option, word in (("--partition", self.partition), ("--account", self.account)):
            if word is not None and not _WORD.fullmatch(word):
                raise OptionsError(f"{option} {word!r}: write letters, digits and . , @ + - alone")
        if self.port is not None and not 0 < self.port < 1 << 16:
            raise OptionsError(f"--port {self.port}: ports are 1 to 65535")
        if self.shared_memory is not None and not _SIZE.fullmatch(self.shared_memory):
            raise OptionsError(f"--shared-memory {self.shared_memory}: write a size such as 16Gi")
        if self.gpus not in (0, self.processes):
            raise OptionsError(
                f"--gpus {self.gpus} with --nproc {self.processes}: a process takes one GPU; give the same number, or "
                "--gpus 0 for processes of the CPU"
            )
        if self.mesh is not None:
            self._check_mesh(self.mesh)

    def _check_mesh(self, mesh: tuple[int, ...]) -> None:
        ranks = self.hosts * self.processes
        if math.prod(mesh) != ranks:
            raise OptionsError(
                f"--mesh {','.join(map(str, mesh))} has {math.prod(mesh)} devices, and {self.hosts} hosts with "
                f"{self.processes} processes have {ranks}"
            )
        inner = mesh[-1]
        if self.processes % inner and inner % self.processes:
            fits = max(n for n in range(1, self.processes + 1) if ranks % n == 0 and self.processes % n == 0)
            raise OptionsError(
                f"--mesh {','.join(map(str, mesh))}: the innermost axis of {inner} is neither inside hosts of "
                f"{self.processes} processes nor made of whole hosts; end with an axis of {fits}"
            )

    @property
    def words(self) -> list[str]:
        """The command that a launcher starts on each process."""
        return [*(["-m"] if self.module else []), *self.command]

    def write(self, system: str) -> str:
        """The job's file for one of :data:`TEMPLATES`. Raises :class:`OptionsError` if something is missing for it, or
        given that only another takes."""
        for name in dict.fromkeys(itertools.chain(*_FIELDS.values())):
            if getattr(self, name) and name not in _FIELDS[system]:
                takes = " or ".join(_CALLED[other] for other, fields in _FIELDS.items() if name in fields)
                raise OptionsError(
                    f"--{name.replace('_', '-')} is an option for {takes}; {_CALLED[system]} does not take it: leave "
                    "it out"
                )
        if system != "slurm" and self.image is None:
            raise OptionsError("--image IMAGE is needed: the container with your script, torch and autopar")
        return _environment().get_template(TEMPLATES[system]).render(job=self)


@cache
def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader(__package__ or ""),
        autoescape=False,  # Not HTML; the filters below quote.
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    # A JSON string is a YAML string.
    made.filters |= {"shell": shlex.join, "word": lambda text: shlex.quote(str(text)), "yaml": json.dumps}
    return made
