"""A benchmark as several local processes: it starts itself again under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence


def run_as_ranks(module: str, words: Sequence[str], processes: int, run: Callable[[], object]) -> int:
    """Runs ``run`` if this is one of the ranks, else starts ``processes`` ranks of ``python -m module words`` with one
    thread each. The exit status."""
    if "RANK" in os.environ:
        run()
        return 0
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    return subprocess.run([*launcher, "-m", module, *words], env=environment, check=False).returncode
