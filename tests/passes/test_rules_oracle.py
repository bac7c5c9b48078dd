"""Every strategy of every rule is true when executed on shards, and no rule goes without."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from autopar.passes.rules import RULES
from tests.oracle.harness import Sample, failures

FOLDER = Path(__file__).parent.parent / "oracle"
MODULES = [importlib.import_module(f"tests.oracle.{path.stem}") for path in sorted(FOLDER.glob("samples_*.py"))]
SAMPLES: dict[str, list[Sample]] = {}
for _module in MODULES:
    for _sample in _module.SAMPLES:
        SAMPLES.setdefault(_sample.op, []).append(_sample)
# Operation -> why no sample of it can run here; stated by the module whose family it is.
NEEDS_CUDA = {op: why for module in MODULES for op, why in getattr(module, "NEEDS_CUDA", {}).items()}


@pytest.fixture(scope="module")
def executed(request: pytest.FixtureRequest) -> Iterator[Counter[str]]:
    """Counts executed strategies by operation, and says how many there were."""
    counts: Counter[str] = Counter()
    yield counts
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\nrule oracle: {counts.total()} strategies of {len(counts)} operations executed")


@pytest.mark.parametrize("op", sorted(RULES))
def test_every_strategy_is_true(op: str, executed: Counter[str]) -> None:
    if op in NEEDS_CUDA:
        pytest.skip(NEEDS_CUDA[op])
    assert op in SAMPLES, f"{op} has a rule but no sample; add one to tests/oracle/samples_*.py"
    results = [failures(sample) for sample in SAMPLES[op]]
    wrong = [failure for _, failed in results for failure in failed]
    assert not wrong, f"{len(wrong)} strategies are not true:\n" + "\n".join(map(str, wrong[:10]))
    count = sum(number for number, _ in results)
    assert count, f"the samples of {op} exercise no strategy at all"
    executed[op] += count


def test_samples_are_of_rules() -> None:
    assert set(SAMPLES) - set(RULES) == set()


def test_unrunnable_operations_have_no_kernel_here() -> None:
    for op in NEEDS_CUDA:
        name, _, overload = op.removeprefix("aten.").partition(".")
        full = f"aten::{name}" if overload == "default" else f"aten::{name}.{overload}"
        assert not torch._C._dispatch_has_kernel_for_dispatch_key(full, "CPU"), f"{op} runs on the CPU: sample it"
