"""Plans for devices of several kinds, on processes: loss and every gradient are those of one process, whatever the
order of the stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autopar
from autopar import Options
from autopar.cluster.description import Cluster, Group
from autopar.runtime.launch import run_local
from tests.helpers.planning import slow_devices
from tests.passes.test_cut import _make
from tests.search.test_stage_devices import FAST, SLOW

CASES: list[tuple[str, tuple[Group, ...], dict[str, Any]]] = [
    ("gpt2", (Group(1, FAST), Group(2, SLOW)), {"stages": 3, "microbatches": 4}),
    ("llama", (Group(1, SLOW), Group(1, FAST)), {"stages": 2, "microbatches": 5, "schedule": "1f1b"}),
    ("t5", (Group(2, SLOW), Group(2, FAST)), {"stages": 4, "microbatches": 2}),
    ("gpt2", (Group(2, SLOW), Group(2, FAST)), {"stages": 2, "microbatches": 4, "schedule": "zb-v"}),
    ("gpt2", (Group(1, SLOW), Group(3, FAST)), {"stages": 2, "microbatches": 4, "zero": 3}),
    ("vit", (Group(1, FAST), Group(2, SLOW), Group(1, FAST)), {"stages": 4, "microbatches": 4, "schedule": "solved"}),
    ("gpt2", (Group(1, SLOW), Group(1, FAST)), {}),
    # Stages of unequal numbers of devices, between which a weight is tied.
    ("gpt2", (Group(1, FAST), Group(2, SLOW)), {"stages": (1, 2), "microbatches": 8, "zero": 1, "schedule": "1f1b"}),
    ("gpt2", (Group(1, FAST), Group(3, SLOW)), {"stages": (1, 3), "microbatches": 5, "schedule": "solved"}),
    ("t5", (Group(2, SLOW), Group(1, FAST)), {"stages": (2, 1), "microbatches": 4, "schedule": "zb-v", "zero": 3}),
    ("llama", (Group(4, SLOW),), {"stages": (1, 3), "microbatches": 8, "precision": "bf16"}),
    ("vit", (Group(1, FAST), Group(3, SLOW)), {"stages": 2, "microbatches": 4, "schedule": "interleaved"}),
]
QUICK = (1, 7)


def _cluster(groups: tuple[Group, ...]) -> Cluster:
    return slow_devices().with_groups(*groups)


@pytest.mark.parametrize(
    ("name", "groups", "options"),
    [pytest.param(*case, marks=[] if i in QUICK else pytest.mark.slow) for i, case in enumerate(CASES)],
)
def test_equal_to_one_process(name: str, groups: tuple[Group, ...], options: dict[str, Any]) -> None:
    model, batch = _make(name)
    ranks = sum(group.count for group in groups)
    report = autopar.verify(model, (ranks,), batch, cluster=_cluster(groups), timeout=250, options=Options(**options))
    assert report.ok, str(report)
    assert report.unpriced == ()


def _steps_and_evaluates(rank: int, world: int) -> tuple[tuple[int, ...], float, float, list[str]]:
    model, batch = _make("gpt2")
    groups = (Group(1, FAST), Group(2, SLOW))
    # Pins put the last layers on the first rank: the order of the stages is not that of the devices.
    pins = {"transformer.h.0": "stage 1"}
    options = Options(stages=3, microbatches=4, pins=pins)
    parallel = autopar.parallelize(model, (world,), options=options, cluster=_cluster(groups))
    optimizer = parallel.optimizer(torch.optim.SGD, lr=0.1)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        losses.append(float(parallel.step(**batch)))
        optimizer.step()
    parallel.eval()
    with torch.no_grad():
        losses.append(float(parallel(**batch).loss))
    pipeline = parallel.plan.pipeline
    assert pipeline is not None
    return pipeline.schedule.placement, losses[1], losses[2], sorted(parallel.state_dict())


@pytest.mark.slow
def test_training_and_evaluation_where_stages_lie_in_another_order() -> None:
    model, batch = _make("gpt2")
    names = sorted(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(**batch).loss
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        losses.append(float(model(**batch).loss))
    for placement, stepped, evaluated, found in run_local(_steps_and_evaluates, 3, timeout=250):
        assert placement[0] == 1
        assert stepped == pytest.approx(losses[1], rel=1e-5)
        assert evaluated == pytest.approx(losses[2], rel=1e-5)
        assert found == names
