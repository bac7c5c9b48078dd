"""What is said of ranks from what they say of themselves: no processes needed."""

from __future__ import annotations

import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import autopar
from autopar.errors import ExecutionError, FaultError, IndexRangeError
from autopar.runtime.faults import watch as watches
from autopar.runtime.faults.diagnosis import CAUSE, LENIENCE, STILL, STILL_OUTSIDE, Seen, diagnose, patience
from autopar.runtime.faults.pace import interval_of
from autopar.runtime.faults.process_state import seconds_computed, state_of
from autopar.runtime.faults.record import Record, from_json, to_json
from autopar.runtime.faults.stack import NOWHERE, Stillness, Thread, is_communication_file, place_of
from autopar.runtime.faults.traffic import _quiet
from autopar.runtime.faults.watch import Watch, watch_over

WAITS = Record(number=7, name="model.step()", waits=True, still=5.0, line="train.py:9", timeout=60.0)
LONG = replace(WAITS, still=61.0)
OUTSIDE = Record(number=6, line="train.py:20", timeout=60.0)


def said(*records: Record | Seen) -> str:
    """The first line of the diagnosis of ranks 0, 1, ...; "" if nothing is wrong."""
    everyone = [r if isinstance(r, Seen) else Seen(rank, r) for rank, r in enumerate(records)]
    return (diagnose(everyone) or "").split("\n")[0]


def test_nothing_is_wrong_while_nobody_waits_long() -> None:
    assert said(WAITS, WAITS, OUTSIDE) == ""
    assert said(replace(WAITS, still=STILL - 1), Seen(1, OUTSIDE, open=False)) == ""
    assert said(OUTSIDE, Seen(1, OUTSIDE, silent=1000.0)) == ""
    assert said(WAITS, WAITS, WAITS) == ""


def test_a_rank_that_died_ended_or_failed_is_named_at_once() -> None:
    assert said(WAITS, Seen(1, replace(OUTSIDE, where="process 5 on h"), open=False), WAITS) == (
        "rank 1 died without a word (process 5 on h; it was killed, crashed, or left by os._exit), last seen outside "
        "of autopar at train.py:20; ranks 0, 2 wait for it in model.step() (collective call 7) at train.py:9"
    )
    assert "the script of rank 1 came to its end after 6" in said(WAITS, replace(OUTSIDE, state="ended"), WAITS)
    failed = Seen(1, replace(OUTSIDE, state="failed", note="ValueError: x"), open=False)
    assert said(WAITS, failed).startswith("rank 1 failed: ValueError: x; rank 0 waits for it")


def test_a_silent_rank_is_named_in_time() -> None:
    assert said(LONG, Seen(1, WAITS, silent=40.0), LONG) == ""
    late = Seen(1, WAITS, silent=61.0, reached=False)
    assert said(LONG, late, LONG).startswith("rank 1 () does not answer")
    assert said(WAITS, late) == ""
    assert "is stopped (SIGSTOP)" in said(LONG, replace(late, stopped=True, reached=True))
    planning = replace(WAITS, planning=True)
    assert said(LONG, Seen(1, planning, silent=61.0)) == ""
    assert said(LONG, Seen(1, planning, silent=61.0, stopped=True)) != ""
    assert said(replace(LONG, still=LENIENCE * 60), Seen(1, planning, silent=LENIENCE * 60)) != ""
    assert said(LONG, late, replace(late, rank=2)).startswith("ranks 1, 2 () do not answer: they are stopped, or cut")
    assert "rank 0 waits for them in model.step()" in said(LONG, late, replace(late, rank=2))
    locked = replace(late, reached=True)
    assert said(LONG, locked) == "", "its host answers: Python's lock is held by what computes"
    assert said(replace(LONG, still=LENIENCE * 60), replace(locked, silent=LENIENCE * 60)) != ""


def test_ranks_in_different_calls_are_named_at_once() -> None:
    other = replace(WAITS, name="model.full_tensor()")
    assert said(WAITS, other, WAITS).startswith(
        "ranks wait for each other in different calls: rank 1 in model.full_tensor() (collective call 7); ranks 0, 2 "
        "in model.step() (collective call 7)."
    )
    assert said(WAITS, other, OUTSIDE) == ""
    elsewhere = replace(OUTSIDE, waits=True, still=STILL_OUTSIDE)
    assert "rank 1 outside of autopar at train.py:20" in said(WAITS, elsewhere)
    assert said(WAITS, replace(elsewhere, still=STILL)) == ""


def test_a_rank_that_does_not_come_is_named_in_time() -> None:
    asleep = replace(OUTSIDE, still=70.0)
    assert said(LONG, asleep, LONG) == "", "it may read from a slow disk"
    late = replace(LONG, still=LENIENCE * 60)
    assert said(late, replace(asleep, still=LENIENCE * 60), late) == (
        "rank 1 is outside of autopar at train.py:20; ranks 0, 2 wait for it in model.step() (collective call 7) at "
        "train.py:9 since 600 s, longer than Options(timeout=60) allows"
    )
    assert "is outside of autopar" in said(LONG, replace(asleep, number=7), LONG), "it has left that call"
    assert said(LONG, OUTSIDE) == "", "it computes"
    assert said(replace(LONG, still=LENIENCE * 60), OUTSIDE) == "", "as long as the process group allows"
    assert said(LONG, replace(asleep, number=7), OUTSIDE) == "", "another rank may be what all wait for"
    assert said(LONG, replace(WAITS, waits=False, still=70.0, planning=True)) == ""
    assert said(LONG, replace(WAITS, waits=False, still=70.0)) != ""
    assert said(LONG, LONG).startswith("no message has arrived for 61 s")
    assert said(LONG, WAITS) == "", "rank 1 has moved a moment ago"
    assert said(replace(LONG, timeout=100.0), replace(asleep, number=7)) == ""


def test_numbers_of_calls_decide_only_in_the_end() -> None:
    assert said(WAITS, replace(WAITS, number=8)) == ""
    assert said(LONG, replace(WAITS, number=8)) == ""
    assert said(LONG, replace(LONG, number=8)).startswith("ranks wait for each other in different calls: rank 0 in")


def test_an_error_that_was_caught_is_final_only_with_its_process() -> None:
    caught = replace(OUTSIDE, note="ValueError: x")
    assert said(WAITS, caught) == ""
    assert said(LONG, replace(caught, still=70.0)).endswith("allows; its last call raised ValueError: x")
    assert said(LONG, caught) == "", "it moves"
    assert said(WAITS, Seen(1, caught, open=False)).startswith("rank 1 failed: ValueError: x; rank 0 waits")
    assert said(WAITS, replace(caught, state="ended")).startswith("rank 1 failed: ValueError: x; rank 0 waits")


@pytest.mark.parametrize(
    ("error", "note"),
    [(MemoryError("gpu"), "MemoryError: gpu"), (IndexRangeError("5"), ""), (ExecutionError("x"), "ExecutionError: x")],
)
def test_only_errors_of_one_rank_are_noted(error: Exception, note: str) -> None:
    watch = Watch((0, 1), 0)
    watch.begin("model.step()")
    watch.finish(error)
    record = watch._look()
    assert (record.state, record.name, record.note) == ("running", "", note)
    watch.begin("model.step()")
    assert watch._look().note == ""


def test_a_fault_is_raised_from_what_it_interrupted() -> None:
    watch, error = Watch((0, 1), 0), RuntimeError("reset")
    watch.begin("model.step()")
    watch.fault = "rank 1 died"
    with pytest.raises(FaultError, match="rank 1 died") as raised:
        watch.finish(error)
    assert raised.value.__cause__ is error


def test_models_share_the_longest_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = Watch((0, 1), 0)
    monkeypatch.setattr(watches, "_WATCHES", {(0, 1): (torch.distributed.group.WORLD, shared)})
    assert watch_over((0, 1), 20.0) is shared
    shared.expect(type("Plan", (), {"predicted": type("Predicted", (), {"step_seconds": 10.0})}))
    assert watch_over((0, 1), 5.0) is shared
    assert shared._look().timeout == 40.0
    unwatched = watch_over((0, 1), 0.0)
    assert unwatched is not shared and not unwatched.active
    assert shared._look().timeout == 40.0


def test_a_thread_that_has_ended_is_looked_at_safely() -> None:
    threads: list[Thread] = []
    thread = threading.Thread(target=lambda: threads.append(Thread.here()))
    thread.start()
    thread.join()
    assert place_of(threads[0].ident) == NOWHERE
    still = Stillness()
    for _ in range(3):
        still.look(threads[0], 1, NOWHERE)
    assert threads[0].seconds_computed() >= 0.0 and threads[0].bytes_moved() >= 0


class Looked:
    """A thread that works and waits in turns, and is looked at as if a second passed between two looks."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._steps, self._work, self._still = threading.Barrier(2, timeout=30.0), work, Stillness()
        self._threads: list[Thread] = []
        self._worker = threading.Thread(target=self._run)
        self._worker.start()

    def _run(self) -> None:
        self._threads.append(Thread.here())
        for _ in range(4):
            self._steps.wait()
            self._work()
            self._steps.wait()
        self._steps.wait()

    def seconds(self, meanwhile: Callable[[], object] = lambda: None) -> list[float]:
        """For how long it was still, at each look; ``meanwhile`` runs before each."""
        found = []
        for _ in range(4):
            self._steps.wait()
            self._steps.wait()
            meanwhile()
            self._still._looked -= 1.0
            self._still._deputies._looked -= 1.0
            self._still.look(self._threads[0], 1, replace(NOWHERE, key=1))
            found.append(self._still.seconds)
        self._steps.wait()
        self._worker.join()
        return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_reading_a_file_is_moving(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"x" * 1000)
    assert Looked(lambda: None).seconds()[-1] > 1.5
    assert set(Looked((tmp_path / "data").read_bytes).seconds()) == {0.0}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_thread_or_process_that_works_for_another_is_moving() -> None:
    def until_busy(computed: Callable[[], float], meanwhile: Callable[[], object]) -> Callable[[], None]:
        """Waits until enough was computed since the last look, however loaded this machine is."""

        def wait() -> None:
            begin, before = time.monotonic(), computed()
            while computed() - before < 0.06 * (time.monotonic() - begin + 1.1):
                meanwhile()

        return wait

    assert set(Looked(lambda: None).seconds(until_busy(time.thread_time, lambda: None))) == {0.0}
    child = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
    try:
        folder = f"/proc/{child.pid}"
        assert set(
            Looked(lambda: None).seconds(until_busy(lambda: seconds_computed(folder), lambda: time.sleep(0.02)))
        ) == {0.0}
    finally:
        child.kill()
        child.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_this_process_runs() -> None:
    own = watches._own_place()
    assert state_of(own, own.partition(" on ")[2]) in set("RSD")
    assert state_of(own, "elsewhere") == state_of("", "") == ""


@pytest.mark.parametrize(("retransmits", "seconds"), [(0, 2.0), (3, 40.0)])
def test_sending_again_what_nobody_takes_moves_nothing(retransmits: int, seconds: float) -> None:
    """As to a host that is cut off: of 2 s since data was sent, 50 since some came, 40 since an acknowledgement."""
    information = bytearray(struct.pack("=8B24I", 0, 0, retransmits, *[0] * 29))
    struct.pack_into("=4I", information, 44, 2000, 0, 50_000, 40_000)
    assert _quiet(bytes(information)) == seconds


@pytest.mark.parametrize(("above", "is_one"), [(0, True), (5, True), (20, False)])
def test_errors_of_a_wait_are_those_of_communication(above: int, is_one: bool) -> None:
    """Also those that come through frames of torch's dispatcher; not those of a function that a wait has led to."""
    wait = Path(torch.distributed.__file__).parent / "_functional_collectives.py"
    names: dict[str, Callable[..., object]] = {}
    exec(compile("def wait(function):\n function()", str(wait), "exec"), names)

    def fails(depth: int) -> None:
        if depth == 0:
            raise RuntimeError("Connection closed by peer")
        fails(depth - 1)

    for error, expected in ((RuntimeError, is_one), (ValueError, False)):
        with pytest.raises(RuntimeError) as raised:
            names["wait"](lambda: fails(above))
        changed = raised.value if error is RuntimeError else ValueError().with_traceback(raised.value.__traceback__)
        assert watches._is_communication(changed) is expected


def test_checkpoints_and_dtensors_work_alone() -> None:
    folder = Path(torch.distributed.__file__).parent
    assert is_communication_file(str(folder / "distributed_c10d.py"))
    assert is_communication_file(str(folder / "_functional_collectives.py"))
    assert not is_communication_file(str(folder / "checkpoint" / "filesystem.py"))
    assert not is_communication_file(str(folder / "tensor" / "_dispatch.py"))


def test_a_failed_communication_waits_for_its_cause() -> None:
    broken = replace(WAITS, state="broken", note="RuntimeError: reset", still=0.0)
    assert said(Seen(0, broken), OUTSIDE) == ""
    assert "failed in model.step()" in said(Seen(0, broken, broken=CAUSE), OUTSIDE)
    assert said(Seen(0, broken), Seen(1, OUTSIDE, open=False)).startswith("rank 1 died")
    assert said(Seen(0, broken, broken=CAUSE), OUTSIDE).endswith("reset; rank 1 was outside of autopar at train.py:20")


def test_a_rank_that_left_the_last_call_is_not_missed() -> None:
    left = replace(OUTSIDE, number=7, state="ended")
    assert said(WAITS, replace(WAITS, waits=False), left) == "", "rank 1 is slow in the same call"
    assert said(WAITS, replace(WAITS, waits=False), Seen(2, replace(left, state="running"), open=False)) == ""
    assert said(replace(WAITS, number=8), left).startswith("the script of rank 1 came to its end after 7")
    assert said(LONG, left).startswith("the script of rank 1 came to its end after 7")
    assert said(WAITS, replace(left, name="model.step()")) != "", "it ended inside of the call"


def test_thousands_of_ranks_are_listed_in_a_screen() -> None:
    """And are given as many intervals as others: they say less often where they are."""
    interval = interval_of(3072)
    assert interval == 6.0 and interval_of(2) == 1.0
    records = [replace(WAITS, instruction=f"%a on the rank at ({rank},)", still=18.0) for rank in range(3072)]
    everyone = [Seen(rank, record, interval=interval) for rank, record in enumerate(records)]
    everyone[7] = replace(everyone[7], open=False)
    message = diagnose(everyone) or ""
    assert message.startswith("rank 7 died") and "ranks 0, 1, 2, 3, 4, 5, 6, 8 and 3063 more wait for it" in message
    assert len(message) < 4000 and message.endswith("and 3056 more places")
    slow = [replace(seen, record=replace(seen.record, still=17.0)) for seen in everyone]
    assert diagnose(slow) is None
    assert Seen(0, WAITS, silent=20.0, interval=interval).hears and not Seen(0, WAITS, silent=10.0).hears


def test_long_waits_are_mentioned() -> None:
    def mentioned(*records: Record) -> str:
        return patience([Seen(rank, record) for rank, record in enumerate(records)])[1]

    assert mentioned(WAITS, OUTSIDE) == mentioned(LONG, LONG) == ""
    assert mentioned(LONG, OUTSIDE, LONG) == (
        "rank 1: outside of autopar at train.py:20, and moves; ranks 0, 2 wait for it in model.step() (collective call "
        "7) at train.py:9 since 61 s"
    )
    assert "and rests; rank 0" in mentioned(LONG, replace(OUTSIDE, still=5.0))


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{",
        b'{"number": "1"}',
        b'{"state": "odd"}',
        b'{"x": 1, "state": "running"}',
        b"\xff",
        b"[" * 60_000,
    ],
)
def test_what_is_no_record_is_none(text: bytes) -> None:
    assert from_json(text) is None


def test_records_arrive_as_they_were() -> None:
    assert from_json(to_json(LONG).encode()) == LONG


def test_an_error_that_is_its_own_cause_is_looked_at_once() -> None:
    error, other = autopar.AutoparError("a"), RuntimeError("b")
    error.__cause__ = other
    other.__cause__ = error
    assert not watches._is_communication(error)
    assert watches._note(error) == "RuntimeError: b"
    error.__cause__ = error
    assert not watches._is_communication(error)
    assert watches._note(error) == "AutoparError: a"
