"""The exchange between replicas, priced and noted in the plan of one of them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from autopar.cluster.description import Cluster
from autopar.cost.collective.collective import collective_seconds
from autopar.cost.collective.point_to_point import message_rate
from autopar.ir.planned_sync import PlannedSync
from autopar.plans.plan import Plan
from autopar.sync import EVERY_STEP, Gossip, LocalSGD, PowerSGD, Sync, TopK

# Bytes of a number in an exchange that is not compressed: means are computed in 32 bits at least.
_WIDE = 4
# Bytes of a number, without scales.
_CODED = {"bf16": 2, "int8": 1}
# An index and a value.
_LARGEST = 8


def finished_by(sync: Sync, cluster: Cluster, mesh: tuple[int, ...]) -> Callable[[Plan], Plan]:
    """Adds to the plan of a replica how it stays together with the others along the first axis of ``mesh``."""
    if isinstance(sync, str):
        assert sync == EVERY_STEP
        return lambda plan: plan
    links = _Links(cluster, (mesh[0], math.prod(mesh[1:])))
    return lambda plan: replace(plan, sync=_planned(plan, sync, links))


@dataclass(frozen=True)
class _Links:
    """Those between replicas: ``mesh`` is (replicas, ranks of a replica)."""

    cluster: Cluster
    mesh: tuple[int, int]

    @property
    def replicas(self) -> int:
        return self.mesh[0]

    def all_reduce(self, nbytes: float) -> tuple[float, float]:
        """Bytes that a rank sends, and seconds."""
        seconds = collective_seconds(self.cluster, self.mesh, "all_reduce", (0,), nbytes)
        return 2 * (self.replicas - 1) / self.replicas * nbytes, seconds

    def all_gather(self, own: float) -> tuple[float, float]:
        """As :meth:`all_reduce`, of ``own`` bytes of each rank."""
        seconds = collective_seconds(self.cluster, self.mesh, "all_gather", (0,), self.replicas * own)
        return (self.replicas - 1) * own, seconds

    def messages(self, own: float, count: int) -> tuple[float, float]:
        """As :meth:`all_reduce`, of ``own`` bytes to each of ``count`` others."""
        if self.replicas == 1:
            return 0.0, 0.0
        latency, bandwidth = message_rate(self.cluster, 0, 1, self.mesh[1])
        return count * own, latency + count * own / bandwidth


def _planned(plan: Plan, sync: LocalSGD | Gossip, links: _Links) -> PlannedSync:
    shapes = [(_shape(plan, path), _width(plan, path)) for path in _trained(plan)]
    ranks = plan.stage_meshes.devices
    wide = sum(max(_WIDE, width) * math.prod(shape) for shape, width in shapes) / ranks
    own = sum(_coded(sync.compression, shape, width, sync) for shape, width in shapes) / ranks
    if isinstance(sync, Gossip):
        neighbours = 2 if sync.topology == "ring" and links.replicas > 2 else 1
        sent, seconds = links.messages(own, neighbours)
    elif sync.compression is None or isinstance(sync.compression, PowerSGD):
        sent, seconds = links.all_reduce(own)
    else:
        sent, seconds = links.all_gather(own)
    return PlannedSync(
        method=repr(sync),
        replicas=links.replicas,
        every=sync.every,
        bytes=round(sent),
        seconds=seconds,
        hidden=isinstance(sync, LocalSGD) and sync.latest > 0,
        gradient_seconds=links.all_reduce(wide)[1],
    )


def _coded(compression: object, shape: tuple[int, ...], width: int, sync: LocalSGD | Gossip) -> float:
    """Bytes of a parameter of ``shape`` in a message."""
    numel = math.prod(shape)
    if isinstance(compression, TopK):
        return _LARGEST * max(1, math.ceil(compression.fraction * numel))
    if isinstance(compression, PowerSGD):
        rows = shape[0] if shape else 1
        columns = numel // max(rows, 1)
        return _WIDE * min(numel, (rows + columns) * min(rows, columns, compression.rank))
    if isinstance(sync, Gossip) and compression is None:
        return width * numel  # As they are.
    return _CODED.get(str(compression), max(_WIDE, width)) * numel


def _trained(plan: Plan) -> Iterator[str]:
    return (path for path in plan.parameters if not plan.gradient_values or path in plan.gradient_values)


def _shape(plan: Plan, path: str) -> tuple[int, ...]:
    kind = plan.nodes[plan.parameter_nodes[path]].type
    return tuple(int(size) for size in re.findall(r"\d+", kind.partition("[")[2]))


def _width(plan: Plan, path: str) -> int:
    """Bytes of an element as it is stored: mixed precision stores 32 bits."""
    bits = re.match(r"[a-z]+(\d+)", plan.nodes[plan.parameter_nodes[path]].type)
    return _WIDE if bits is None or plan.precision != "fp32" else int(bits[1]) // 8
