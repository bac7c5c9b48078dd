"""Collects the instructions of one section of a program while a graph is lowered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.tensor import Partial

from autopar.ir.node import Arg, TensorType, Value
from autopar.ir.placements import Placement, local_before, local_shape, shard_dim, shares_of
from autopar.ir.program import Instruction, Section
from autopar.ir.reshard import Hop

# Buckets in memory at once: one is filled with new gradients while the one before is sent.
# By that reasoning; more would only hold memory.
IN_FLIGHT = 2
KeywordArgs = tuple[tuple[str, Arg], ...]


def _ints(kind: TensorType) -> tuple[int, ...]:
    return tuple(int(size) for size in kind.shape)


def hop_arguments(hop: Hop, kind: TensorType, mesh: tuple[int, ...], coordinate: tuple[int, ...]) -> KeywordArgs:
    """The keyword arguments of ``collective.<kind>`` for ``hop`` of a tensor of global type ``kind``, see
    :mod:`autopar.ir.program`."""
    axis, axes = hop.axes[0], hop.axes
    source, target = hop.source[axis], hop.target[axis]
    gathered = shard_dim(source)
    after = local_shape(_ints(kind), hop.target, mesh, coordinate)
    arguments: dict[str, Arg] = {"axes": axes}
    if isinstance(source, Partial):
        arguments["op"] = source.reduce_op
    if hop.kind in ("slice", "reduce_scatter"):
        arguments |= {"dim": shard_dim(target), "before": local_before(hop.target, axis, mesh, coordinate)}
        arguments |= _in_shares("shares", target)
    elif hop.kind == "all_gather" and gathered is not None:
        before = local_before(hop.source, axis, mesh, coordinate)
        arguments |= {"dim": gathered, "size": after[gathered], "before": before} | _in_shares("shares", source)
    elif hop.kind == "all_to_all" and gathered is not None:
        arguments |= {"gather_dim": gathered, "gather_size": after[gathered]}
        arguments |= {"gather_before": local_before(hop.source, axis, mesh, coordinate)}
        scatter_before = local_before(hop.target, axis, mesh, coordinate)
        arguments |= {"scatter_dim": shard_dim(target), "scatter_before": scatter_before}
        arguments |= _in_shares("gather_shares", source) | _in_shares("scatter_shares", target)
    return tuple(arguments.items())


def _in_shares(name: str, placement: Placement) -> dict[str, Arg]:
    shares = shares_of(placement)
    return {name: shares} if shares else {}


@dataclass
class Emitter:
    """Appends instructions with fresh names; ``taken``: all names of the section, including inputs."""

    mesh: tuple[int, ...]
    coordinate: tuple[int, ...]
    instructions: list[Instruction] = field(default_factory=list)
    taken: set[str] = field(default_factory=set)

    def fresh(self, name: str) -> str:
        """``name``, or ``name_1``, ``name_2``, ... if taken."""
        candidate, count = name, 0
        while candidate in self.taken:
            count += 1
            candidate = f"{name}_{count}"
        self.taken.add(candidate)
        return candidate

    def emit(
        self, name: str, op: str, args: tuple[Arg, ...], kwargs: KeywordArgs = (), results: int = 1, module: str = ""
    ) -> Value:
        """Appends ``name = op(*args, **kwargs)`` and returns its first result."""
        fresh = self.fresh(name)
        self.instructions.append(Instruction(fresh, op, args, kwargs, results, module))
        return Value(fresh)

    def hop(self, value: Value, hop: Hop, kind: TensorType, module: str = "") -> Value:
        """Appends one hop of ``value``: a local step, or the start of a collective and the wait for it."""
        arguments = hop_arguments(hop, kind, self.mesh, self.coordinate)
        name = f"{value.node}_{hop.kind}"
        done = self.emit(name, f"collective.{hop.kind}", (value,), arguments, 1, module)
        if hop.collective is None:
            return done
        return self.emit(f"{name}_wait", "collective.wait", (done,), (), 1, module)

    def hops(self, value: Value, path: Iterable[Hop], kind: TensorType, module: str = "") -> Value:
        """Appends all hops of ``path`` and returns the value at its end."""
        for hop in path:
            value = self.hop(value, hop, kind, module)
        return value

    def section(self, name: str, inputs: tuple[str, ...], outputs: tuple[Value | None, ...]) -> Section:
        return Section(name, inputs, tuple(self.instructions), outputs)


@dataclass
class _Member:
    """One tensor waiting in a bucket, with the hops it has yet to take, and the ``arguments`` of the first of them."""

    key: object
    value: Value
    kind: TensorType
    path: tuple[Hop, ...]
    arguments: dict[str, Arg]


def _sent_bytes(member: _Member) -> int:
    collective = member.path[0].collective
    return 0 if collective is None else collective.bytes


@dataclass
class Buckets:
    """Coalesces the collectives of equal kind, axes, operation and dtype (gathers of any dtype) into bucketed ones of
    about ``limit`` bytes.

    ``add`` starts a bucket as soon as it is full, so that it overlaps the rest of the section. If more than
    :data:`IN_FLIGHT` are in flight it waits for the oldest, since each keeps its buffers; so does ``make_room``, before
    a tensor is computed that will fill another. ``finish`` starts the remaining buckets and waits for all. A path of
    several collectives goes through one bucket for each. Results are
    returned by the key given to ``add``. With ``waits`` false ``add`` waits for none, and ``finish`` starts the buckets
    beyond :data:`IN_FLIGHT`. ``module``: the one that the messages belong to, if any.
    """

    emitter: Emitter
    limit: int
    name: str
    waits: bool = True
    open: dict[object, list[_Member]] = field(default_factory=dict)
    started: list[tuple[Value, list[_Member]]] = field(default_factory=list)
    later: list[list[_Member]] = field(default_factory=list)
    results: dict[Any, Value] = field(default_factory=dict)
    module: str = ""

    def add(self, key: object, value: Value, kind: TensorType, path: tuple[Hop, ...]) -> None:
        """Sends ``value`` along ``path``. Its leading local hops, and those after a collective, run unbucketed."""
        while path and path[0].collective is None:
            value, path = self.emitter.hop(value, path[0], kind, self.module), path[1:]
        if not path:
            self.results[key] = value
            return
        group, arguments = self._group(key, kind, path[0])
        members = self.open.setdefault(group, [])
        members.append(_Member(key, value, kind, path, arguments))
        if sum(map(_sent_bytes, members)) >= self.limit:
            self._start(self.open.pop(group))

    def make_room(self, key: object, kind: TensorType, path: tuple[Hop, ...], is_cast: bool = False) -> None:
        """Waits for the oldest buckets if a tensor that is about to be computed and sent along ``path`` will fill one,
        so that this is one of at most :data:`IN_FLIGHT`. If it is cast, which takes hardly any time behind what is in
        flight, it waits for all: so the tensor it is cast from is in memory instead of another bucket."""
        first = next((hop for hop in path if hop.collective is not None), None)
        if first is None or first.collective is None or not self.waits:
            return
        group, _ = self._group(key, kind, first)
        if sum(map(_sent_bytes, self.open.get(group, ()))) + first.collective.bytes >= self.limit:
            while len(self.started) >= (1 if is_cast else IN_FLIGHT):
                self._finish_oldest()

    def _group(self, key: object, kind: TensorType, hop: Hop) -> tuple[object, dict[str, Arg]]:
        """What the members of a bucket have in common, of which ``hop`` is the next of ``key``; and its arguments."""
        arguments = dict(hop_arguments(hop, kind, self.emitter.mesh, self.emitter.coordinate))
        # Pieces of several all-to-alls, or of unequal shares, have no common layout, so they are not bucketed.
        alone = key if hop.kind == "all_to_all" or "shares" in arguments else None
        # What is only gathered may be packed as bytes.
        dtype = None if hop.kind == "all_gather" else kind.dtype
        return (hop.kind, hop.axes, arguments.get("op"), dtype, alone), arguments

    def finish(self) -> Mapping[Any, Value]:
        """Starts open buckets, waits for all in order, and returns the values by key."""
        self.waits = True
        for members in self.later:
            self._start(members)
        self.later.clear()
        while self.open or self.started:
            self._start_all()
            self._finish_oldest()
        return self.results

    def _start_all(self) -> None:
        # Starting a bucket may wait for another one, whose members may then enter new buckets.
        while self.open:
            self._start(self.open.pop(next(iter(self.open))))

    def _finish_oldest(self) -> None:
        """Waits for the bucket that started first, and sends its members along the rest of their paths."""
        handle, members = self.started.pop(0)
        done = self.emitter.emit(f"{handle.node}_wait", "collective.wait", (handle,), (), len(members), self.module)
        for index, member in enumerate(members):
            self.add(member.key, Value(done.node, index), member.kind, member.path[1:])

    def _start(self, members: list[_Member]) -> None:
        if not self.waits and len(self.started) == IN_FLIGHT:
            self.later.append(members)
            return
        self.started.append((self._emit(members), members))
        while len(self.started) > IN_FLIGHT:
            self._finish_oldest()

    def _emit(self, members: list[_Member]) -> Value:
        """Starts the first collective of all ``members`` together."""
        each = [member.arguments for member in members]
        op = f"collective.{members[0].path[0].kind}"
        if len(members) == 1:
            return self.emitter.emit(self.name, op, (members[0].value,), tuple(each[0].items()), 1, self.module)
        shared = {k: v for k, v in each[0].items() if k in ("axes", "op")}
        listed = {f"{k}s": tuple(a[k] for a in each) for k in each[0] if k not in shared}
        values = tuple(member.value for member in members)
        return self.emitter.emit(self.name, f"{op}_bucket", (values,), tuple((shared | listed).items()), 1, self.module)
