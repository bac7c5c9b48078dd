"""What runs is what was priced, also on another cluster than the plan was made for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import autopar
from autopar import Options
from autopar.cluster.description import Cluster
from autopar.cluster.links import Rate
from tests.helpers.models import make
from tests.helpers.planning import slow_devices


def with_slow(*kinds: str) -> Cluster:
    """Slow devices, between which collectives of some ``kinds`` take ten thousand times as long as others."""
    cluster = slow_devices()
    link = cluster.links[0]
    names = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    rates = {name: (Rate(1e-2, 1e7) if name in kinds else Rate(1e-6, 1e11),) for name in names}
    return replace(cluster, name="slow", links=(replace(link, rates=rates), *cluster.links[1:]), algorithms=())


ONE, OTHER = with_slow("all_gather", "reduce_scatter"), with_slow("all_reduce")


def kinds_of(plan: autopar.Plan) -> set[str]:
    return {each.kind for each in plan.collectives()}


@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [
        ("stack", (2,), {"zero": 1, "precision": "bf16"}),
        pytest.param("gpt2", (2, 2), {"zero": 3}, marks=pytest.mark.slow),
        pytest.param("gpt2", (3,), {"stages": (2, 1), "microbatches": 2}, marks=pytest.mark.slow),
        pytest.param("stack", (2,), {"microbatches": 2, "stages": 1}, marks=pytest.mark.slow),
    ],
)
def test_a_plan_for_another_cluster_runs_as_priced(name: str, mesh: tuple[int, ...], options: dict[str, Any]) -> None:
    model, batch = make(name)
    settings = Options(**options, seed=0)
    made, here = (autopar.plan(model, mesh, batch, cluster=cluster, options=settings) for cluster in (ONE, OTHER))
    assert kinds_of(made) != kinds_of(here)
    for plan, cluster in ((made, OTHER), (here, ONE)):
        report = autopar.verify(model, mesh, batch, plan=plan, cluster=cluster, timeout=250)
        assert report.ok, str(report)
        assert report.unpriced == ()
