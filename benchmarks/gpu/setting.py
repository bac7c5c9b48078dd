"""Where a part of the kit runs, and how it measures there."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

Row = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """``kind``: ``"cuda"`` or ``"cpu"``; ``tiny``: models of a few thousand parameters, which show that the kit works
    and nothing else; ``world``: processes, each with a device."""

    kind: str = "cuda"
    tiny: bool = False
    world: int = 1

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if self.kind == "cuda" else CPU

    def prepare(self) -> None:
        """Makes the device the current one, and float32 mean float32: no product or convolution in TF32."""
        torch.set_float32_matmul_precision("highest")
        if self.kind == "cuda":
            torch.backends.cudnn.allow_tf32 = False
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(1)

    def synchronise(self) -> None:
        if self.kind == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, job: Callable[[], object], count: int) -> float:
        """Seconds of one of ``count`` calls of ``job`` back to back, on the device's own clock."""
        if self.kind != "cuda":
            start = time.perf_counter()
            for _ in range(count):
                job()
            return (time.perf_counter() - start) / count
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(count):
            job()
        end.record()
        end.synchronize()
        milliseconds: float = begin.elapsed_time(end)
        return milliseconds / 1e3 / count

    def bytes_now(self) -> int:
        """Bytes of tensors; from here on :meth:`peak_bytes` counts. 0 on processors, which do not count them."""
        if self.kind != "cuda":
            return 0
        self.synchronise()
        torch.cuda.reset_peak_memory_stats(self.device)
        return torch.cuda.memory_allocated(self.device)

    def peak_bytes(self) -> int:
        """The most bytes of tensors at once since :meth:`bytes_now`. 0 on processors."""
        return torch.cuda.max_memory_allocated(self.device) if self.kind == "cuda" else 0

    def join(self) -> None:
        """Starts torch.distributed, also for one process: by NCCL on GPUs."""
        backend = "cpu:gloo,cuda:nccl" if self.kind == "cuda" else "gloo"
        if "RANK" in os.environ:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, init_method="tcp://127.0.0.1:0", rank=0, world_size=1)


CPU = torch.device("cpu")


def leave() -> None:
    """Ends torch.distributed, if it runs."""
    with suppress(Exception):
        if dist.is_initialized():
            dist.destroy_process_group()
