"""Compares the calls of all ranks before they run: ranks that disagree would deadlock, or train on numbers that no
single process would compute.

At each call every rank sends 33 bytes: a hash of the *kind* of its call (shapes, dtypes, structure, non-tensor values,
modes) and of the program that it is about to run, and whether it was asked to stop
(:mod:`autopar.runtime.faults.stopping`). If they differ, the ranks exchange descriptions, and all raise the
same error. At the 1st, 2nd, 4th, 8th, ... call of a kind (``"always"``: at each) they then compare hashes of the
inputs' values (:mod:`autopar.runtime.inputs.content_hash`). A plain tensor is the global batch and must be equal on all
ranks; a DTensor must be equal on ranks that have the same part of it.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor

from autopar.errors import InputMismatchError, OptionsError
from autopar.ir.placements import coordinate_of, is_shard
from autopar.runtime.comm.exchange import Exchange
from autopar.runtime.comm.minority import minority
from autopar.runtime.faults.stopping import innermost
from autopar.runtime.inputs.content_hash import SIZE, content_hash
from autopar.runtime.torch_internals.dtensors import local_tensor

from .differing_calls import Description, explain_content, explain_kind
from .kind import CallKind

Check = Literal["first", "always", "never"]
# A kind of call, and the placements of its DTensors.
Key = tuple[CallKind, tuple[str, ...]]
# The number of kinds whose calls are counted: the latest ones.
# Chosen: far more than programs that are kept.
REMEMBERED = 1024
# Bits of the last byte of a record: values are to be compared at this call, and the rank was asked to stop.
_VALUES, _STOP = 1, 2


@dataclass(frozen=True)
class CheckedCall:
    """A call to compare: its ``kind``, its ``leaves`` in the order of ``kind.leaves``, and the number of the
    ``program`` it would run (None: a new one). ``names``: returns the names of the leaves; ``because``: returns the
    reason for a new program. Both are called only if something differs."""

    kind: CallKind
    leaves: Sequence[Any]
    program: int | None
    names: Callable[[], Sequence[str]]
    because: Callable[[], str]


class InputChecks:
    """The comparisons of one parallel module; see the module docstring."""

    def __init__(self, exchange: Exchange, when: Check) -> None:
        self._exchange, self._when = exchange, when
        self._counts: OrderedDict[Key, int] = OrderedDict()

    @property
    def active(self) -> bool:
        return self._when != "never" and not self._exchange.alone

    def compare_options(self) -> None:
        """Raises :class:`OptionsError`, on every rank, if ranks would compare at different calls, so that some wait for
        an exchange that others skip. Collective."""
        everyone = self._exchange.all_objects(self._when)
        if len(set(everyone)) > 1:
            each = ", ".join(
                f"{when!r} on rank {rank}" for rank, when in zip(self._exchange.ranks, everyone, strict=True)
            )
            raise OptionsError(f"Options(check_inputs=...) is {each}: pass the same on every rank")

    def check(self, call: CheckedCall) -> None:
        """Raises :class:`InputMismatchError`, on every rank, if ranks make different calls. Collective."""
        layouts = tuple(map(_layout, call.leaves))
        key = (call.kind, layouts)  # A plain batch after DTensors is compared like a first one.
        count = self._counts.get(key, 0) + 1
        wanted = self._when == "always" or count & (count - 1) == 0
        stop = innermost()
        flags = (_VALUES if wanted else 0) | (_STOP if stop is not None and stop.asked else 0)
        everyone = self._exchange.all_bytes(self._kind_hash(call, layouts) + bytes([flags]))
        if len({record[:-1] for record in everyone}) > 1:
            self._raise_different_kinds(call)
        self._count(key, count)
        if stop is not None:
            stop.agree(any(record[-1] & _STOP for record in everyone))
        if any(record[-1] & _VALUES for record in everyone):
            self._check_content(call)

    def agree_to_stop(self) -> None:
        """What :meth:`check` also does, for calls that are not compared. Collective if a context is open."""
        stop = innermost()
        if stop is not None:
            stop.agree(any(map(any, self._exchange.all_bytes(bytes([stop.asked])))))

    def _count(self, key: Key, count: int) -> None:
        self._counts[key] = count
        self._counts.move_to_end(key)
        if len(self._counts) > REMEMBERED:
            self._counts.popitem(last=False)

    def _kind_hash(self, call: CheckedCall, layouts: tuple[str, ...]) -> bytes:
        return hashlib.sha256(repr((call.kind, layouts, _number(call))).encode()).digest()

    def _raise_different_kinds(self, call: CheckedCall) -> None:
        layouts = {name: _layout(leaf) for name, leaf in zip(call.names(), call.leaves, strict=True)}
        because = call.because() if call.program is None else ""
        own = Description.of(call.kind, layouts, _number(call), because)
        raise InputMismatchError(explain_kind(self._exchange.ranks, self._exchange.all_objects(own)))

    def _check_content(self, call: CheckedCall) -> None:
        leaves = enumerate(call.leaves)
        tensors = {place: leaf for place, leaf in leaves if isinstance(leaf, torch.Tensor) and not leaf.is_meta}
        if not tensors:
            return
        own = b"".join(content_hash(_local(tensor)) for tensor in tensors.values())
        everyone = self._exchange.all_bytes(own)
        for index, (place, tensor) in enumerate(tensors.items()):
            hashes = [table[index * SIZE : (index + 1) * SIZE] for table in everyone]
            for ranks in _holding_the_same(tensor, self._exchange.ranks):
                odd, usual = minority([hashes[rank] for rank in ranks])
                if odd:
                    named = [self._exchange.ranks[ranks[at]] for at in (usual[0], *odd)]
                    raise InputMismatchError(explain_content(call.names()[place], tensor, named))


def _number(call: CheckedCall) -> int:
    return -1 if call.program is None else call.program


def _layout(leaf: object) -> str:
    """The placements and mesh of a DTensor; "" for anything else."""
    if not isinstance(leaf, DTensor):
        return ""
    return f"DTensor {tuple(map(str, leaf.placements))} on mesh {tuple(leaf.device_mesh.shape)}"


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def _holding_the_same(tensor: torch.Tensor, ranks: Sequence[int]) -> list[list[int]]:
    """Sets of ranks, by position in ``ranks``, that must have the same part of ``tensor``."""
    if not isinstance(tensor, DTensor):
        return [list(range(len(ranks)))]
    if tensor.device_mesh.mesh.flatten().tolist() != list(ranks) or any(p.is_partial() for p in tensor.placements):
        return []
    shape = tuple(tensor.device_mesh.shape)
    sets: dict[tuple[int, ...], list[int]] = {}
    for place in range(len(ranks)):
        coordinate = coordinate_of(place, shape)
        key = tuple(c for c, placement in zip(coordinate, tensor.placements, strict=True) if is_shard(placement))
        sets.setdefault(key, []).append(place)
    return list(sets.values())
