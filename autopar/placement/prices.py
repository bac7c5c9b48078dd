"""Prices on a mesh of a cluster: seconds of a strategy, seconds and path of a reshard, bytes on one device."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from autopar.cluster.description import Cluster
from autopar.cluster.groups import least_device
from autopar.cost import bucketed_seconds, collective_seconds, node_seconds
from autopar.cost.collective.collective import copying_seconds
from autopar.cost.kernels.share import Share, share_seconds
from autopar.ir.graph import Graph
from autopar.ir.node import Node, TensorType
from autopar.ir.placements import (
    PARTIAL_SUM,
    REPLICATE,
    Placement,
    Placements,
    Shares,
    Strategy,
    coordinate_of,
    fullest_coordinate,
    largest_local_shape,
    local_shape,
    shard_dim,
    shares_of,
)
from autopar.ir.reshard import Collective, Hop, Sent, hops_among
from autopar.ir.weight_messages import WeightMessages
from autopar.ops.exchanged_experts import EXCHANGES, message_bytes

from .fused_kernels import FusedKernels
from .planned_ways import PlannedWays
from .reshard_table import ReshardTable, shortest_paths
from .rooms import Room, between_shares, counted_bytes, rooms_of

# Bytes of a bucket of gradients. Chosen: the default of DDP's bucket_cap_mb in torch (25 MiB).
BUCKET_BYTES = 25 << 20
Options = tuple[tuple[Placement, ...], ...]
Number = TypeVar("Number", int, float)


def placement_options(graph: Graph, mesh: tuple[int, ...]) -> dict[TensorType, Options]:
    """For each tensor type of an annotated graph and each axis, the placements that some strategy has for it. A reshard
    may pass through any of them, so its price depends on the type alone, not on the node."""
    options: dict[TensorType, list[set[Placement]]] = {}

    def add(kind: TensorType | None, place: Placements) -> None:
        if kind is not None:
            base: set[Placement] = {REPLICATE, PARTIAL_SUM}
            per_axis = options.setdefault(kind, [set(base) if devices > 1 else {REPLICATE} for devices in mesh])
            for axis, placement in enumerate(place):
                per_axis[axis].add(placement)

    seen: set[object] = set()
    for node in graph.nodes:
        kinds = tuple(graph.type_of(value) for value in node.operands)
        strategies = graph.strategies[node.name]
        # Equal nodes of repeated layers share one list, so its identity suffices.
        key = (id(strategies), kinds, node.types, node.stored if node.op == "param" else None)
        if key in seen:
            continue
        seen.add(key)
        for strategy in dict.fromkeys(strategies):
            if node.op == "param" and node.stored != node.type:  # Its gradient has the same placements.
                add(node.stored, strategy.outputs[0])
            for kind, place in zip((*kinds, *node.types), strategy.places, strict=True):
                add(kind, place)
    return {kind: tuple(tuple(sorted(p, key=str)) for p in per_axis) for kind, per_axis in options.items()}


def exchanged_bytes(graph: Graph) -> int:
    """Bytes of the unsharded gradients of a step: those of trained parameters (if the graph has no gradients, of all
    parameters)."""
    nodes, gradients = graph.placeholders("param"), graph.gradients

    def total() -> int:
        return sum(int(node.stored.bytes) for node in nodes if not gradients or node.target in gradients)

    return graph.once(exchanged_bytes, total)


def bucket_bytes(nbytes: float, tensors: float, most: int = BUCKET_BYTES) -> float:
    """The bytes of a bucket, at most ``most``, in which ``nbytes`` of a tensor are sent, if all that is sent is
    ``tensors`` times as large. Others are assumed to send the same share of their bytes, until the bucket is full."""
    return min(float(most), nbytes * max(1.0, tensors))


def local_type(kind: TensorType, placements: Placements, mesh: tuple[int, ...]) -> TensorType:
    """The type of the largest shard of a tensor of global type ``kind``."""
    return TensorType(largest_local_shape(tuple(map(int, kind.shape)), placements, mesh), kind.dtype)


def local_bytes(kind: TensorType, placements: Placements, mesh: tuple[int, ...]) -> int:
    """Bytes of the largest shard."""
    return int(local_type(kind, placements, mesh).bytes)


@dataclass(frozen=True)
class Seat:
    """One of the devices, at ``coordinate`` of the mesh, or several like it; ``cluster`` has its rates."""

    cluster: Cluster
    coordinate: tuple[int, ...]

    def holds(self, kind: TensorType, placements: Placements, mesh: tuple[int, ...]) -> TensorType:
        """The type of its shard of a tensor of global type ``kind``."""
        shape = local_shape(tuple(map(int, kind.shape)), placements, mesh, self.coordinate)
        return TensorType(shape, kind.dtype)


@dataclass(frozen=True, eq=False)
class Prices:
    """Prices on ``mesh`` (a shape) of ``cluster``. Computed prices are cached.

    ``options[type][axis]`` are the placements through which tensors of a type may be resharded (see
    :func:`placement_options`). ``exchanged``: bytes of all unsharded gradients (or weights) that a step exchanges; a
    bucket never holds more than these. ``whole``: the cluster, of which :meth:`on_block` takes the block ``block``.
    ``fused``: the kernels of the graph, if its pieces are compiled; operations are priced by themselves otherwise.
    ``limits``: bytes that each device of the cluster may hold, by rank, where that matters; ``room``: the one whose
    bytes count, None for whichever counts most. ``messages``: those in which small weights are gathered. ``ways``: the
    paths of a plan that is lowered, which may be for another cluster.
    """

    cluster: Cluster
    mesh: tuple[int, ...]
    options: Mapping[TensorType, Options]
    exchanged: int
    whole: Cluster | None = None
    block: int | None = None
    fused: FusedKernels | None = None
    limits: tuple[int, ...] = ()
    room: Room | None = None
    messages: WeightMessages = field(default_factory=WeightMessages)
    ways: PlannedWays = field(default_factory=PlannedWays)
    _calls: dict[object, tuple[Any, Strategy]] = field(default_factory=dict)
    _nodes: dict[object, float] = field(default_factory=dict)
    _tables: dict[object, ReshardTable] = field(default_factory=dict)
    _blocks: dict[int, Prices] = field(default_factory=dict)

    @staticmethod
    def of(
        cluster: Cluster,
        mesh: tuple[int, ...],
        graph: Graph,
        fused: FusedKernels | None = None,
        limits: tuple[int, ...] = (),
        options: Mapping[TensorType, Options] | None = None,
    ) -> Prices:
        """The prices of an annotated graph. ``fused``: its kernels, if pieces of it are compiled; ``limits``: see
        :class:`Prices`; ``options``: its :func:`placement_options`, if they are known."""
        through = placement_options(graph, mesh) if options is None else options
        messages = WeightMessages.of(graph)
        return Prices(cluster, mesh, through, exchanged_bytes(graph), fused=fused, limits=limits, messages=messages)

    @property
    def devices(self) -> int:
        return math.prod(self.mesh)

    def on_block(self, block: int) -> Prices:
        """The prices on the ``block``-th block of as many consecutive devices, where the cluster has several kinds.
        Reshards keep their paths and seconds, since all blocks run one program."""
        if not self.cluster.groups:
            return self
        if block not in self._blocks:
            own = self.cluster.at(block * self.devices, self.devices)
            self._blocks[block] = replace(
                self, cluster=own, whole=self.cluster, block=block, _calls={}, _nodes={}, _blocks={}
            )
        return self._blocks[block]

    @cached_property
    def uncompiled(self) -> Prices:
        """The prices of the same graph operation by operation."""
        return self if self.fused is None else replace(self, fused=None, _calls={}, _nodes={}, _blocks={})

    @cached_property
    def shares(self) -> Shares:
        """For each axis the unequal shares in which some strategy divides rows; empty: there are none."""
        found = [set[tuple[int, ...]]() for _ in self.mesh]
        for per_axis in self.options.values():
            for axis, places in enumerate(per_axis):
                found[axis].update(filter(None, map(shares_of, places)))
        return tuple(max(each, default=()) for each in found) if any(found) else ()

    @property
    def fullest(self) -> tuple[int, ...]:
        """The coordinate of the device whose bytes count, otherwise of the first with the largest shares."""
        return self.room.coordinate if self.room else fullest_coordinate(self.mesh, self.shares)

    @cached_property
    def rooms(self) -> tuple[Room, ...]:
        """See :mod:`.rooms`; none if all devices may hold as much, or have as many rows."""
        return (self.room,) if self.room else rooms_of(self.limits, self.mesh, self.shares, self.block)

    def in_room(self, room: Room) -> Prices:
        """The same prices, with the bytes of the devices in one room."""
        return replace(self, room=room, _calls={}, _blocks={})

    def held(self, kind: TensorType, placements: Placements) -> int:
        """What a tensor that rests on a device counts against its limit: bytes of the largest shard, unless devices
        have :attr:`rooms`."""
        if not self.rooms:
            return local_bytes(kind, placements, self.mesh)
        return counted_bytes(kind, placements, self.mesh, self.rooms)

    @cached_property
    def seats(self) -> tuple[Seat, ...]:
        """The devices that take turns at being the slowest: one seat of each kind of device and share of the rows. It
        is one, what all can do in step, where all shares are equal."""
        if not self.shares:
            return (Seat(self.cluster, (0,) * len(self.mesh)),)
        whole, devices = self.whole or self.cluster, range(self.devices)
        blocks = [self.block] if self.block is not None else range(max(1, (whole.size or 0) // self.devices))
        ranks: dict[tuple[int, ...], list[int]] = {}
        for device in devices:
            places = zip(coordinate_of(device, self.mesh), self.shares, strict=True)
            seat = tuple(at if each else 0 for at, each in places)
            ranks.setdefault(seat, []).extend(block * self.devices + device for block in blocks)
        found: dict[object, Seat] = {}
        for seat, members in ranks.items():
            kinds = dict.fromkeys(whole.at(rank, 1) for rank in members)
            own = replace(self.cluster, device=least_device([kind.device for kind in kinds]), groups=())
            rows = tuple(each[at] for at, each in zip(seat, self.shares, strict=True) if each)
            found.setdefault((own, rows), Seat(own, seat))
        return tuple(found.values())

    def of_call(
        self, what: str, node: Node, inputs: tuple[TensorType, ...], strategy: Strategy, compute: Callable[[], Number]
    ) -> Number:
        """What ``compute`` returns for a call, computed once for all equal calls: ``what`` depends on the form and the
        types of a call and on its strategy, and on nothing else. Equal layers share strategies, so their identity
        suffices, and it is not needed to hash them."""
        key = what, node.form, inputs, node.types, id(strategy)
        if key not in self._calls:
            # With the strategy, so that no other gets its identity.
            self._calls[key] = compute(), strategy
        found: Number = self._calls[key][0]
        return found

    def node(self, node: Node, inputs: tuple[TensorType, ...], strategy: Strategy) -> float:
        """Seconds of one run of ``node`` under ``strategy`` on the device that takes longest: that with the largest
        shards, or, of unequal shares, the slowest with its own rows. The sum over operations is thus an upper bound,
        which is reached where one device is always the slowest."""
        share = self.fused.share_of(node) if self.fused is not None else None
        what = "seconds" if share is None else f"seconds of {share}"
        return self.of_call(what, node, inputs, strategy, lambda: self._node(node, inputs, strategy, share))

    def _node(self, node: Node, inputs: tuple[TensorType, ...], strategy: Strategy, share: Share | None) -> float:
        return max(self._node_at(seat, node, inputs, strategy, share) for seat in self.seats)

    def _node_at(
        self, seat: Seat, node: Node, inputs: tuple[TensorType, ...], strategy: Strategy, share: Share | None
    ) -> float:
        local_in = tuple(seat.holds(t, p, self.mesh) for t, p in zip(inputs, strategy.inputs, strict=True))
        outputs = zip(node.types, strategy.outputs, strict=True)
        local_out = tuple(t and seat.holds(t, p, self.mesh) for t, p in outputs)
        key: tuple[object, ...] = (node.form, local_in, local_out, strategy.local, seat.coordinate, share)
        if strategy.local.removeprefix("autopar.") in EXCHANGES:
            key = (*key, strategy.inputs)  # Which axes rows travel over.
        if key not in self._nodes:
            if share is None:
                seconds = node_seconds(seat.cluster, node, local_in, local_out, strategy.local)
            else:
                seconds = share_seconds(seat.cluster, node, local_in, local_out, share, strategy.local)
            self._nodes[key] = seconds + self.exchange(node, inputs, strategy)[1]
        return self._nodes[key]

    def exchange(self, node: Node, inputs: tuple[TensorType, ...], strategy: Strategy) -> tuple[tuple[Hop, ...], float]:
        """The messages that ``node`` exchanges inside of itself, as hops that change no placement, and their seconds
        for the busiest device."""
        name = strategy.local.removeprefix("autopar.")
        if name not in EXCHANGES:
            return (), 0.0
        local = [local_type(t, p, self.mesh) for t, p in zip(inputs, strategy.inputs, strict=True)]
        place = strategy.inputs[3 + name.endswith("backward")]
        axes = tuple(axis for axis, each in enumerate(place) if shard_dim(each) == 0)
        devices = math.prod(self.mesh[axis] for axis in axes)
        most = self.cluster.expert_imbalance
        sizes = [devices * size for size in message_bytes(name, local, devices)]
        here = strategy.outputs[0]
        hops = tuple(Hop("all_to_all", axes, here, here, Collective("all_to_all", axes, size)) for size in sizes)
        each = (collective_seconds(self.cluster, self.mesh, "all_to_all", axes, size * most) for size in sizes)
        return hops, sum(each)

    def hop(self, kind: TensorType, hop: Hop, *, sent: Sent = "alone") -> float:
        """Seconds of one hop, the copies that make its shards contiguous included."""
        if hop.collective is None:
            return self.cluster.device.launch_seconds
        wire, copies = hop.collective, self._copies(kind, hop)
        bucket = self._bucket_bytes(kind, wire, sent)
        if bucket is None:
            return copies + collective_seconds(self.cluster, self.mesh, wire.kind, wire.axes, wire.bytes)
        packing = self._copying(kind, hop)
        return packing + copies + bucketed_seconds(self.cluster, self.mesh, wire.kind, wire.axes, wire.bytes, bucket)

    def _bucket_bytes(self, kind: TensorType, wire: Collective, sent: Sent) -> float | None:
        """The most bytes of a bucket in which a tensor of this type is sent; None if it is sent alone."""
        if sent == "bucketed":  # All-to-alls are not bucketed.
            tensors = self.exchanged / max(1, int(kind.bytes))
            return None if wire.kind == "all_to_all" else bucket_bytes(wire.bytes, tensors)
        if wire.kind != "all_gather" or self._sent(kind, sent) == "alone":
            return None
        together = self.messages.message_bytes(kind, wire.bytes, sent)
        return together if together > wire.bytes else None

    def _sent(self, kind: TensorType, sent: Sent) -> Sent:
        """How a tensor of this type is sent, of which large weights are gathered alone."""
        return sent if sent == "bucketed" or self.messages.takes(kind) else "alone"

    def _copies(self, kind: TensorType, hop: Hop) -> float:
        """Seconds of copies. Collectives work on dim 0 of contiguous buffers; for any other dim, the tensor is read and
        written once more."""
        axis = hop.axes[0]
        dims = {shard_dim(hop.source[axis]), shard_dim(hop.target[axis])} - {None}
        if dims <= {0}:
            return 0.0
        return self._copying(kind, hop)

    def _copying(self, kind: TensorType, hop: Hop) -> float:
        """Seconds to copy the larger side of a hop once, into a bucket or out of it."""
        return max(
            copying_seconds(seat.cluster.device, int(seat.holds(kind, place, self.mesh).bytes))
            for seat in self.seats
            for place in (hop.source, hop.target)
        )

    def broken(self, kind: TensorType, source: Placements, target: Placements) -> float:
        """Seconds that a reshard adds inside a kernel: the value is written and read, and what follows is launched by
        itself."""
        return self.cluster.device.launch_seconds + max(
            sum(int(seat.holds(kind, place, self.mesh).bytes) for place in (source, target))
            / seat.cluster.device.memory_bandwidth
            for seat in self.seats
        )

    def table(self, kind: TensorType, *, sent: Sent = "alone") -> ReshardTable:
        """The reshard table of tensors of this type, between all placements that occur in the graph."""
        key = (kind, self._sent(kind, sent))
        if key not in self._tables:
            self._tables[key] = self._make_table(kind, self.options[kind], key[1])
        return self._tables[key]

    def path(self, kind: TensorType, source: Placements, target: Placements, sent: Sent = "alone") -> tuple[Hop, ...]:
        """The hops with which a reshard is, or was, priced."""
        return self.ways.path(kind, source, target, sent) or self.table(kind, sent=sent).path(source, target)

    def _make_table(self, kind: TensorType, options: tuple[tuple[Placement, ...], ...], sent: Sent) -> ReshardTable:
        states, hops = hops_among(kind, options, self.mesh)
        seconds = np.full((len(states), len(states)), np.inf)
        np.fill_diagonal(seconds, 0.0)
        for (i, j), hop in hops.items():
            seconds[i, j] = self.hop(kind, hop, sent=sent)
        best, next_state = shortest_paths(seconds)
        if self.rooms:
            # On its way from equal rows to others a tensor is whole, which the program's memory does not count.
            best[between_shares(states, self.shares)] = np.inf
        return ReshardTable(states, best, hops, next_state)
