"""What a training does without that finds its trace and plan in the cache, it does not load either."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import autopar

# Each takes a tenth of a second of a processor or more, on every rank.
HEAVY = ("ortools", "pandas", "rich", "networkx", "torch._functorch.aot_autograd", "autopar.search.best_plan")
PROGRAM = f"""
import json, sys, torch, autopar
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
after_import = [name for name in {HEAVY!r} if name in sys.modules]
parallel = autopar.parallelize(model, (1,), loss_fn=torch.nn.functional.mse_loss)
loss = parallel.step(torch.zeros(4, 8), targets=torch.ones(4, 8))
after_step = [name for name in {HEAVY!r} if name in sys.modules]
print(json.dumps([after_import, after_step]))
"""


def _run(folder: Path) -> list[list[str]]:
    environment = {**os.environ, "AUTOPAR_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    program = folder / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    found: list[list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_autopar_itself_loads_none() -> None:
    program = f"import sys, autopar; assert not [name for name in {HEAVY!r} if name in sys.modules]"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_a_search_loads_no_solvers_before_it_needs_them() -> None:
    program = "import sys, autopar.search.best_plan; assert 'ortools' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.slow
def test_a_cached_plan_loads_neither_solvers_nor_tracers(tmp_path: Path) -> None:
    imported, planned = _run(tmp_path)
    assert imported == []
    assert {"torch._functorch.aot_autograd", "autopar.search.best_plan"} <= set(planned)
    assert _run(tmp_path) == [[], []]


def test_names_that_come_late_are_there() -> None:
    for name in autopar.__all__:
        assert getattr(autopar, name).__module__.startswith("autopar.")
    with pytest.raises(AttributeError, match="no attribute 'plam'"):
        _ = autopar.plam  # type: ignore[attr-defined]
