"""Plans with stages that the planner makes, on processes: loss and every gradient are those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autopar
from autopar import Options
from autopar.runtime.launch import run_local
from tests.helpers.planning import CLUSTER, slow_devices
from tests.passes.test_cut import _make
from tests.search.test_best_plan import Model

ON_FOUR = [((4,), 4), ((2, 2), 2), ((4,), 2)]
CLUSTERS = ("dgx", "slow devices")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "solved")
# Quick are the tests below, of ZB-V with dropout and of training; 1F1B is in tests/test_precision.py, and microbatches
# alone are in tests/runtime/test_kinds_of_calls.py.
FIRST: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
    ("gpt2", (2, 2), {"stages": 2, "microbatches": 4, "schedule": "1f1b"}),
    ("llama", (2,), {"stages": 1, "microbatches": 5}),
    ("t5", (2,), {"stages": 2, "microbatches": 5, "schedule": "zb-v"}),
]
REST: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
    (name, mesh, {"stages": stages, "microbatches": count, "schedule": schedule})
    for turn, name in enumerate(("gpt2", "llama", "t5", "unet", "vit"))
    for mesh, stages in ON_FOUR
    for schedule, count in zip(SCHEDULES, (1, 2, 5, 8, 5, 4), strict=True)
    if turn % 2 or schedule != "solved"
] + [
    (name, (2, 2, 2), {"stages": 2, "microbatches": 4, "schedule": schedule})
    for name, schedule in (("gpt2", "1f1b"), ("llama", "zb-v"))
]
# Weights gathered in every forward and backward, gradients reduced from within the last.
REST += [("gpt2", (2,), {"stages": 1, "microbatches": count, "zero": 3}) for count in (2, 5)]
REST += [
    ("gpt2", (2, 2), {"stages": 2, "microbatches": count, "schedule": schedule, "zero": 3})
    for count, schedule in ((1, "1f1b"), (2, "gpipe"), (5, "1f1b"), (5, "zb-v"))
]


@pytest.mark.slow
@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize(("name", "mesh", "options"), FIRST + REST)
def test_equal_to_one_process(cluster: str, name: str, mesh: tuple[int, ...], options: dict[str, Any]) -> None:
    """On slow devices the placements inside a stage shard whatever they can."""
    if cluster == "dgx" and options["stages"] == 1:
        pytest.skip("one of the two is enough")
    model, batch = _make(name)
    prices = slow_devices() if cluster == "slow devices" else CLUSTER
    report = autopar.verify(model, mesh, batch, cluster=prices, timeout=250, options=Options(**options))
    assert report.ok, str(report)
    assert report.unpriced == ()
    assert (report.plan.stages, report.plan.microbatches) == (options["stages"], options["microbatches"])


class Dropping(Model):
    """Draws between its blocks, forward and again in backward."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = torch.nn.functional.dropout(block(x), 0.3, self.training)
        logits = self.norm(x) @ self.embed.weight.T
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        pytest.param((2, 2), {"stages": 2, "microbatches": 4, "schedule": "1f1b"}, marks=pytest.mark.slow),
        pytest.param((2,), {"stages": 2, "microbatches": 2, "schedule": "zb-v"}, marks=pytest.mark.slow),
        pytest.param((4,), {"stages": 4, "microbatches": 2, "schedule": "zb-h1"}, marks=pytest.mark.slow),
        pytest.param((3,), {"stages": 3, "microbatches": 4, "schedule": "gpipe"}, marks=pytest.mark.slow),
        pytest.param((2,), {"stages": 1, "microbatches": 8}, marks=pytest.mark.slow),
    ],
)
def test_dropout_draws_alike_under_every_pipeline(mesh: tuple[int, ...], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, 31, (8, 6), generator=torch.Generator().manual_seed(0))
    report = autopar.verify(
        Dropping(), mesh, {"ids": ids, "labels": ids}, cluster=CLUSTER, timeout=200, options=Options(**options)
    )
    assert report.ok and report.draws, str(report)
    assert (report.plan.stages, report.plan.microbatches) == (options["stages"], options["microbatches"])


def _trains(rank: int, world: int) -> list[float]:
    """Losses of a planned pipeline: two batch sizes, evaluation in between."""
    torch.manual_seed(0)
    found = autopar.parallelize(Model(), (world,), options=Options(stages=2, microbatches=2), cluster=CLUSTER)
    optimizer = found.optimizer(torch.optim.SGD, lr=0.1)
    losses = []
    for size in (8, 12, 8):
        ids = torch.randint(0, 31, (size, 6), generator=torch.Generator().manual_seed(size))
        losses.append(float(found.step(ids=ids, labels=ids)))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses.append(float(found(ids=ids, labels=ids)))
    return losses


def test_it_trains_and_evaluates_as_one_process_does() -> None:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wanted = []
    for size in (8, 12, 8):
        ids = torch.randint(0, 31, (size, 6), generator=torch.Generator().manual_seed(size))
        loss = model(ids, ids)
        loss.backward()
        wanted.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            wanted.append(float(model(ids, ids)))
    for losses in run_local(_trains, 2, timeout=200.0):
        assert losses == pytest.approx(wanted, rel=1e-5)
