"""Local ranks: results come back, and a rank that raises, dies or hangs ends the run with its traceback."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from autopar.errors import OptionsError, PlanMismatchError, WorkerError
from autopar.processes.template import template
from autopar.runtime.launch import Start, run_local


def children() -> set[str]:
    """Every child of the template and of this process, zombies included."""
    process = template().process
    assert process is not None
    return {
        child
        for pid in (process.pid, os.getpid())
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    }


@pytest.fixture(autouse=True)
def _no_children_left() -> Iterator[None]:
    """What a test starts ends with it; others of this process may have left some, as multiprocessing does."""
    before = children()
    yield
    assert children() <= before


def test_results_by_rank_with_closures_and_tensors() -> None:
    base = torch.arange(3.0)

    def work(rank: int, world: int, factor: int) -> tuple[int, torch.Tensor]:
        total = base * rank * factor
        dist.all_reduce(total)
        return world, total

    results = run_local(work, 3, timeout=30, args=(10,))
    assert [world for world, _ in results] == [3, 3, 3]
    assert all(torch.equal(total, base * 30) for _, total in results)


def test_large_results_do_not_block() -> None:
    results = run_local(lambda rank, world: torch.full((1 << 19,), float(rank)), 2, timeout=30)
    assert [float(tensor.mean()) for tensor in results] == [0.0, 1.0]


def test_ranks_see_torchrun_variables() -> None:
    def work(rank: int, world: int) -> tuple[str, ...]:
        dist.init_process_group("gloo")
        return tuple(os.environ[k] for k in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))

    assert run_local(work, 2, timeout=30, backend=None) == [("0", "0", "2", "2"), ("1", "1", "2", "2")]


def test_exception_carries_the_traceback_of_its_rank() -> None:
    def helpless(rank: int) -> None:
        if rank == 1:
            raise ValueError("the number was seven")

    def work(rank: int, world: int) -> None:
        helpless(rank)
        dist.barrier()

    started = time.monotonic()
    with pytest.raises(WorkerError, match=r"(?s)rank 1 of 2 raised.*in helpless.*the number was seven"):
        run_local(work, 2, timeout=150)
    assert time.monotonic() - started < 120  # Not after the other rank's timeout; processes may start slowly.


def test_own_errors_keep_their_type() -> None:
    def work(rank: int, world: int) -> None:
        raise PlanMismatchError("batch 7 does not divide by 4")

    with pytest.raises(PlanMismatchError, match="batch 7 does not divide by 4") as caught:
        run_local(work, 2, timeout=30)
    assert "raised" in caught.value.__notes__[0] and "in work" in caught.value.__notes__[0]


def test_exception_that_cannot_be_sent() -> None:
    class Stubborn(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__(f"{one} and {two}")

    def work(rank: int, world: int) -> None:
        raise Stubborn(1, 2)

    with pytest.raises(WorkerError, match="Stubborn: 1 and 2"):
        run_local(work, 1, timeout=30)


def test_result_that_cannot_be_sent() -> None:
    with pytest.raises(WorkerError, match="cannot be sent"):
        run_local(lambda rank, world: (n for n in range(3)), 1, timeout=30)


@pytest.mark.parametrize("start", ["template", pytest.param("spawn", marks=pytest.mark.slow)])
def test_killed_rank(start: Start, tmp_path: Path) -> None:
    """The call ends soon after the death, however long a busy machine took to start the ranks."""
    death = tmp_path / "death"

    def work(rank: int, world: int) -> None:
        if rank == 1:
            death.write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    with pytest.raises(WorkerError, match="rank 1 of 2 was killed by SIGKILL"):
        run_local(work, 2, timeout=120, start=start)
    assert time.monotonic() - float(death.read_text()) < 10


def test_crash_shows_the_stack() -> None:
    def crash_here(rank: int, world: int) -> None:
        ctypes.string_at(0)

    with pytest.raises(WorkerError, match=r"(?s)SIGSEGV.*crash_here"):
        run_local(crash_here, 1, timeout=30)


def test_a_rank_that_leaves_a_process_has_reported() -> None:
    """Such as workers that a loader keeps: they end with their rank."""

    def work(rank: int, world: int) -> int:
        child = multiprocessing.get_context("fork").Process(target=signal.pause)
        child.start()
        assert child.pid is not None
        return child.pid

    (pid,) = run_local(work, 1, timeout=20)
    deadline = time.monotonic() + 5
    while Path(f"/proc/{pid}/stat").exists() and time.monotonic() < deadline:
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            break  # Nobody waits for it in a container without an init.
        time.sleep(0.01)
    else:
        assert not Path(f"/proc/{pid}/stat").exists()


def test_early_exit() -> None:
    with pytest.raises(WorkerError, match="exited with status 3 without a result"):
        run_local(lambda rank, world: os._exit(3), 1, timeout=30)


def test_ranks_that_may_die_leave_the_others_alone() -> None:
    def work(rank: int, world: int) -> int:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 2:
            os._exit(3)
        time.sleep(1.0)
        return rank

    assert run_local(work, 4, timeout=60, backend=None, may_die=True) == [0, None, None, 3]


def test_errors_of_ranks_that_may_die_are_errors() -> None:
    def work(rank: int, world: int) -> None:
        if rank == 1:
            raise OptionsError("a wrong one")
        time.sleep(600)

    with pytest.raises(OptionsError, match="a wrong one"):
        run_local(work, 2, timeout=60, backend=None, may_die=True)


def test_hang_shows_where() -> None:
    def stuck_here(rank: int) -> None:
        if rank == 1:
            time.sleep(600)

    def work(rank: int, world: int) -> int:
        stuck_here(rank)
        return rank

    started = time.monotonic()
    with pytest.raises(WorkerError, match=r"(?s)no result from rank 1 of 2 within 12 s.*in stuck_here"):
        run_local(work, 2, timeout=12)
    assert time.monotonic() - started < 60


@pytest.mark.slow
def test_a_fresh_process() -> None:
    offset = 5
    assert run_local(lambda rank, world: world + offset, 1, timeout=120, start="spawn") == [6]


def test_backward_after_the_parent_ran_backward() -> None:
    def train() -> float:
        weight = torch.ones(64, 64, requires_grad=True)
        (weight @ weight).sum().backward()
        assert weight.grad is not None
        return float(weight.grad.sum())

    expected = train()
    assert run_local(lambda rank, world: train(), 2, timeout=30) == [expected, expected]


def test_needs_a_process() -> None:
    with pytest.raises(OptionsError, match="at least one process, got 0"):
        run_local(lambda rank, world: None, 0, timeout=1)
