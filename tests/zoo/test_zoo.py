"""Models of many families train the same on four local processes as on one: best plan, and one forced to shard."""

from __future__ import annotations

import pytest
import transformers

import autopar
from autopar.cluster import Cluster
from autopar.spec import is_shard
from tests.zoo import blocks as _blocks  # noqa: F401  (registers more models)
from tests.zoo.check import compute_bound
from tests.zoo.hugging_face import FAMILIES
from tests.zoo.plain import MODELS

ZOO = {**MODELS, **FAMILIES}
transformers.logging.set_verbosity_error()

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning")]


@pytest.mark.parametrize("name", ZOO)
def test_best_plan(name: str) -> None:
    model, batch = ZOO[name]()
    report = autopar.verify(model, (2, 2), batch, cluster="dgx-a100-80gb")
    assert report.ok, str(report)


@pytest.mark.parametrize("name", ZOO)
def test_forced_to_shard(name: str) -> None:
    model, batch = ZOO[name]()
    slow = compute_bound(Cluster.get("dgx-a100-80gb"))
    report = autopar.verify(model, (2, 2), batch, cluster=slow, options=autopar.Options(zero=3))
    assert report.ok, str(report)
    sharded = [name for name, place in report.plan.parameters.items() if any(map(is_shard, place.weight))]
    assert sharded, "fully sharded parameters were asked for"
