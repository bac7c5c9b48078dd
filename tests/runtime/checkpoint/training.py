"""A small training whose state is awkward to save: odd sizes, tied weights, dropout, buffers, a schedule, a sampler."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.options import Options

WORDS, WIDTH, HIDDEN = 13, 6, 7
BATCH = 8


class Tied(nn.Module):
    """Embedding and head are one parameter, at both ends of the model."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(()))
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.embed(ids)
        x = x + self.dropout(self.down(self.up(x).relu())) * self.scale
        x = x + self.second(self.norm(x)).tanh()
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.roll(1, 1).flatten())


def batch_of(step: int) -> torch.Tensor:
    """The same on every rank."""
    return torch.randint(0, WORDS, (BATCH, 4), generator=torch.Generator().manual_seed(step))


def reference(dropout: float = 0.2) -> nn.Module:
    torch.manual_seed(0)
    return Tied(dropout)


@dataclass
class Run:
    """A model, and what trains it."""

    model: Any
    optimizer: torch.optim.Optimizer
    scheduler: Any

    def steps(self, numbers: Iterable[int]) -> list[float]:
        losses = []
        for number in numbers:
            if isinstance(self.model, autopar.ParallelModule):
                loss = self.model.step(batch_of(number))
            else:
                loss = self.model(batch_of(number))
                loss.backward()
            losses.append(float(loss.detach()))
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
        return losses

    def whole(self) -> dict[str, torch.Tensor]:
        """All values of the model and of the optimizer, whole."""
        gather = getattr(self.model, "full_tensor", lambda tensor: tensor.detach())
        values = {name: gather(value).clone() for name, value in self.model.state_dict(keep_vars=True).items()}
        for name, parameter in self.model.named_parameters():
            for key, value in sorted(self.optimizer.state.get(parameter, {}).items()):
                is_number = not parameter.dim() or key == "step"
                values[f"{name}.{key}"] = _number(value, parameter) if is_number else gather(value).clone()
        return values


def _number(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """State without dims is plain, on the ranks of its stage."""
    if not isinstance(parameter, DTensor):
        return value
    received: list[Any] = [None] * dist.get_world_size()
    here = parameter.device_mesh.get_coordinate() is not None
    dist.all_gather_object(received, value if here else None)
    return next(found for found in received if found is not None)


def run(model: Any, optimizer: Any = torch.optim.AdamW) -> Run:
    """``model`` with an optimizer of two groups, and a scheduler."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    if isinstance(model, autopar.ParallelModule):
        made = model.optimizer(optimizer, params=groups, lr=1e-2)
    else:
        made = optimizer(groups, lr=1e-2)
    return Run(model, made, torch.optim.lr_scheduler.MultiStepLR(made, [2, 5]))


def parallel(mesh: tuple[int, ...], dropout: float = 0.2, *, planned: bool = True, **options: Any) -> Run:
    """A run on ``mesh``; not ``planned``: before its first batch."""
    example = (batch_of(0),) if planned else None
    model = autopar.parallelize(reference(dropout), mesh, example, options=Options(seed=3, **options))
    return run(model)


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float = 0.0) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        with contextlib.suppress(AttributeError):
            value = value.detach()
        torch.testing.assert_close(
            found[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
