"""What a pipeline is searched for: one division of the devices into stages, and of the batch into microbatches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from autopar.cluster.description import Cluster
from autopar.errors import OptionsError
from autopar.ir.graph import Graph
from autopar.ir.microbatching import Repeats
from autopar.options import SOLVED
from autopar.planner.mesh_solution import MeshSolution
from autopar.planner.shared_work import SharedWork
from autopar.schedule.named import SCHEDULES

from .stage_meshes import StageLayout

# Chunks of a stage that are tried. Chosen: each more multiplies messages.
MOST_CHUNKS = 4


@dataclass(frozen=True)
class PipelineRequest:
    """A request for a pipeline: the concrete step ``graph`` at the whole batch, without nodes for saved activations,
    how to divide it, and what is fixed. ``inputs``: the dim along which each is divided. ``limits``: bytes for each
    device, by pipeline rank; ``aims``: those that cuts may count, None if as many; ``host_limit``: bytes of the host
    for each. ``chunks``: of each stage, None searches.
    ``alone``: as for :func:`~autopar.passes.pipeline.microbatch.microbatch`. ``shared``: what other requests have in
    common with this one. ``solve`` solves the placement program of a graph, with nodes for saved activations, for each
    stage, within limits of the bytes of all devices together and of their hosts; the last argument: seconds of the
    program from which on it is of no use. ``cluster``: of all devices.
    ``best``: seconds of the quickest plan so far. ``too_large``: for the arguments of ``solve``, the quickest solutions
    if they do not fit."""

    graph: Graph
    inputs: Mapping[str, int | None]
    layout: StageLayout
    microbatches: int
    schedule: str | None
    pins: dict[str, str]
    limits: tuple[float, ...]
    solve: Callable[[Graph, Repeats, float, float, float], tuple[MeshSolution, ...]]
    cluster: Cluster
    host_limit: float = math.inf
    chunks: int | None = None
    alone: Callable[[], Graph] | None = None
    best: float = math.inf
    too_large: Callable[[Graph, Repeats, float, float], tuple[MeshSolution, ...] | None] = lambda *_: None
    shared: SharedWork = field(default_factory=SharedWork, compare=False, repr=False)
    aims: tuple[float, ...] | None = None

    @property
    def aimed(self) -> tuple[float, ...]:
        """By pipeline rank, the bytes that estimates of a cut may come to."""
        return self.limits if self.aims is None else self.aims

    @property
    def kinds(self) -> tuple[tuple[str, int], ...]:
        """The schedules to try, with their numbers of chunks per stage. Raises :class:`OptionsError` if none has
        ``chunks``."""
        stages = self.layout.stages
        every = tuple(schedule_choices(stages, self.schedule, self.chunks or MOST_CHUNKS))
        matching = tuple(kind for kind in every if stages == 1 or self.chunks in (None, kind[1]))
        if not matching:
            numbers = sorted({n for _, n in schedule_choices(stages, self.schedule)})
            nearest = min(numbers, key=lambda n: abs(n - (self.chunks or n)))
            raise OptionsError(
                f"interleave={self.chunks}: {self.schedule!r} runs {' or '.join(map(str, numbers))} "
                f"chunk{'s' * (numbers != [1])} on each stage; take interleave={nearest}, or leave one of them out"
            )
        return matching


def schedule_choices(stages: int, requested: str | None, most_chunks: int = MOST_CHUNKS) -> Iterator[tuple[str, int]]:
    """Names of schedules with the numbers of chunks per stage to try, up to ``most_chunks``. A solved schedule starts
    from the cuts of the best of them."""
    requested = None if requested == SOLVED else requested
    if stages == 1 and requested is None:
        yield "1f1b", 1
        return
    for name, named in SCHEDULES.items():
        if requested in (None, name):
            most = min(named.most or most_chunks, most_chunks)
            yield from ((name, chunks) for chunks in range(named.least, most + 1) if chunks == 1 or name != "gpipe")
