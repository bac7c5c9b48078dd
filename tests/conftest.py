"""What every test relies on: one thread per process, a fixed seed, and a hypothesis profile."""

from __future__ import annotations

import gc
import os
import shutil
import sys
from collections.abc import Iterator

# Before torch is imported: many tests start four processes on two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings

from autopar.compiler import plan_cache
from autopar.content.cache_folder import cache_folder
from autopar.trace.cache import cache as trace_cache

torch.set_num_threads(1)

# What is imported stays; plans and graphs are many small objects, mostly without cycles: the collector's own pace
# costs a tenth of all seconds.
gc.set_threshold(100_000, 20, 100)

settings.register_profile(
    "ci", derandomize=True, deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("dev", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_collection_finish() -> None:
    """Imported modules need not be looked through for garbage again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """What a test does to its process for good: paths it imports from, and torch.distributed started in it."""
    paths = list(sys.path)
    yield
    sys.path[:] = paths
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is measured or found out on this machine is neither used nor written. Workers share what follows from
    nothing but its key: half of the suite would be spent on tracing the same models, and on trying the same rules."""
    folder, shared = tmp_path_factory.mktemp("cache"), tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    for kind in ("traces", "rules", "compiled"):
        (shared / f"shared-{kind}").mkdir(exist_ok=True)
        (folder / kind).symlink_to(shared / f"shared-{kind}", target_is_directory=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOPAR_CACHE", str(folder))
        yield


@pytest.fixture(autouse=True)
def own_plans(own_cache: None) -> None:
    """No test is served what another one planned, and one that sets another folder finds no trace."""
    plan_cache.forget()
    trace_cache.forget()
    shutil.rmtree(cache_folder() / plan_cache.KIND, ignore_errors=True)


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)
