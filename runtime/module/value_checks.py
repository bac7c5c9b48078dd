"""``Options(check_every=N)``: at every Nth step, by ``model.step`` or ``loss.backward()``, whether replicas are still
equal and values still finite.

Replicas of a parameter are equal bit by bit, since every rank computes them from the same numbers; a flipped bit, or a
rank that skipped its optimizer, makes them differ for good, and nothing else shows it. NaN and infinities are looked
for in the loss and the gradients. If there are any, the step runs once more with every operation's results looked at,
to name where they begin.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.errors import ValueFaultError
from autopar.ir.placements import is_shard
from autopar.ops.index_range import PROGRAM_FILE
from autopar.runtime.calls.programs import AnyCall
from autopar.runtime.comm.exchange import Exchange
from autopar.runtime.comm.minority import minority, named
from autopar.runtime.execute.randomness import RandomState
from autopar.runtime.execute.section_code import instruction_at
from autopar.runtime.inputs.content_hash import content_hash
from autopar.runtime.torch_internals.dtensors import local_tensor
from autopar.torch_internals.modes import TorchDispatchMode
from autopar.torch_internals.trees import tree_flatten

# By kind and name, of this rank's parts.
Gradients = dict[tuple[str, str], torch.Tensor]
# How many parameters a message lists.
# Chosen.
_LISTED = 4


@dataclass
class ValueChecks:
    """The checks of one module: at every ``every``-th step (None: never); what is not finite is an error, or the step
    is skipped (``nonfinite``). ``steps``: how many there were."""

    every: int | None = None
    nonfinite: Literal["raise", "skip"] = "raise"
    steps: int = 0

    def due(self) -> bool:
        """Counts a step; whether it is to be checked."""
        self.steps += 1
        return self.every is not None and self.steps % self.every == 0


def checked_step(
    checks: ValueChecks,
    call: AnyCall,
    leaves: Sequence[Any],
    scale: float,
    module: nn.Module,
    random: RandomState,
    exchange: Exchange,
) -> torch.Tensor:
    """``call.step(leaves, scale)`` with both checks. Raises :class:`ValueFaultError`, on every rank. A step that is
    skipped leaves no ``.grad``, which optimizers of torch take as nothing to do, and the buffers of before. Collective.
    """
    compare_replicas(module, exchange)
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    drawn = (random.steps, random.evaluations)
    loss = call.step(leaves, scale)
    values = [loss, *(_local(p.grad) for p in module.parameters() if p.grad is not None)]
    if not any(map(any, exchange.all_bytes(bytes([not all(map(_is_finite, values))])))):
        return loss
    _restore(module, buffers)
    random.steps, random.evaluations = drawn
    looking = _Looking()
    with looking:
        call.step(leaves, scale)
    _restore(module, buffers)
    for parameter in module.parameters():
        parameter.grad = None
    if checks.nonfinite == "raise":
        found = _not_finite_before(module, leaves) or looking.first
        raise ValueFaultError(_explain(exchange.ranks, exchange.all_objects(found), checks.steps))
    return loss


class BackwardCheck:
    """The checks of a call that ``loss.backward()`` differentiates: the first begins the call, the second comes with
    its gradients. See :func:`checked_step`."""

    def __init__(self, checks: ValueChecks, module: nn.Module, exchange: Exchange, leaves: Sequence[Any]) -> None:
        compare_replicas(module, exchange)
        self._checks, self._step, self._module, self._exchange = checks, checks.steps, module, exchange
        self._leaves, self._loss = leaves, torch.zeros(())
        self._buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}

    def saw(self, loss: torch.Tensor | None) -> None:
        """Takes the model's own loss, if it returns one."""
        if loss is not None:
            self._loss = _local(loss)

    def __call__(
        self, gradients: Gradients, tangents: Sequence[torch.Tensor], again: Callable[[], object]
    ) -> Gradients:
        """The ``gradients`` if they are finite, or none if the step is skipped. ``tangents``: what backward began with;
        ``again`` repeats the call, and its backward. Raises :class:`ValueFaultError`, on every rank. Collective."""
        values = [self._loss, *gradients.values()]
        if not any(map(any, self._exchange.all_bytes(bytes([not all(map(_is_finite, values))])))):
            return gradients
        looking = _Looking()
        with torch.no_grad(), looking:
            again()
        _restore(self._module, self._buffers)
        if self._checks.nonfinite == "raise":
            outside = "" if all(map(_is_finite, tangents)) else "in the gradient that the loss outside of the model has"
            found = _not_finite_before(self._module, self._leaves) or outside or looking.first
            raise ValueFaultError(_explain(self._exchange.ranks, self._exchange.all_objects(found), self._step))
        for parameter in self._module.parameters():  # Of earlier calls of the step.
            parameter.grad = None
        return {}


def compare_replicas(module: nn.Module, exchange: Exchange) -> None:
    """Raises :class:`ValueFaultError`, on every rank, if ranks that hold the same part of a parameter hold other values
    of it. Collective."""
    own = {}
    for name, parameter in module.named_parameters():
        part = _part(parameter)
        if part is not None:
            own[name, part] = content_hash(_local(parameter))
    everyone: list[dict[tuple[str, tuple[int, ...]], bytes]] = exchange.all_objects(own)
    found = []
    for key in dict.fromkeys(key for each in everyone for key in each):
        holders = [(rank, each[key]) for rank, each in zip(exchange.ranks, everyone, strict=True) if key in each]
        odd, others = minority([value for _, value in holders])
        if odd:
            found.append((key[0], [holders[at][0] for at in odd], [holders[at][0] for at in others]))
    if found:
        lines = [f"{name}: {named(odd)}, unlike {named(others)}" for name, odd, others in found[:_LISTED]]
        more = f"\n  and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
        raise ValueFaultError(
            f"replicas of {found[0][0]} differ: {named(found[0][1])} {'has' if len(found[0][1]) == 1 else 'have'} "
            f"other values than {named(found[0][2])}. A rank wrote to it, skipped optimizer.step(), steps with other "
            "settings, or its memory is faulty; load the last checkpoint\n  " + "\n  ".join(lines) + more
        )


def _part(parameter: torch.Tensor) -> tuple[int, ...] | None:
    """Which part of ``parameter`` this rank holds: equal on ranks that hold the same one; None if it holds none."""
    if not isinstance(parameter, DTensor):
        return ()
    coordinate = parameter.device_mesh.get_coordinate()
    if coordinate is None or any(placement.is_partial() for placement in parameter.placements):
        return None
    return tuple(c for c, placement in zip(coordinate, parameter.placements, strict=True) if is_shard(placement))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return (local_tensor(tensor) if isinstance(tensor, DTensor) else tensor).detach()


def _is_finite(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def _restore(module: nn.Module, buffers: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, value in buffers.items():
            module.get_buffer(name).copy_(value)


def _not_finite_before(module: nn.Module, leaves: Sequence[Any]) -> str:
    """What the step began with that is not finite; "" if all is."""
    for name, parameter in module.named_parameters():
        if not _is_finite(_local(parameter)):
            return f"in the parameter {name}, before the step"
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and bool(torch.isnan(_local(leaf)).any()):
            return f"in input {place} of the batch"
    return ""


class _Looking(TorchDispatchMode):
    """Looks for the first operation whose result has NaN though nothing it reads has, or else has an infinity."""

    def __init__(self) -> None:
        super().__init__()
        self._nan = self._infinity = ""

    @property
    def first(self) -> str:
        return self._nan or self._infinity

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = _floating((args, kwargs)) if not self._nan else []
        had_nan = any(bool(torch.isnan(tensor).any()) for tensor in read)
        all_finite = not self._infinity and all(map(_is_finite, read))
        results = func(*args, **(kwargs or {}))
        if not self._nan and not had_nan:
            made = _floating(results)
            if any(bool(torch.isnan(tensor).any()) for tensor in made):
                self._nan = _here(func)
            elif all_finite and read and not all(map(_is_finite, made)):
                self._infinity = _here(func)
        return results


def _floating(values: Any) -> list[torch.Tensor]:
    return [v for v in tree_flatten(values)[0] if type(v) is torch.Tensor and v.is_floating_point() and v.numel()]


def _here(func: Any) -> str:
    """The instruction that runs; "" for what runs outside of a program, such as a message that arrives."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(PROGRAM_FILE):
        frame = frame.f_back
    return "" if frame is None else f"in {instruction_at(frame.f_code.co_filename, frame.f_lineno)}"


def _explain(ranks: Sequence[int], everyone: Sequence[str], step: int) -> str:
    places: dict[str, list[int]] = {}
    for rank, place in zip(ranks, everyone, strict=True):
        if place:
            places.setdefault(place, []).append(rank)
    if not places:
        return (
            f"step {step} has a loss or gradients that are not finite, and running it again did not find where they "
            "begin: with Options(compile=False) every operation can be looked at"
        )
    lines = [f"{place} on {named(own)}" for place, own in places.items()]
    first = f"step {step} computes values that are not finite (NaN or infinite); they begin {lines[0]}"
    return first + "".join(f"\n  and {line}" for line in lines[1:])
