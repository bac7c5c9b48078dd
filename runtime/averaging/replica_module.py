"""The parallel module of one replica among several."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autopar.errors import AutoparError
from autopar.runtime.calls.call import Call
from autopar.runtime.calls.compiled import Compile, OutputsWanted
from autopar.runtime.calls.programs import AnyCall
from autopar.runtime.comm.groups import MeshGroups
from autopar.runtime.execute.randomness import signed_seed
from autopar.runtime.inputs.sampler import PartOf
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.state.parameters import local_of, shared_seed
from autopar.sync import Gossip, LocalSGD

from .averaging import Averaging, equalise
from .replicas import Replicas
from .rows import OwnPart, own_rows


def _dividing(name: str) -> Callable[..., Any]:
    """The method ``name`` of a parallel module, for the global batch: this replica takes its rows."""
    method = getattr(ParallelModule, name)

    @functools.wraps(method)
    def call(self: ReplicaModule, *args: Any, **kwargs: Any) -> Any:
        with self._own_rows(args, kwargs) as (own_args, own_kwargs):
            return method(self, *own_args, **own_kwargs)

    return call


class ReplicaModule(ParallelModule):
    """A :class:`ParallelModule` on the mesh inside one replica, which ``sync`` keeps together with the others.

    Every rank passes the same global batch. What trains (``step``, calls with gradients enabled) takes this replica's
    rows of it, and outputs and losses are those of these rows; DTensors, as ``dataloader`` and ``from_local`` give
    them, are this replica's already. Calls without gradients compute the whole batch on every replica, with its own
    weights: between exchanges these differ. Replica r draws the random numbers of a training with a seed greater by r.
    """

    _averaging: Averaging | None
    _replicas: Replicas
    _common_seed: int
    _divides: bool

    def __init__(
        self,
        module: nn.Module,
        replicas: Replicas,
        compile: Compile,
        sync: LocalSGD | Gossip,
        *,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        common = shared_seed(replicas.whole, seed)
        super().__init__(module, replicas.own.mesh, compile, seed=common, **options)
        self.__dict__.update(_replicas=replicas, _common_seed=common, _divides=True, _averaging=None)
        self._random.seed = signed_seed(common + replicas.index)
        named = (*self.named_parameters(), *self.named_buffers())
        with torch.no_grad():
            equalise([local_of(tensor) for _, tensor in named if not tensor.is_meta], replicas)
        self._averaging = Averaging(self, sync, replicas)

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplicaModule:
        """A copy takes no part in exchanges."""
        copied = super().__deepcopy__(memo)
        assert isinstance(copied, ReplicaModule)
        shared = {name: self.__dict__[name] for name in ("_replicas", "_common_seed", "_divides")}
        copied.__dict__.update(shared, _averaging=None)
        return copied

    @property
    def replica(self) -> int:
        """The index of this replica on the outermost axis of the mesh, among those that are left."""
        return self._replicas.index

    @property
    def replicas(self) -> int:
        """How many there are, or are left."""
        return self._replicas.count

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of all replicas that are left, row-major."""
        return tuple(self._replicas.whole.mesh.mesh[list(self._replicas.members.present)].flatten().tolist())

    @property
    def sync_text(self) -> str:
        """``Options(sync=...)`` as text, as far as it is of numbers."""
        if self._averaging is None:
            return ""
        # As checkpoints have it that were written before there was a patience.
        return repr(replace(self._averaging.sync, patience=None)).replace(", patience=None", "")

    @property
    def autopar_averaging(self) -> Averaging | None:
        """For autopar's own use: the exchanges, which checkpoints save; None for a copy."""
        return self._averaging

    step = _dividing("step")
    local_batch = _dividing("local_batch")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        with self._own_rows(args, kwargs) as (own_args, own_kwargs):
            return super().forward(*own_args, **own_kwargs)

    def prepare(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        outputs: OutputsWanted = "all",
        *,
        grad: bool = True,
    ) -> AnyCall:
        if not grad:
            return super().prepare(args, kwargs, outputs, grad=False)
        with self._own_rows(args, kwargs) as (own_args, own_kwargs):
            return super().prepare(own_args, own_kwargs, outputs, grad=True)

    def own_rows(self, *args: Any, **kwargs: Any) -> Any:
        """This replica's rows of the tensors of a global batch, such as labels for a loss computed from outputs: a dict
        for keyword inputs, the tensor or a tuple for positional ones."""
        positional, keywords = own_rows(args, kwargs, self.replica, self.replicas)
        if kwargs:
            return keywords
        return positional[0] if len(positional) == 1 else positional

    @contextmanager
    def _own_rows(self, args: Any, kwargs: Mapping[str, Any]) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """The inputs of a call divided once, however many methods it goes through."""
        if not self._divides or self._is_whole:
            yield tuple(args), dict(kwargs)
            return
        self._divides = False
        try:
            plans = not self._weights.is_placed
            yield own_rows(tuple(args), kwargs, self.replica, self.replicas, plans=plans)
        finally:
            self._divides = True

    @property
    def _own_part(self) -> PartOf:
        return OwnPart(self._replicas.members)

    def _loader_seed(self) -> int:
        return self._common_seed

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As of any parallel module. What exchanges kept is forgotten: they begin from the mean of what is loaded."""
        if self._averaging is not None:
            self._averaging.forget()
        return super().load_state_dict(state_dict, strict, assign)

    @contextmanager
    def full_params(self, *, rank0_only: bool = False, writeback: bool = False) -> Iterator[nn.Module]:
        """As of any parallel module, on this replica. After ``writeback`` exchanges begin anew, as after loading."""
        with super().full_params(rank0_only=rank0_only, writeback=writeback) as whole:
            yield whole
        if writeback and self._averaging is not None:
            self._averaging.forget()

    @property
    def autopar_inside(self) -> MeshGroups:
        """For autopar's own use: the groups inside the replica, in the plan's shape."""
        return self._groups

    def autopar_changed_buffers(self) -> list[str]:
        """For autopar's own use: the names of the buffers of floating point that the programs so far change, such as
        running statistics."""
        names: dict[str, None] = {}
        for _, call in self._programs.calls():
            if isinstance(call, Call):
                slots = list(call.program.results)
            else:
                slots = [result.slot for result in call.program.results]
            names |= {slot.target: None for slot in slots if slot.kind == "mutation" and slot.dtype.is_floating_point}
        return sorted(names)

    def average_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The mean of ``loss``, or of any tensor, over the replicas that are left, for a report. Collective over all
        ranks. Raises :class:`FaultError` for what exchanges raise it for."""
        if self._averaging is None:
            raise AutoparError("a copy of a replica takes no part in exchanges: ask the model that is trained")
        return self._averaging.mean_of(loss.detach())
