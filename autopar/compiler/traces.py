"""The traces of a model, and which of them apply to a call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from autopar.errors import PlanMismatchError
from autopar.ir.node import Dim, TensorType, symbol
from autopar.ir.placements import Placements
from autopar.planner.prepare import LossFunction, Prepared, batch_size, circumstances
from autopar.runtime.calls.compiled import OutputsWanted, Request
from autopar.runtime.calls.kind import Leaf
from autopar.runtime.calls.resident import placements_of
from autopar.runtime.calls.signature import flatten_as
from autopar.runtime.comm.groups import AxisGroup
from autopar.trace.lengths import BATCH, Length, Lengths, varying

from .rank_zero import gather_objects

# How many traces are kept.
# Chosen: kinds of calls in one loop are few; not measured.
TRACES = 16
# How often it is tried to leave a length open.
# Chosen: a model that fixes a length does so at every size, and one that fails at one size (shorter than a filter, say)
# seldom fails at the next; each attempt costs a trace.
ATTEMPTS = 2
Key = tuple[bool, bool, OutputsWanted]


@dataclass
class Traces:
    """The traces of one model, the oldest first. Ranks add and find the same ones."""

    _made: list[tuple[Key, Prepared]] = field(default_factory=list)
    _failed: Counter[tuple[str, int]] = field(default_factory=Counter)

    def add(self, request: Request, base: Prepared) -> None:
        """Keeps the trace of a request."""
        self._made = [*self._made[1 - TRACES :], (_key(request), base)]

    def find(
        self, model: nn.Module, request: Request, loss_fn: LossFunction | None, ranks: AxisGroup
    ) -> Prepared | None:
        """An earlier trace that also applies to this call, up to the batch size; one with open lengths at the lengths
        of the call. None unless every rank has it. Collective."""
        own: tuple[int, Prepared] | None = None
        for index, base in self._like(request):
            applied = _applied(base, model, request, loss_fn)
            if applied is not None:
                own = index, applied
                break
        everyone = gather_objects(ranks, own and own[0])
        return own[1] if own is not None and set(everyone) == {own[0]} else None

    def lengths(self, request: Request) -> Lengths:
        """The lengths in which this call differs from an earlier one, if it differs in nothing else and fewer than
        :data:`ATTEMPTS` have failed to leave one of them open."""
        if batch_size(request.args, request.kwargs) < 2:
            return ()
        for _, base in reversed(list(self._like(request))):
            if not base.graph.symbols or base.lengths:
                continue
            tensors = _tensors(base, request)
            found = None if tensors is None else varying(_types(base), tensors)
            if found and all(self._failed[_place(length)] < ATTEMPTS for length in found):
                return found
        return ()

    def close(self, lengths: Lengths) -> None:
        """Notes that an attempt to leave these open has failed. The next one is at another length, since the trace of
        this call alone serves calls that are like it."""
        self._failed.update(set(map(_place, lengths)))

    def _like(self, request: Request) -> list[tuple[int, Prepared]]:
        """The traces of such requests, those of certain lengths first."""
        key = _key(request)
        found = [(index, base) for index, (made, base) in enumerate(self._made) if made == key]
        return sorted(found, key=lambda entry: bool(entry[1].lengths))


def _key(request: Request) -> Key:
    return request.grad, request.training, request.outputs


def _place(length: Length) -> tuple[str, int]:
    return length.input, length.dim


def _applied(base: Prepared, model: nn.Module, request: Request, loss_fn: LossFunction | None) -> Prepared | None:
    """``base`` as it applies to a call; None if it does not."""
    if base.loss_fn is not loss_fn or base.circumstances != circumstances(model, request.training):
        return None
    if base.traced.reads.changed(model) is not None:
        return None
    tensors = _tensors(base, request)
    if tensors is None:
        return None
    batch = batch_size(request.args, request.kwargs)
    applied = _at_lengths(base, tensors) if base.lengths else base
    if applied is None:
        return None
    # A symbolic size means 2 or more: models may treat a batch of one differently (``squeeze``), without a guard.
    # Guards may be about lengths and the batch together: at other lengths the batch that was traced may not hold.
    as_traced = batch == base.batch and not base.lengths
    holds = as_traced or (batch >= 2 and applied.traced.holds_for(batch))
    return applied if holds and _same_but_batch(applied, tensors, batch) else None


def _at_lengths(base: Prepared, tensors: Mapping[str, torch.Tensor]) -> Prepared | None:
    """``base`` at the lengths of ``tensors``, if these are sizes of 2 or more, equal where a symbol is the same."""
    sizes: dict[str, set[int]] = {name: set() for name in base.lengths}
    for name, kind in _types(base).items():
        if len(kind.shape) != tensors[name].dim():
            return None
        for size, real in zip(kind.shape, tensors[name].shape, strict=True):
            sizes.get(str(size), set()).add(int(real))
    if any(len(found) != 1 or min(found) < 2 for found in sizes.values()):
        return None
    return base.fixed({name: found.pop() for name, found in sizes.items()})


def _types(base: Prepared) -> dict[str, TensorType]:
    """The traced inputs."""
    return {node.target: node.type for node in base.graph.inputs}


def _tensors(base: Prepared, request: Request) -> dict[str, torch.Tensor] | None:
    """The tensors of a request by the names of the traced inputs; None if it is another call: with other constants or
    kinds of inputs, or gradients of inputs that the trace does not compute."""
    signature = base.traced.signature
    try:
        leaves = flatten_as(signature.input_spec, request.args, request.kwargs)
    except PlanMismatchError:
        return None
    gradients = {output.name for output in base.graph.outputs if output.kind == "input_gradient"}
    found = {}
    for index, (name, leaf) in enumerate(zip(signature.input_names, leaves, strict=True)):
        if name is None:
            if Leaf.of(leaf, False) != Leaf.of(signature.constants[index], False):
                return None
        elif not isinstance(leaf, torch.Tensor) or (leaf.requires_grad and name not in gradients):
            return None
        else:
            found[name] = leaf
    return found


def resting_caches(base: Prepared, request: Request) -> dict[str, Placements]:
    """Where the caches of a call of this trace rest, by name; those that do not rest anywhere yet are left out."""
    signature = base.traced.signature
    leaves = flatten_as(signature.input_spec, request.args, request.kwargs)
    named = zip(signature.input_names, leaves, strict=True)
    return placements_of({name: leaf for name, leaf in named if name is not None})


def _same_but_batch(base: Prepared, tensors: Mapping[str, torch.Tensor], batch: int) -> bool:
    """Whether tensors are the traced ones at this batch size."""
    types = _types(base)
    return all(
        tuple(tensor.shape) == tuple(_at(size, batch) for size in types[name].shape)
        and tensor.dtype == types[name].dtype
        for name, tensor in tensors.items()
    )


def _at(size: Dim, batch: int) -> int:
    return size if isinstance(size, int) else int(size.subs(symbol(BATCH), batch))
