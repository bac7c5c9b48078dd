"""A small training, under ``Options(sync=...)`` on local processes, and as replicas in one process."""

from __future__ import annotations

import copy
import math
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

import autopar
from autopar.runtime import run_local

ROWS, STEPS = 7, 9
Weights = dict[str, torch.Tensor]
Exchange = Callable[[list[nn.Module], int], None]


class Tied(nn.Module):
    """Odd sizes, a tied weight, a vector and a scalar."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.inside = nn.Linear(5, 9, dtype=dtype)
        self.middle = nn.Linear(9, 9, dtype=dtype)
        self.outside = nn.Linear(9, 9, dtype=dtype)
        self.outside.weight = self.middle.weight
        self.scale = nn.Parameter(torch.tensor(0.7, dtype=dtype))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.middle(self.inside(x).tanh()).tanh()
        return ((self.outside(hidden) * self.scale - y) ** 2).mean()


class Normed(nn.Module):
    """Running statistics, which replicas have of their own rows."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(5, 8, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(8, dtype=torch.float64)
        self.outside = nn.Linear(8, 9, dtype=torch.float64)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ((self.outside(self.norm(self.inside(x)).relu()) - y) ** 2).mean()


def batches(steps: int = STEPS, rows: int = ROWS, dtype: torch.dtype = torch.float64) -> list[dict[str, torch.Tensor]]:
    """Other rows at each step."""
    source = torch.Generator().manual_seed(3)
    draw = [torch.randn(rows, 14, generator=source, dtype=torch.float64).to(dtype) for _ in range(steps)]
    return [{"x": each[:, :5], "y": each[:, 5:]} for each in draw]


def made(kind: Callable[[], nn.Module] = Tied) -> nn.Module:
    """The model, the same each time."""
    torch.manual_seed(0)
    return kind()


def adam(parameters: Any) -> torch.optim.Optimizer:
    """With moments of their own on each replica."""
    return torch.optim.AdamW(parameters, lr=0.01)


@dataclass(frozen=True)
class Leaving:
    """The last rank dies before its optimizer's step ``dies``, and is ``missed`` in the exchange that begins after that
    step or was in flight. The others have ``noticed`` when this exchange ends, and divide later batches."""

    dies: int
    missed: int
    noticed: int


def simulated(
    exchange: Exchange,
    replicas: int,
    data: Sequence[dict[str, torch.Tensor]],
    kind: Callable[[], nn.Module] = Tied,
    optimizer: Callable[[Any], torch.optim.Optimizer] = adam,
    leaving: Leaving | None = None,
) -> list[Weights]:
    """The weights and buffers of each of so many replicas in one process, after ``exchange`` has followed each step.
    The last of them has left when the exchange of the step ``leaving.missed`` begins."""
    model = made(kind)
    models = [copy.deepcopy(model) for _ in range(replicas)]
    optimizers = [optimizer(each.parameters()) for each in models]
    parts = replicas
    for step, batch in enumerate(data, 1):
        for index, (own, stepped) in enumerate(zip(models, optimizers, strict=True)):
            rows = {name: value.tensor_split(parts)[index] for name, value in batch.items()}
            stepped.zero_grad()
            own(**rows).backward()
            stepped.step()
        if leaving is not None and step == leaving.missed:
            models, optimizers = models[:-1], optimizers[:-1]
        if leaving is not None and step == leaving.noticed:
            parts = replicas - 1
        with torch.no_grad():
            exchange(models, step)
    return [{name: value.detach().clone() for name, value in each.state_dict().items()} for each in models]


def trained(
    sync: Any,
    mesh: tuple[int, ...],
    data: Sequence[dict[str, torch.Tensor]],
    kind: Callable[[], nn.Module] = Tied,
    *,
    own_optimizer: bool = False,
    meanwhile: Callable[[], AbstractContextManager[Any]] = nullcontext,
    leaving: Leaving | None = None,
    **options: Any,
) -> list[Weights]:
    """The whole weights and buffers of each replica, trained by autopar on local processes. ``own_optimizer``: made by
    the user, over the DTensors; ``meanwhile``: open on every rank. Of replicas from which ranks are ``leaving``,
    nothing is returned."""

    def work(rank: int, world: int) -> Weights | None:
        with meanwhile():
            try:
                return train(rank, world)
            except autopar.FaultError:
                if leaving is None or rank < world - inside:
                    raise
                return None

    def train(rank: int, world: int) -> Weights:
        model = made(kind)
        if rank:  # The first rank's weights are taken.
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
        parallel = autopar.parallelize(model, mesh, data[0], options=autopar.Options(sync=sync, **options))
        optimizer = adam(parallel.parameters()) if own_optimizer else parallel.optimizer(torch.optim.AdamW, lr=0.01)
        for step, batch in enumerate(data, 1):
            optimizer.zero_grad()
            parallel.step(**batch)
            if leaving is not None and step == leaving.dies and rank == world - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
        return whole(parallel)

    inside = math.prod(mesh[1:])
    found = run_local(work, math.prod(mesh), timeout=120.0, backend="gloo", may_die=leaving is not None)
    return [each for each in found[::inside] if each is not None]


def whole(parallel: autopar.ParallelModule) -> Weights:
    """Weights and buffers of the replica of this rank."""
    return {name: parallel.full_tensor(value).clone() for name, value in parallel.state_dict().items()}


def assert_same(found: Sequence[Weights], expected: Sequence[Weights], tolerance: float = 1e-9) -> None:
    """Compares replicas one by one."""
    assert len(found) == len(expected)
    for index, (own, other) in enumerate(zip(found, expected, strict=True)):
        for name, value in other.items():
            named = partial("{0} ({name} of replica {index})".format, name=name, index=index)
            torch.testing.assert_close(own[name], value, rtol=tolerance, atol=tolerance, msg=named)
