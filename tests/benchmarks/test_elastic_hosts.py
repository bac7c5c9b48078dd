"""A training goes on without a host that disappears: on emulated hosts, with the launcher and the example that users
have."""

from __future__ import annotations

import os
import shutil

import pytest

from benchmarks.elastic_hosts import EVERY, PER_HOST, measure


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("tc"), reason="emulated hosts need root, ip and tc")
def test_training_goes_on_without_a_host_that_is_cut_off() -> None:
    found = measure(hosts=3)
    assert found["processes"] == [3 * PER_HOST, 2 * PER_HOST]
    assert found["steps_done_again"] <= 2 * EVERY
    assert found["every_step_done"] and found["largest_difference_of_losses"] < 1e-4
    # The default of Options(timeout=), and what a loaded machine takes to restart.
    assert found["seconds_until_named"] < 60 + 35
    assert found["seconds_to_the_next_step"] < 60 + 120
