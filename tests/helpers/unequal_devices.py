"""Clusters of devices that differ in speed and memory, and a model of which rows are all that fills them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import nn

import autopar
from autopar import Options
from autopar.cluster.description import Cluster, Group
from autopar.plans.plan import Plan
from tests.helpers.planning import slow_devices
from tests.helpers.run_plan import Bench
from tests.search.test_stage_devices import FAST, SLOW

ROWS, LONG, WIDTH = 12, 50, 16


def hardware(*devices: str) -> Cluster:
    """Devices for which only the rows count: small products are as quick for their size as large ones, and messages
    cost next to nothing."""
    kinds = {"S": SLOW, "F": FAST}
    free = {name: replace(kind, processors=0) for name, kind in kinds.items()}
    cluster = slow_devices().with_groups(*(Group(1, free[name]) for name in devices))
    return replace(cluster, links=tuple(replace(link, latency=1e-9, bandwidth=1e12) for link in cluster.links))


class Wide(nn.Module):
    """Few weights, and many values that backward needs; nothing but rows can be divided without messages."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def batch_of(rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, LONG, WIDTH, generator=torch.Generator().manual_seed(0))


def with_memory(cluster: Cluster, *limits: int) -> Cluster:
    """The same devices, of which each has so many bytes, on links so slow that values are moved for nothing but the
    gradients: otherwise each is computed in equal rows, and saved in others."""
    kinds = [cluster.at(rank, 1).device for rank in range(len(limits))]
    pairs = zip(kinds, limits, strict=True)
    bare = (replace(kind, memory_bytes=n, reserve_bytes=0, reserve_fraction=0.0) for kind, n in pairs)
    links = tuple(replace(link, rates={}, latency=1e-5, bandwidth=1e8) for link in cluster.links)
    return replace(cluster, links=links).with_groups(*(Group(1, device) for device in bare))


@cache
def bench() -> Bench:
    return Bench(Wide(), {"x": batch_of()})


@cache
def planned(devices: str, limits: tuple[int, ...] = (), rows: int = ROWS, **options: Any) -> Plan:
    """A plan for devices that are slow or fast, and that may hold so many bytes each: weights and activations are kept
    whole, so that rows are all by which a device can hold less."""
    cluster = with_memory(hardware(*devices), *limits) if limits else hardware(*devices)
    asked = Options(**{"stages": 1, "microbatches": 1, "recompute": "none", "offload": False, "zero": 0, **options})
    batch = bench().batch if rows == ROWS else {"x": batch_of(rows)}
    return autopar.plan(bench().model, (len(devices),), batch, cluster=cluster, options=asked)


def bytes_of(rows: float) -> int:
    """Bytes of a device that has so many rows, and all weights."""
    six, eight = (planned("SS", rows=2 * each).predicted.peak_bytes for each in (6, 8))
    assert six < eight
    return int(six + (rows - 6) * (eight - six) / 2)
