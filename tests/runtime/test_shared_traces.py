"""One rank traces for all, whatever works beside it."""

from __future__ import annotations

import time
from unittest.mock import patch

import torch
from torch import nn

import autopar
from autopar.runtime.faults.pace import INTERVAL
from autopar.trace.cache import cache as trace_cache
from autopar.trace.capture import Request
from autopar.trace.tracer import Traced, traced_request
from tests.helpers.planning import on


def test_the_first_rank_traces_for_all_while_the_ranks_are_watched() -> None:
    """The watch on faults reads files of the kernel twice meanwhile: these are not what the model reads."""

    def work(rank: int, world: int) -> int:
        traces = []

        def slow(request: Request) -> Traced:
            time.sleep(2 * INTERVAL)
            traces.append(traced_request(request))
            return traces[-1]

        model = autopar.parallelize(nn.Linear(6, 4), (world,), loss_fn=nn.MSELoss())
        with patch.object(trace_cache, "traced_request", slow):
            model.step(torch.ones(4, 6), targets=torch.zeros(4, 4))
        return len(traces)

    assert on(2, work) == [1, 0]
