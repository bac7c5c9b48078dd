"""Graphs of awkward models compute what the models do, under random and solved assignments, in one process."""

from __future__ import annotations

from functools import lru_cache

import pytest
import transformers

from tests.helpers.marks import slow_but
from tests.zoo import blocks as _blocks  # noqa: F401  (registers more models)
from tests.zoo.check import Case, check_assignments, check_plans, make_case
from tests.zoo.hugging_face import FAMILIES
from tests.zoo.plain import MODELS

MODELS_OF_ALL_KINDS = {**MODELS, **FAMILIES}
QUICK = (
    "indexing",
    "attention_variants",
    "step_counter",
    "random",
    "complex_rotary",
    "cumulative_batch_norm",
    "conv1d_transposed",
    "reentrant_checkpoint",
    "transposed_attention",
    "memory_order",
    "recommender",
)
# What has no rules here is tried, which takes longer than all else; tests/passes/test_probe.py does that.
PROBED = ("conv1d_transposed", "memory_order", "indexing")
MESHES = ((4,), (2, 2))
transformers.logging.set_verbosity_error()

# torch says so of nn.Transformer with an odd number of heads, which is what the model is about.
pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")


@lru_cache(maxsize=2)
def _case(name: str) -> Case:
    """Traced once for all meshes."""
    return make_case(*MODELS_OF_ALL_KINDS[name]())


@pytest.mark.parametrize("name", slow_but([name for name in QUICK if name not in PROBED], QUICK))
def test_random_assignments(name: str) -> None:
    for mesh in MESHES:
        check_assignments(_case(name), mesh, range(1))


@pytest.mark.parametrize("name", slow_but(["step_counter"], ["step_counter", "returns_tuple"]))
def test_solved_assignments(name: str) -> None:
    found = check_plans(_case(name), (2, 2))
    plans = [(frozenset(one.parameters.items()), frozenset(one.strategies.items())) for one in found.values()]
    assert len(set(plans)) > 1, "the questions should force different plans"


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(4,), (2, 2), (2, 1, 2), (3,)], ids=str)
@pytest.mark.parametrize("name", MODELS_OF_ALL_KINDS)
def test_random_assignments_of_all_models(name: str, mesh: tuple[int, ...]) -> None:
    check_assignments(_case(name), mesh, range(3))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS_OF_ALL_KINDS)
def test_solved_assignments_of_all_models(name: str) -> None:
    check_plans(_case(name), (2, 2))
