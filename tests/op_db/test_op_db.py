"""Torch's own test data, every operation and every module: as eager, on one device and on shards, or a clear error.

The quick suite tries some of each kind and everything that was wrong once; all of it is ``slow``. More samples, as many
as one likes, tries ``python -m tests.op_db.sweep``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

pytest.importorskip("expecttest", reason="torch's own test data needs it")

from .outcome import Outcome, outcome_of
from .samples import MODULES, NOT_OURS, OPS
from .sweep import MAKERS

# What gave other numbers than eager, or crashed, before it was mended; with the samples that showed it. An LSTM did
# too: tests/trace/test_operations.py has it.
ONCE_WRONG = (
    ("op", "arange", "f64", 3),
    ("op", "nn.functional.multilabel_margin_loss", "f64", 1),
    ("op", "logsumexp", "f64", 3),
    ("op", "logsumexp", "c128", 2),
    ("op", "var_mean", "c128", 1),
    ("op", "fft.ihfft", "f64", 1),
    ("inplace", "zero_", "f64", 1),
    ("op", "to_sparse", "f64", 1),
    ("op", "corrcoef", "f64", 2),
    ("op", "corrcoef", "c128", 1),
    ("op", "cov", "f64", 2),
    ("op", "uniform", "c128", 1),
)
# One in so many of the operations and modules is tried by the quick suite.
EVERY = 150


def _jobs() -> list[tuple[str, str, str, int]]:
    """Kind, name, dtype and number of samples of all that is tried."""
    ops = [("op", name, dtype, 1) for name in OPS if name not in NOT_OURS for dtype in ("f64", "f32", "c128")]
    written = [("inplace", name, "f64", 1) for name in OPS if name not in NOT_OURS]
    modules = [("module", name, dtype, 2) for name in MODULES for dtype in ("f64", "f32", "c128")]
    return [*ops, *written, *modules]


JOBS = _jobs()
# The operation has no rule, and probing takes many trials (tests/passes/test_probe.py).
LONG = ("nn.functional.channel_shuffle", "nn.functional.pixel_unshuffle", "rot90")
SOME = [*ONCE_WRONG, *(job for job in JOBS[::EVERY] if job not in ONCE_WRONG and job[1] not in LONG)]


def _failed(job: tuple[str, str, str, int]) -> Iterator[Outcome]:
    kind, name, dtype, count = job
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in MAKERS[kind][0](name, dtype, count):
            outcome = outcome_of(case)
            if not outcome.ok:
                yield outcome


def _id(job: tuple[str, str, str, int]) -> str:
    return "-".join(map(str, job[:3]))


@pytest.mark.parametrize("job", SOME, ids=_id)
def test_some_as_eager_or_a_clear_error(job: tuple[str, str, str, int]) -> None:
    assert list(_failed(job)) == []


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS, ids=_id)
def test_all_as_eager_or_a_clear_error(job: tuple[str, str, str, int]) -> None:
    assert list(_failed(job)) == []


def test_what_is_not_ours_is_there() -> None:
    assert set(NOT_OURS) <= set(OPS)
