"""``autopar doctor`` on a job: who does not fit is named."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from autopar.calibration.host_pairs import HostPair, ProcessFacts
from autopar.cli import examine_job as job
from autopar.cli.examine import Examination
from autopar.runtime.launch import run_local


def of_two_hosts(rank: int, count: int) -> Examination:
    return job.examine_job(host=f"host{rank // 2}")


def of_torn_hosts(rank: int, count: int) -> Examination:
    return job.examine_job(host=f"host{rank % 2}")


def by_name(report: Examination) -> dict[str, Any]:
    return {finding.name: finding for finding in report.findings}


def test_a_job_of_two_hosts_is_in_order() -> None:
    reports = run_local(of_two_hosts, 4, timeout=100)
    assert all(report == reports[0] for report in reports)
    found = by_name(reports[0])
    assert found["ranks"].ok and found["ranks"].value == "4 ranks on 2 hosts: host0 x2, host1 x2"
    assert found["torch"].ok and "on all" in found["torch"].value
    assert "/s between hosts" in found["links"].value and "1 pairs" in found["links"].value
    assert reports[0].ok


def test_ranks_that_alternate_between_hosts_are_named() -> None:
    report = run_local(of_torn_hosts, 4, timeout=100)[0]
    found = by_name(report)["ranks"]
    assert not report.ok and not found.ok and "ranks [0, 2] are on host0" in found.advice


def facts(**changed: Any) -> ProcessFacts:
    versions = (("python", "3.11.2"), ("torch", "2.13.0"))
    return dataclasses.replace(ProcessFacts(0, "a", 0, versions, "H100", 8 << 30), **changed)


def test_another_version_is_named() -> None:
    old = facts(rank=1, host="b", versions=(("python", "3.11.2"), ("torch", "2.11.0")), device="A100")
    found = {f.name: f for f in job._alike([facts(), facts(rank=2, host="c"), old])}
    assert found["python"].ok and not found["torch"].ok and not found["device"].ok
    assert found["torch"].value == "2.13.0, but 2.11.0 on b"


def test_the_slow_host_is_named() -> None:
    hosts = ("a", "b", "c", "d")
    pairs = [
        HostPair(x, y, 1e9 / (5 if "c" in (x, y) else 1), 1e-4) for i, x in enumerate(hosts) for y in hosts[i + 1 :]
    ]
    (found,) = job._links([*pairs, HostPair("a", "e", 1e9, 1e-4)])
    assert not found.ok and "look at c, which is in 3 of them" in found.advice
    (fine,) = job._links([p for p in pairs if "c" not in (p.first, p.second)])
    assert fine.ok


@pytest.mark.parametrize(("free", "advises"), [(64 << 20, True), (8 << 30, False)])
def test_little_shared_memory_is_told(free: int, advises: bool) -> None:
    found = job._shared([facts(), facts(rank=1, host="b", shared=free)])
    assert found.ok and bool(found.advice) == advises


def test_hosts_of_unequal_size_fit_no_mesh() -> None:
    assert not job._order([facts(), facts(rank=1), facts(rank=2, host="b")]).ok
