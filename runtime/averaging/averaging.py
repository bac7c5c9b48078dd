"""Exchanges after the steps of the optimizers of one model.

Users create optimizers of any kind, so torch's hooks for all of them are used: before the first step of one with
parameters of the model its exchanges are made, and after each step they take theirs. Each optimizer counts its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
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

from .agreed_rounds import LeftError, rounds_of
from .gossip import Mixing
from .local_steps import LocalSteps, wide
from .mean import WholeMean
from .pieces import Piece, buffer_pieces, own_pieces, parameter_pieces, spread
from .replicas import Replicas
from .waits import LostPeersError, awaited


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


class Trained(Protocol):
    """What exchanges ask of a replica's module."""

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """Those that optimizers step."""
        ...

    def get_buffer(self, target: str) -> torch.Tensor:
        """By its name."""
        ...

    def autopar_changed_buffers(self) -> list[str]:
        """The names of the buffers that training changes."""
        ...

    @property
    def autopar_inside(self) -> MeshGroups:
        """The groups inside the replica, in the plan's shape."""
        ...


class Averaging:
    """The exchanges of ``model`` under ``sync``, by the names of each optimizer's parameters. Torch's hooks hold this,
    so it does not hold the model."""

    def __init__(self, model: Trained, sync: LocalSGD | Gossip, replicas: Replicas) -> None:
        self.sync, self.replicas = sync, replicas
        self._model = weakref.ref(model)
        # Replicas have equal parameters until one of their optimizers steps.
        self._have_stepped = False
        self._exchanges: dict[tuple[str, ...], Exchanges] = {}
        self._saved: dict[tuple[str, ...], Mapping[str, Any]] = {}
        self._inside = Exchange(replicas.own)
        self._rounds = rounds_of(replicas, sync.patience)
        for handle in (
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ):
            weakref.finalize(model, handle.remove)

    def _before_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        names = self._names(optimizer)
        if names and names not in self._exchanges:
            with self._faults(lambda: 0):
                self._exchanges[names] = self._make(names)

    def _after_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        exchanges = self._exchanges.get(self._names(optimizer))
        if exchanges is None:
            return
        self._have_stepped = True
        with self._faults(lambda: exchanges.count), torch.no_grad(), span("autopar.exchange()"):
            exchanges.step()

    @contextmanager
    def _faults(self, steps: Callable[[], int]) -> Iterator[None]:
        """Raises :class:`FaultError` for a replica that is lost; ``steps``: of the optimizer, so far."""
        try:
            yield
        except (LostPeersError, dist.DistError) as error:
            raise FaultError(self._lost(steps(), error)) from error

    def _lost(self, step: int, error: Exception) -> str:
        own, count = self.replicas.members.own, self.replicas.peers.size
        first = str(error).strip().split("\n")[0]
        if isinstance(error, LeftError):
            return (
                f"replica {own} of {count} has left, and the others have gone on without it since the exchange after "
                f"optimizer step {step}: {first}. It cannot come back; a restart of all from a checkpoint takes it in"
            )
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
        parameters, groups = dict(model.named_parameters()), model.autopar_inside
        pieces = parameter_pieces({name: parameters[name] for name in names}, groups)
        # Buffers go with the first optimizer.
        changed = [] if self._exchanges else model.autopar_changed_buffers()
        buffers = buffer_pieces({name: self._buffer_reader(name) for name in changed}, groups)
        if self._have_stepped and names not in self._saved:
            self._meet(pieces)
        exchanges = self._exchanges_of(pieces, buffers)
        if names in self._saved:
            exchanges.load(self._saved.pop(names))
        return exchanges

    def _buffer_reader(self, name: str) -> Callable[[], torch.Tensor]:
        def read() -> torch.Tensor:
            model = self._model()
            assert model is not None
            return model.get_buffer(name)

        return read

    def _meet(self, pieces: tuple[Piece, ...]) -> None:
        """Gives all replicas the mean of their parameters, since anchors begin equal. Collective over all ranks."""
        own = own_pieces(pieces)
        with torch.no_grad():
            means = self.mean({piece.name: wide(piece.local) for piece in own})
            for piece in own:
                piece.local.copy_(means[piece.name])
            spread(pieces)

    def _exchanges_of(self, pieces: tuple[Piece, ...], buffers: tuple[Piece, ...]) -> Exchanges:
        if isinstance(self.sync, Gossip):
            return Mixing(self.sync, pieces, buffers, self._rounds)
        return LocalSteps(self.sync, pieces, buffers, self._rounds, self._everywhere)

    def _everywhere(self, holds: bool) -> bool:
        return all(map(any, awaited(lambda: self._inside.all_bytes(bytes([holds])))))

    def mean(self, values: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The means of ``values`` over the replicas. Collective over all ranks. Raises :class:`LostPeersError`."""
        return self._rounds.begin("mean", WholeMean().start(values)).wait()

    def call_roll(self) -> None:
        """Finds out who is left, the same on all ranks, if replicas may leave. Collective. Raises
        :class:`FaultError`."""
        if self._rounds.repeats:
            with self._faults(self._steps):
                self.settle()
                self.mean({})

    def _steps(self) -> int:
        return max((each.count for each in self._exchanges.values()), default=0)

    def mean_of(self, value: torch.Tensor) -> torch.Tensor:
        """The mean of one tensor. Raises :class:`FaultError`."""
        with self._faults(self._steps):
            return self.mean({"": value})[""]

    def holds_anywhere(self, holds: bool) -> bool:
        """Whether ``holds`` on some rank of some replica. Collective over all ranks. Raises :class:`FaultError`."""
        with self._faults(self._steps):
            at_this_place = bool(self.mean({"": torch.tensor(float(holds))})[""])
            return not self._everywhere(not at_this_place)

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
        """Restores a state of :meth:`state`: now, or before the first step of each optimizer. What it lacks is
        forgotten."""
        self._saved = {tuple(each["names"]): each["state"] for each in states}
        self.settle()
        self._exchanges = {names: each for names, each in self._exchanges.items() if names in self._saved}
        for names, exchanges in self._exchanges.items():
            exchanges.load(self._saved.pop(names))

    def forget(self) -> None:
        """Forgets what exchanges keep (anchors, momentum, what codes lost, what is in flight), since parameters are
        about to become others. They are made anew at the next step of each optimizer."""
        self.load([])


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
