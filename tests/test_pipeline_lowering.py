"""Chunk programs run by the instruction lists compute what one device computes: all ranks in one process."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import transformers

from autopar.schedule_check import check
from tests.lowering import plain
from tests.pipelines import Wanted, make_pipeline
from tests.simulate_pipeline import Pipeline
from tests.test_stages import _make
from tests.zoo.check import Case, _doubles, compare, make_case

transformers.logging.set_verbosity_error()


@cache
def _case(name: str) -> Case:
    case = make_case(*_make(name))
    return Case(plain(case.graph), case.values, case.expected)


@_doubles()
def _check(name: str, wanted: Wanted) -> None:
    case = _case(name)
    made = make_pipeline(case.graph, wanted)
    check(made.schedule)
    torch.manual_seed(0)
    found = Pipeline(made.programs(), case.values).step()
    compare(found, case.expected, f"{name} {wanted}")


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("gpt2", Wanted((4, 1), "1f1b", 5)),
        ("gpt2", Wanted((2, 2), "gpipe", 2)),
        ("gpt2", Wanted((1, 2), "1f1b", 4)),
    ],
    ids=str,
)
def test_chunks_compute_what_one_device_does(name: str, wanted: Wanted) -> None:
    _check(name, wanted)
