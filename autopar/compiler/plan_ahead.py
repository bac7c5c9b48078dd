"""Makes plans for other numbers of devices beside training, so that a restart on them finds its plan in the cache.

A process of its own makes them, at the lowest priority, from what the model was planned from: it needs neither the
model nor the user's code. :data:`COMMAND` starts that process.
"""

from __future__ import annotations

import itertools
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from autopar.content.cache_folder import caching_enabled
from autopar.errors import AutoparError, OptionsError
from autopar.planner.prepare import describe
from autopar.planner.request import PlanRequest
from autopar.planner.timings import Timings
from autopar.processes import die_with_parent
from autopar.runtime.comm.exchange import Exchange
from autopar.runtime.module.parallel_module import ParallelModule

from .calls import Compiler
from .plan_cache import cached_plan

# A number of devices, or the shape of a mesh.
Mesh = int | tuple[int, ...]
# Not ``python -m``, which warns that importing autopar has imported this module before.
COMMAND = [sys.executable, "-c", "from autopar.compiler.plan_ahead import main; main()"]
# The processes of this one, so that none is dropped while it runs.
_STARTED: list[subprocess.Popen[bytes]] = []


class PlansAhead:
    """Plans being made; ``process`` is None where none are: on all but the first rank of a host."""

    def __init__(self, process: subprocess.Popen[bytes] | None) -> None:
        self._process = process

    @property
    def done(self) -> bool:
        """Whether no plan is being made any more."""
        return self._process is None or self._process.poll() is not None

    def wait(self, seconds: float | None = None) -> bool:
        """Waits until all are made, at most so many seconds; whether they are."""
        if self._process is not None:
            try:
                self._process.wait(seconds)
            except subprocess.TimeoutExpired:
                return False
        return True


def plan_ahead(model: ParallelModule, meshes: Sequence[Mesh] | Mapping[Mesh, int]) -> PlansAhead:
    """Plans ``model`` for other ``meshes`` (numbers of devices, or shapes), with the same options and cluster and the
    same global batch (or, of a mapping, a global batch of that size), in a process beside training that the first rank
    of each host starts. A later run that is planned on such a mesh, as after a restart with fewer hosts, takes the plan
    from the cache. One that is cached already costs next to nothing. Call it on every rank once the model is planned.

    Raises:
        OptionsError: there is no cache (``AUTOPAR_CACHE=off``), a mesh or size is none, a mesh has another number of
            axes than the named ones of the model's, or the model was traced for one size of batch.
        AutoparError: the model was not planned yet.
    """
    wanted = _wanted(meshes)
    if not caching_enabled():
        raise OptionsError("plans are made ahead for the cache, which AUTOPAR_CACHE=off turns off")
    requests = requests_for(model, wanted)
    if not requests or not _is_first_of_host(model):
        return PlansAhead(None)
    through = [sys.executable, "-I", "-S", str(die_with_parent.__file__), str(os.getpid())]
    process = subprocess.Popen([*through, *COMMAND], stdin=subprocess.PIPE, start_new_session=True)
    _STARTED.append(process)
    threading.Thread(target=_send, args=(pickle.dumps(requests), process), name="autopar plans", daemon=True).start()
    return PlansAhead(process)


def _wanted(meshes: object) -> list[tuple[tuple[int, ...], int | None]]:
    """Shapes of meshes, and sizes of the global batch (None: the same)."""
    batches = [*meshes.values()] if isinstance(meshes, Mapping) else []
    listed = [*meshes] if isinstance(meshes, Iterable) else [None]
    shapes = [tuple(mesh) if isinstance(mesh, list | tuple) else (mesh,) for mesh in listed]
    if not all(shapes) or not all(map(_is_size, itertools.chain(*shapes, batches))):
        raise OptionsError(
            f"meshes={meshes!r} are no meshes; give a list of numbers of devices or shapes such as [4, (2, 4)], or a "
            "dict from those to sizes of the global batch"
        )
    return list(zip(shapes, batches or itertools.repeat(None), strict=False))


def _is_first_of_host(model: ParallelModule) -> bool:
    """Whether this process is the first of its host, as the launcher says, or else by the hosts' names, which all ranks
    exchange."""
    if "LOCAL_RANK" in os.environ:
        return os.environ["LOCAL_RANK"] == "0"
    parts = model.autopar_parts
    with parts.call("plan_ahead()"):
        everyone = Exchange(parts.weights.groups)
        hosts = everyone.all_objects(socket.gethostname())
    return hosts.index(socket.gethostname()) == everyone.index


def _send(text: bytes, process: subprocess.Popen[bytes]) -> None:
    """Sends the requests while the training goes on: a pipe holds little of them until the other process reads. If
    it has ended, no plans are made, and training goes on."""
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin:
        process.stdin.write(text)


def _is_size(number: object) -> bool:
    return type(number) is int and number > 0


def requests_for(model: ParallelModule, wanted: Sequence[tuple[tuple[int, ...], int | None]]) -> list[PlanRequest]:
    """What plans for these meshes and sizes of the global batch (None: the same) are made from."""
    compiler = model.autopar_parts.compile
    request = compiler.planned_from if isinstance(compiler, Compiler) else None
    if request is None:
        raise AutoparError(
            "the model was not planned here yet: call plan_ahead after the first step, and not with parallelize(plan=)"
        )
    return [_of_size(_on_mesh(request, mesh), batch, model) for mesh, batch in wanted]


def _on_mesh(request: PlanRequest, mesh: tuple[int, ...]) -> PlanRequest:
    names = request.axis_names
    if names and len(names) != len(mesh):
        raise OptionsError(
            f"the model's mesh has the axes {', '.join(names)}, but the mesh {mesh} to plan for has {len(mesh)}: give "
            f"shapes of {len(names)} sizes, such as {(*mesh, *[1] * len(names))[: len(names)]}"
        )
    return replace(request, mesh=mesh)


def _of_size(request: PlanRequest, batch: int | None, model: ParallelModule) -> PlanRequest:
    """The request that a trace with another global batch would lead to."""
    if batch in (None, request.batch):
        return request
    if not request.graph.symbols:
        raise OptionsError(
            f"a plan for a global batch of {batch} needs a trace of its own: this model was traced for a batch of "
            f"{request.batch} alone, as its code depends on that size. Give numbers of devices without sizes"
        )
    graph = replace(request.graph, symbols=tuple((name, batch) for name, _ in request.graph.symbols))
    inputs = {node.target: node.type.shape for node in graph.at().placeholders("input")}
    return replace(request, graph=graph, batch=batch, model=describe(model.module, inputs))


def make(requests: Sequence[PlanRequest]) -> list[str]:
    """Makes the plans that are not cached. Returns why some cannot be made."""
    failures = []
    for request in requests:
        try:
            cached_plan(request, Timings())
        except Exception as error:  # Training goes on: a line says what is missing, and not a trace in its midst.
            kind = "" if isinstance(error, AutoparError) else f"{type(error).__name__}: "
            failures.append(f"mesh {request.mesh}: {kind}{str(error).partition(chr(10))[0]}")
    return failures


def main() -> None:
    os.nice(19)
    for failure in make(pickle.load(sys.stdin.buffer)):
        print(f"autopar: no plan is made ahead for {failure}", file=sys.stderr)
