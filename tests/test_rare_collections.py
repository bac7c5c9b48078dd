"""Garbage collections while planning."""

from __future__ import annotations

import gc
import subprocess
import sys

from autopar.rare_collections import ALLOCATIONS, collecting_rarely


def test_collections_are_rare_inside_alone() -> None:
    thresholds, frozen = gc.get_threshold(), gc.get_freeze_count()
    with collecting_rarely():
        assert gc.get_threshold()[0] == max(ALLOCATIONS, thresholds[0])
        with collecting_rarely():
            pass
        assert gc.get_threshold()[0] == max(ALLOCATIONS, thresholds[0])
    assert gc.get_threshold() == thresholds
    assert gc.get_freeze_count() == frozen


def test_threads_that_overlap_leave_things_as_they_were() -> None:
    thresholds, frozen = gc.get_threshold(), gc.get_freeze_count()
    one, other = collecting_rarely(), collecting_rarely()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert gc.get_threshold()[0] == max(ALLOCATIONS, thresholds[0])
    other.__exit__(None, None, None)
    assert (gc.get_threshold(), gc.get_freeze_count()) == (thresholds, frozen)


YOUNG = """
import gc
from autopar.rare_collections import collecting_rarely

with collecting_rarely():
    made = [[index] for index in range(50_000)]
print(gc.get_count()[0] < len(made) / 2)
young = {id(each) for generation in (0, 1) for each in gc.get_objects(generation)}
print(len(young & set(map(id, made))))
"""


def test_the_next_collection_leaves_out_what_was_made_inside() -> None:
    # In a process of its own: in that of the tests, what existed before is frozen.
    done = subprocess.run([sys.executable, "-c", YOUNG], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "0"]


def test_cycles_made_inside_are_collected_in_the_end() -> None:
    class Cycle:
        alive = 0

        def __init__(self) -> None:
            self.own = self
            Cycle.alive += 1

        def __del__(self) -> None:
            Cycle.alive -= 1

    with collecting_rarely():
        Cycle()
    assert Cycle.alive == 1
    gc.collect()
    assert Cycle.alive == 0
