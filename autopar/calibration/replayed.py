"""Seconds of operations on a GPU without the processor that launches them.

Operations that are called one after the other take, on a GPU, whichever is longer: the kernel, or the next launch. So
short ones cannot be told from launches. Here calls are captured as a CUDA graph, whose replay launches them by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

# The most calls in a graph. Chosen: a graph of so many takes far longer than its own launch.
_MOST = 200
# Calls by which the length of one is estimated. Chosen: a few; the clock runs in microseconds.
_FEW = 5
# Launches that are timed. Chosen: fewer than a GPU queues before it makes the processor wait.
_LAUNCHES = 200

Job = Callable[[], object]


def replayed_seconds(function: Job, stream: torch.cuda.Stream, budget: float) -> float:
    """Mean seconds of a call of ``function`` among others, by the GPU's clock, for ``budget`` seconds. Calls are
    captured on ``stream``: libraries keep memory for each that they have seen."""
    with torch.cuda.device(stream.device):
        _on_clock(function, _FEW)
        each = _on_clock(function, _FEW)
        calls = max(1, min(_MOST, int(budget / 4 / each)))
        graph = _captured(function, calls, stream)
        graph.replay()
        rounds = max(1, int(budget / 2 / (each * calls)))
        return _on_clock(graph.replay, rounds) / calls


def launching_seconds(function: Job, device: torch.device) -> float:
    """Mean seconds that the processor takes to launch the kernel of ``function``, which takes less than that itself."""
    for _ in range(_FEW):
        function()
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(_LAUNCHES):
        function()
    taken = time.perf_counter() - start
    torch.cuda.synchronize(device)
    return taken / _LAUNCHES


def _on_clock(function: Job, calls: int) -> float:
    """Seconds per call by the clock of the current GPU."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(calls):
        function()
    end.record()
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds / 1e3 / calls


def _captured(function: Job, calls: int, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()  # Libraries allocate what they need, which they may not do within a capture.
        stream.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")  # Others may ask for events meanwhile.
        for _ in range(calls):
            function()
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph
