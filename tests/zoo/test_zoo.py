"""Models of many families train the same on four ranks as on one: the best plan, and one forced to shard."""

from __future__ import annotations

from functools import lru_cache

import pytest
import transformers

import autopar
from autopar.cluster.description import Cluster
from autopar.errors import TraceError
from autopar.ir.placements import is_shard
from tests.zoo.check import Case, check_plans, compute_bound, make_case
from tests.zoo.models import ZOO

transformers.logging.set_verbosity_error()

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
# tests/passes/test_lower_models.py has more.
QUICK = ("step_counter",)
UNTRACEABLE = ("led", "llava", "longformer", "vilt")
"""Values of tensors decide what these run next."""
TRACEABLE = [name for name in ZOO if name not in UNTRACEABLE]


@lru_cache(maxsize=2)
def _case(name: str) -> Case:
    """Traced once for all meshes."""
    return make_case(*ZOO[name]())


@pytest.mark.parametrize("name", QUICK)
def test_simulated(name: str) -> None:
    check_plans(_case(name), (2, 2))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(4,), (2, 2)])
@pytest.mark.parametrize("name", TRACEABLE)
def test_all_simulated(name: str, mesh: tuple[int, ...]) -> None:
    check_plans(_case(name), mesh)


@pytest.mark.slow
@pytest.mark.parametrize("name", UNTRACEABLE)
def test_what_cannot_be_traced_says_where(name: str) -> None:
    with pytest.raises(TraceError, match=r"(?s)in module '[\w.]+' .* at .*/transformers/.*\.py:\d+"):
        make_case(*ZOO[name]())


@pytest.mark.slow
@pytest.mark.parametrize("name", TRACEABLE)
def test_best_plan(name: str) -> None:
    model, batch = ZOO[name]()
    report = autopar.verify(model, (2, 2), batch, cluster="dgx-a100-80gb")
    assert report.ok, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRACEABLE)
def test_forced_to_shard(name: str) -> None:
    model, batch = ZOO[name]()
    slow = compute_bound(Cluster.get("dgx-a100-80gb"))
    report = autopar.verify(model, (2, 2), batch, cluster=slow, options=autopar.Options(zero=3))
    assert report.ok, str(report)
    sharded = [name for name, place in report.plan.parameters.items() if any(map(is_shard, place.weight))]
    assert sharded, "fully sharded parameters were asked for"
