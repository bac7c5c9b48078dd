"""What is said of ranks from what they say of themselves: no processes needed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.runtime.faults.diagnosis import CAUSE, LENIENCE, STILL, STILL_OUTSIDE, Seen, diagnose
from autopar.runtime.faults.record import Record, from_json, to_json

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
    late = Seen(1, WAITS, silent=61.0)
    assert said(LONG, late, LONG).startswith("rank 1 () does not answer")
    assert said(WAITS, late) == ""
    assert "is stopped (SIGSTOP)" in said(LONG, replace(late, stopped=True))
    planning = replace(WAITS, planning=True)
    assert said(LONG, Seen(1, planning, silent=61.0)) == ""
    assert said(LONG, Seen(1, planning, silent=61.0, stopped=True)) != ""
    assert said(replace(LONG, still=LENIENCE * 60), Seen(1, planning, silent=LENIENCE * 60)) != ""


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
    assert said(LONG, asleep, LONG) == (
        "rank 1 is outside of autopar at train.py:20; ranks 0, 2 wait for it in model.step() (collective call 7) at "
        "train.py:9 since 61 s, longer than Options(timeout=60) allows"
    )
    assert said(LONG, OUTSIDE) == "", "it computes"
    assert said(replace(LONG, still=LENIENCE * 60), OUTSIDE) != ""
    assert said(LONG, replace(WAITS, waits=False, still=70.0, planning=True)) == ""
    assert said(LONG, replace(WAITS, waits=False, still=70.0)) != ""
    assert said(LONG, LONG).startswith("no message has arrived for 61 s")
    assert said(replace(LONG, timeout=100.0), asleep) == ""


def test_a_failed_communication_waits_for_its_cause() -> None:
    broken = replace(WAITS, state="broken", note="RuntimeError: reset", still=0.0)
    assert said(Seen(0, broken), OUTSIDE) == ""
    assert "failed in model.step()" in said(Seen(0, broken, broken=CAUSE), OUTSIDE)
    assert said(Seen(0, broken), Seen(1, OUTSIDE, open=False)).startswith("rank 1 died")


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{", b'{"number": "1"}', b'{"state": "odd"}', b'{"x": 1, "state": "running"}', b"\xff"]
)
def test_what_is_no_record_is_none(text: bytes) -> None:
    assert from_json(text) is None


def test_records_arrive_as_they_were() -> None:
    assert from_json(to_json(LONG).encode()) == LONG
