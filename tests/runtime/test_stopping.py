"""``autopar.stopping``: a signal to one rank is known to all of them at the same step."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch
from torch import nn

import autopar
from tests.helpers.planning import on


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x).square().mean()


def test_all_ranks_stop_at_the_same_step() -> None:
    def work(rank: int, world: int) -> list[int]:
        stopped = []
        for check in ("first", "never"):
            model = autopar.parallelize(Net(), (world,), options=autopar.Options(check_inputs=check))  # type: ignore[arg-type]
            with autopar.stopping() as stop:
                for step in range(10):
                    model.step(torch.ones(4, 6))
                    if stop:
                        break
                    if rank == 1 and step == 2:
                        os.kill(os.getpid(), signal.SIGTERM)
                        assert stop.asked and not stop
            stopped.append(step)
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        return stopped

    assert on(2, work) == [[3, 3], [3, 3]]


def test_only_the_main_thread_receives_signals() -> None:
    errors: list[BaseException] = []

    def other() -> None:
        try:
            with autopar.stopping():
                pass
        except autopar.AutoparError as error:
            errors.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert "main thread" in str(errors[0])


def test_the_handler_is_put_back_by_the_first_signal_and_at_the_end() -> None:
    before = signal.getsignal(signal.SIGUSR2)
    with pytest.raises(KeyError), autopar.stopping(signal.SIGUSR2) as stop:
        assert not stop and not stop.asked
        os.kill(os.getpid(), signal.SIGUSR2)
        assert stop.asked
        assert signal.getsignal(signal.SIGUSR2) == before
        raise KeyError
    assert signal.getsignal(signal.SIGUSR2) == before
