"""PowerSGD by torch's own communication hook of DistributedDataParallel, on tensors that are no gradients of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from autopar.runtime.comm.groups import AxisGroup

from .pending import Pending, Sender

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


class _Chain:
    """The hook's future as a work."""

    def __init__(self, future: Any) -> None:
        self.is_completed, self.wait = future.done, future.wait


class PowerMean:
    """The mean by low-rank products. Tensors that start together are a bucket of the hook, which keeps for each what
    was lost, and the last products to begin with. ``repeats``: a bucket may be sent again, as if it had not been."""

    def __init__(self, rank: int, repeats: bool = False) -> None:
        self._repeats = repeats
        self._hook = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=rank, start_powerSGD_iter=_FIRST, min_compression_rate=1
        )
        self._hook.iter = _FIRST
        self._buckets: dict[tuple[str, ...], int] = {}

    def start(self, values: Mapping[str, torch.Tensor]) -> Sender:
        """The means, which are to be waited for at once: the hook computes between two sends."""
        number = self._buckets.setdefault(tuple(values), len(self._buckets))
        before = self._memories() if self._repeats else None
        sizes, shapes = [v.numel() for v in values.values()], [v.shape if v.dim() else (1,) for v in values.values()]

        def send(peers: AxisGroup) -> Pending:
            if peers.size == 1 or not values:
                return Pending([], lambda: {name: value.clone() for name, value in values.items()})
            if before is not None:
                self._remember(before)
            self._hook.process_group = peers.group
            flat = torch.cat([value.reshape(-1) for value in values.values()])
            parts = [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]
            bucket: Any = _Bucket(number, flat, parts)
            chain = _Chain(powerSGD_hook.powerSGD_hook(self._hook, bucket))
            means = {name: part.view(values[name].shape) for name, part in zip(values, parts, strict=True)}
            return Pending([chain], lambda: means)

        return send

    def _memories(self) -> Any:
        hook = self._hook
        kept = [{number: value.clone() for number, value in memory.items()} for memory in _kept_by(hook)]
        return kept, hook.rng.get_state()

    def _remember(self, before: Any) -> None:
        kept, drawn = before
        for memory, values in zip(_kept_by(self._hook), kept, strict=True):
            memory.clear()
            memory.update({number: value.clone() for number, value in values.items()})
        self._hook.rng.set_state(drawn)

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


def _kept_by(hook: powerSGD_hook.PowerSGDState) -> tuple[dict[int, torch.Tensor], ...]:
    return hook.error_dict, hook.p_memory_dict, hook.q_memory_dict
