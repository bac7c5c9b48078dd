"""PowerSGD by torch's own communication hook of DistributedDataParallel, on tensors that are no gradients of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from autopar.runtime.comm.groups import AxisGroup

from .pending import Pending
from .waits import awaited

# The hook refuses to compress in the first two calls, in which DDP rebuilds its buckets; there is nothing to rebuild.
_FIRST = 2


@dataclass
class _Bucket:
    """What the hook asks of a ``dist.GradBucket``: ``flat``, and ``parts``, which are views of it."""

    number: int
    flat: torch.Tensor
    parts: Sequence[torch.Tensor]

    def index(self) -> int:
        return self.number

    def buffer(self) -> torch.Tensor:
        return self.flat

    def gradients(self) -> Sequence[torch.Tensor]:
        return self.parts

    def is_last(self) -> bool:
        return True


class PowerMean:
    """The mean by low-rank products. Tensors that start together are a bucket of the hook, which keeps for each what
    was lost, and the last products to begin with."""

    def __init__(self, peers: AxisGroup, rank: int) -> None:
        self._peers = peers
        self._hook = powerSGD_hook.PowerSGDState(
            peers.group, matrix_approximation_rank=rank, start_powerSGD_iter=_FIRST, min_compression_rate=1
        )
        self._hook.iter = _FIRST
        self._buckets: dict[tuple[str, ...], int] = {}

    def start(self, values: Mapping[str, torch.Tensor]) -> Pending:
        """The means, which are waited for here: the hook computes between two sends."""
        if self._peers.size == 1 or not values:
            return Pending([], lambda: {name: value.clone() for name, value in values.items()})
        number = self._buckets.setdefault(tuple(values), len(self._buckets))
        flat = torch.cat([value.reshape(-1) for value in values.values()])
        sizes, shapes = [v.numel() for v in values.values()], [v.shape if v.dim() else (1,) for v in values.values()]
        parts = [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]
        bucket: Any = _Bucket(number, flat, parts)
        awaited(powerSGD_hook.powerSGD_hook(self._hook, bucket).wait)
        means = {name: part.view(values[name].shape) for name, part in zip(values, parts, strict=True)}
        return Pending([], lambda: means)

    def state(self) -> dict[str, Any]:
        hook = self._hook
        memories = {"error": hook.error_dict, "p": hook.p_memory_dict, "q": hook.q_memory_dict}
        return {"buckets": [list(names) for names in self._buckets]} | {n: dict(m) for n, m in memories.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        hook = self._hook
        self._buckets = {tuple(names): number for number, names in enumerate(state["buckets"])}
        hook.error_dict, hook.p_memory_dict, hook.q_memory_dict = (dict(state[name]) for name in ("error", "p", "q"))
        for _ in hook.q_memory_dict:  # One draw for each bucket's first products.
            hook.rng.randint(1_000_000_000)
