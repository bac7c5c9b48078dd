"""The part of a plan that says how a pipeline is cut and run, and what its parts were priced at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.schedule.schedule import Schedule

from .assignment import ParameterPlacement
from .placements import Placements
from .stage_meshes import Mesh
from .staged_graph import Edge


@dataclass(frozen=True, slots=True)
class ChunkFigures:
    """What one chunk was priced at: seconds of ``forward``, ``input_gradient`` and ``weight_gradient`` for one
    microbatch, and of ``reduce`` once a step; bytes on a device, ``saved`` by each microbatch in flight and always
    ``resting``. An undivided backward is ``joined`` seconds quicker than its two halves. Of ``reduce``,
    ``overlap_half`` seconds overlap the last weight gradient, or ``overlap_whole`` seconds the last undivided backward;
    at most ``unawaited`` seconds if the rank has more to do.
    """

    forward: float
    input_gradient: float
    weight_gradient: float
    reduce: float
    saved: float
    resting: float
    joined: float = 0.0
    overlap_half: float = 0.0
    overlap_whole: float = 0.0
    unawaited: float = float("inf")


@dataclass(frozen=True, slots=True)
class LinkFigures:
    """What is sent between two chunks for one microbatch: the bytes that one rank sends from ``source`` up to
    ``target``, and back; each way takes ``latency`` + bytes / ``bandwidth`` seconds.
    """

    source: int
    target: int
    forward_bytes: float
    backward_bytes: float
    bandwidth: float
    latency: float

    def seconds(self, nbytes: float) -> float:
        """Seconds of one message; the link within a device takes none."""
        return self.latency + nbytes / self.bandwidth


@dataclass(frozen=True)
class PlannedPipeline:
    """How a pipeline is cut and run, and its prices.

    Pipeline rank s is the s-th block of consecutive devices, each block a mesh of the plan's shape, or of its own. One
    chunk and several microbatches is gradient accumulation.

    Attributes:
        cuts: the forward nodes at which chunks 1, 2, ... begin (:mod:`autopar.ir.staged_graph`).
        schedule: what each pipeline rank does.
        wires: how the value of each edge is placed while it is sent, on the meshes inside both stages
            (:func:`.stage_meshes.on_axes`).
        wire_bytes: the most bytes of it that one rank sends or receives for one microbatch.
        peaks: peak bytes on the devices of each pipeline rank.
        update_seconds: of optimizer and weight refresh, after all reductions.
        hides: whether reductions are sent while their rank computes.
        own_statistics: whether every microbatch is a batch of its own (``Options(batch_statistics="microbatch")``).
        limits: bytes that the devices of each pipeline rank may hold, where devices are of several kinds.
        devices: what each pipeline rank's devices are called, where they are of several kinds.
        meshes: the mesh inside each pipeline rank, if they are unequal. All have as many axes.
        borrowed: by chunk and path, where a chunk has a parameter that another one stores on another mesh, or, where
            meshes are unequal, places otherwise on a mesh of the same form.
        hosts, speeds: where pipeline ranks share processors, the host of each, and how fast each is while 1, 2, ... of
            a host compute; with unequal meshes, while 1, 2, ... devices of a host do.
    """

    cuts: tuple[str, ...]
    schedule: Schedule
    wires: Mapping[Edge, Placements] = field(default_factory=dict)
    wire_bytes: Mapping[Edge, int] = field(default_factory=dict)
    chunk_figures: tuple[ChunkFigures, ...] = ()
    link_figures: tuple[LinkFigures, ...] = ()
    peaks: tuple[int, ...] = ()
    update_seconds: float = 0.0
    hides: bool = False
    hosts: tuple[int, ...] = ()
    speeds: tuple[float, ...] = ()
    own_statistics: bool = False
    limits: tuple[int, ...] = ()
    devices: tuple[str, ...] = ()
    meshes: tuple[Mesh, ...] = ()
    borrowed: Mapping[tuple[int, str], ParameterPlacement] = field(default_factory=dict)

    @property
    def chunks(self) -> int:
        return len(self.cuts) + 1

    @property
    def chunks_per_stage(self) -> int:
        return self.chunks // self.schedule.stages
