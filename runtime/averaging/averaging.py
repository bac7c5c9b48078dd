"""Exchanges after the steps of the optimizers of one model.

Users create optimizers of any kind, so torch's hooks for all of them are used: before the first step of one with
parameters of the model its exchanges are made, and after each step they take theirs. Each optimizer counts its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autopar.errors import FaultError
from autopar.runtime.comm.exchange import Exchange
from autopar.runtime.comm.groups import MeshGroups
from autopar.runtime.comm.waiting import WAITING
from autopar.runtime.torch_internals.profiling import span
from autopar.sync import Gossip, LocalSGD

from .gossip import Mixing
from .local_steps import LocalSteps
from .pieces import Piece, buffer_pieces, parameter_pieces
from .replicas import Replicas


class Exchanges(Protocol):
    """The exchanges of the parameters of one optimizer."""

    count: int

    def step(self) -> None:
        """Counts a step of the optimizer, after it."""
        ...

    def settle(self) -> None:
        """Waits for what is in flight."""
        ...

    def state(self) -> dict[str, Any]:
        """What the next steps depend on, beside the parameters."""
        ...

    def load(self, state: Mapping[str, Any]) -> None:
        """Restores a state of the same parameters."""
        ...


class Averaging:
    """The exchanges of ``model`` under ``sync``, by the names of each optimizer's parameters. ``buffers``: the names of
    the buffers that training changes; ``groups``: those inside the replica, in the plan's shape."""

    def __init__(
        self,
        model: nn.Module,
        sync: LocalSGD | Gossip,
        replicas: Replicas,
        buffers: Callable[[], list[str]],
        groups: Callable[[], MeshGroups],
    ) -> None:
        self.sync, self.replicas = sync, replicas
        self._model = weakref.ref(model)
        self._buffers, self._groups = buffers, groups
        self._exchanges: dict[tuple[str, ...], Exchanges] = {}
        self._saved: dict[tuple[str, ...], Mapping[str, Any]] = {}
        self._inside = Exchange(replicas.own)
        for handle in (
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ):
            weakref.finalize(model, handle.remove)

    def _before_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        names = self._names(optimizer)
        if names and names not in self._exchanges:
            self._exchanges[names] = self._make(names)

    def _after_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        exchanges = self._exchanges.get(self._names(optimizer))
        if exchanges is None:
            return
        try:
            with torch.no_grad(), span("autopar.exchange()"):
                exchanges.step()
        except RuntimeError as error:
            raise FaultError(self._lost(exchanges.count, error)) from error

    def _lost(self, step: int, error: Exception) -> str:
        own, count = self.replicas.index, self.replicas.count
        first = str(error).strip().split("\n")[0]
        return (
            f"replica {own} of {count} lost the others in the exchange after optimizer step {step}: {first}. One of "
            "them has left, or cannot be reached. Start again from a checkpoint: fewer replicas begin from its first"
        )

    def _names(self, optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
        """The parameters of the model that ``optimizer`` steps, in the model's order."""
        model = self._model()
        if model is None:
            return ()
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return tuple(name for name, parameter in model.named_parameters() if id(parameter) in stepped)

    def _make(self, names: tuple[str, ...]) -> Exchanges:
        model = self._model()
        assert model is not None
        parameters, groups = dict(model.named_parameters()), self._groups()
        pieces = parameter_pieces({name: parameters[name] for name in names}, groups)
        # Buffers go with the first optimizer.
        changed = [] if self._exchanges else self._buffers()
        buffers = buffer_pieces({name: _buffer_reader(model, name) for name in changed}, groups)
        exchanges = self._exchanges_of(pieces, buffers)
        if names in self._saved:
            exchanges.load(self._saved.pop(names))
        return exchanges

    def _exchanges_of(self, pieces: tuple[Piece, ...], buffers: tuple[Piece, ...]) -> Exchanges:
        if isinstance(self.sync, Gossip):
            return Mixing(self.sync, pieces, buffers, self.replicas.peers)
        return LocalSteps(self.sync, pieces, buffers, self.replicas.peers, self._everywhere)

    def _everywhere(self, holds: bool) -> bool:
        return all(map(any, self._inside.all_bytes(bytes([holds]))))

    def settle(self) -> None:
        """Waits for what is in flight, so that the process may leave or save."""
        for exchanges in self._exchanges.values():
            exchanges.settle()

    def state(self) -> list[dict[str, Any]]:
        """The state of this rank's exchanges, for a rank in its place."""
        made = [{"names": list(names), "state": each.state()} for names, each in self._exchanges.items()]
        waiting = [{"names": list(names), "state": dict(state)} for names, state in self._saved.items()]
        return made + waiting

    def load(self, states: list[Mapping[str, Any]]) -> None:
        """Restores a state of :meth:`state`: now, or before the first step of each optimizer."""
        self._saved = {tuple(each["names"]): each["state"] for each in states}
        for names, exchanges in self._exchanges.items():
            if names in self._saved:
                exchanges.load(self._saved.pop(names))


def equalise(tensors: Iterable[torch.Tensor], replicas: Replicas) -> None:
    """Gives the first rank of each replica the values of ``tensors`` of the first replica's. Placing them gives them to
    the other ranks. Collective over these."""
    first = replicas.own.over(replicas.own.axes).index == 0
    if replicas.count == 1 or not first:
        return
    for tensor in tensors:
        values = tensor.contiguous()
        sent = values.view(-1).view(torch.uint8)
        WAITING.during(partial(dist.broadcast, sent, group=replicas.peers.group, group_src=0))
        tensor.copy_(values)


def _buffer_reader(model: nn.Module, name: str) -> Callable[[], torch.Tensor]:
    return lambda: model.get_buffer(name)
