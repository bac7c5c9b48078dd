"""A process that ends right after a collective ends in order, however late gloo's threads let go of it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from autopar.runtime.comm import settle_threads
from autopar.runtime.comm.groups import mesh_groups, mesh_of_one


def test_threads_of_gloo_are_seen_and_waited_for() -> None:
    before = settle_threads._activity().keys()  # Other tests of this process may have left some.
    mesh_groups(mesh_of_one())
    dist.all_reduce(torch.ones(3))
    assert settle_threads._activity().keys() - before
    settle_threads.settle_threads()


def test_a_thread_that_runs_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two looks that differ, one at a running thread, then two alike at one that sleeps."""
    looks = iter([{"1": "State:\tS 1"}, {"1": "State:\tS 2"}, {"1": "State:\tR 2"}, {"1": "State:\tR 2"}])
    last = {"1": "State:\tS 3"}
    seen = []

    def look() -> dict[str, str]:
        seen.append(next(looks, last))
        return seen[-1]

    monkeypatch.setattr(settle_threads, "_activity", look)
    settle_threads.settle_threads()
    assert seen[-2:] == [last, last] and len(seen) == 6
