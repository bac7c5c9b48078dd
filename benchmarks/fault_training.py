"""A training script in which one rank has a fault: ``fault_training.py FAULT OPTIONS(json) FOLDER``. Started by
:mod:`benchmarks.faults`."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import autopar

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
# The rank with the fault.
ODD = WORLD - 2
# The step at which it comes; early enough that programs exist.
AT = 4


class Net(nn.Module):
    """Two blocks; ``deeper`` and ``wider`` make another model."""

    def __init__(self, deeper: int = 0, wider: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4 + deeper))
        self.head = nn.Linear(16, 4 + wider)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return nn.functional.cross_entropy(self.head(x), y)


def out_of_memory() -> None:
    """A real MemoryError."""
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    bytearray(1 << 40)


def evaluate(model: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    with torch.no_grad():
        model(*batch)


def fail() -> None:
    raise ValueError("an error of this rank")


def loop() -> None:
    while True:
        pass


Batch = tuple[torch.Tensor, torch.Tensor]
FAULTS: dict[str, Callable[[Any, Batch], Any]] = {
    "SIGKILL": lambda model, batch: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSEGV": lambda model, batch: ctypes.string_at(0),
    "os._exit": lambda model, batch: os._exit(3),
    "exception": lambda model, batch: fail(),
    "MemoryError": lambda model, batch: out_of_memory(),
    "sys.exit(0)": lambda model, batch: sys.exit(0),
    "SIGSTOP": lambda model, batch: os.kill(os.getpid(), signal.SIGSTOP),
    "sleep": lambda model, batch: time.sleep(3600),
    "evaluation mode": lambda model, batch: model.eval(),
    "frozen": lambda model, batch: model.get_parameter("layers.1.weight").requires_grad_(False),
    "full_tensor": lambda model, batch: model.full_tensor(model.get_parameter("layers.0.weight")),
    "DTensor.full_tensor": lambda model, batch: model.get_parameter("layers.0.weight").full_tensor(),
    "full_params": lambda model, batch: model.full_params().__enter__(),
    "evaluation": evaluate,
    "clip_grad_norm_": lambda model, batch: (model.step(*batch), model.clip_grad_norm_(1.0)),  # Of gradients there are.
    "endless loop": lambda model, batch: loop(),
}


def main(fault: str, options: dict[str, Any], folder: Path) -> None:
    """Trains; at step :data:`AT` the odd rank has the fault, or the one that the fault is said to be ``of``."""
    fault, _, said = fault.partition(" of rank ")
    odd = int(said or ODD) == RANK
    (folder / f"pid{RANK}").write_text(str(os.getpid()))
    if fault == "late" and odd:
        time.sleep(3600)
    if odd and fault.startswith("options "):
        options |= json.loads(fault.removeprefix("options "))
    if fault in ("late", "deeper", "wider") or fault.startswith("options "):
        (folder / "began").touch()
    net = Net(int(odd and fault == "deeper"), int(odd and fault == "wider"))
    model = autopar.parallelize(net, (WORLD,), options=autopar.Options(**options))
    optimizer = model.optimizer(torch.optim.AdamW, lr=1e-3)
    source = torch.Generator().manual_seed(0)
    x, y = torch.randn(8, 16, generator=source), torch.randint(0, 4, (8,), generator=source)
    for step in range(10**6):
        if step == AT:
            (folder / "began").touch()
        if step == AT and odd:
            if fault in FAULTS:
                FAULTS[fault](model, (x, y))
            x = x[:4] if fault == "batch shape" else x.double() if fault == "dtype" else x
            y = y[:4] if fault == "batch shape" else y
            if fault == "fewer batches":
                return
        model.step(x, y)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3]))
