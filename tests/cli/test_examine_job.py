"""``autopar doctor`` on a job: who does not fit is named."""

from __future__ import annotations

import dataclasses
import itertools
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autopar.calibration.host_pairs import HostPair, ProcessFacts, process_facts, rounds
from autopar.cli import examine_job as job
from autopar.cli import ports
from autopar.cli.finding import Examination, Finding
from autopar.errors import FaultError
from autopar.runtime.launch import run_local


def of_two_hosts(rank: int, count: int) -> Examination:
    return job.examine_job(host=f"host{rank // 2}")


def of_torn_hosts(rank: int, count: int) -> Examination:
    return job.examine_job(host=f"host{rank % 3}")


def by_name(report: Examination) -> dict[str, Any]:
    return {finding.name: finding for finding in report.findings}


def test_a_job_of_two_hosts_is_in_order() -> None:
    reports = run_local(of_two_hosts, 4, timeout=100)
    assert all(report == reports[0] for report in reports)
    found = by_name(reports[0])
    assert found["ranks"].ok and found["ranks"].value == "4 ranks on 2 hosts: host0 x2, host1 x2"
    assert found["torch"].ok and "on all" in found["torch"].value
    assert "/s between hosts" in (said := found["links"].value) and "(one pair, with nothing to compare it" in said
    assert "and each other at ports " in found["ports"].value
    assert reports[0].ok


def test_ranks_that_alternate_between_hosts_are_named() -> None:
    report = run_local(of_torn_hosts, 4, timeout=100)[0]
    found = by_name(report)["ranks"]
    assert not report.ok and not found.ok and "ranks [0, 3] are on host0" in found.advice
    assert "(medians of 3 pairs)" in by_name(report)["links"].value


def facts(**changed: Any) -> ProcessFacts:
    versions = (("python", "3.11.2"), ("torch", "2.13.0"))
    return dataclasses.replace(ProcessFacts(0, "a", 0, versions, "H100", 8 << 30), **changed)


def test_another_version_is_named() -> None:
    old = facts(rank=1, host="b", versions=(("python", "3.11.2"), ("torch", "2.11.0")), device="A100")
    found = {f.name: f for f in job._alike([facts(), facts(rank=2, host="c"), old])}
    assert found["python"].ok and not found["torch"].ok and not found["device"].ok
    assert found["torch"].value == "2.13.0, but 2.11.0 on b"


def links(hosts: str, slower: Callable[[str, str], float]) -> Finding:
    """What is said of hosts of one letter, whose pairs are so many times slower than others."""
    pairs = [HostPair(x, y, 1e9 / slower(x, y), 1e-4) for x, y in itertools.combinations(hosts, 2)]
    (found,) = job._links(pairs)
    return found


@pytest.mark.parametrize(("hosts", "factor"), [("abc", 2), ("abc", 9), ("abcd", 2), ("abcde", 2)])
def test_the_slow_host_is_named(hosts: str, factor: float) -> None:
    found = links(hosts, lambda x, y: factor if "b" in (x, y) else 1)
    assert not found.ok and found.advice.startswith("slow: a - b ")
    assert found.advice.endswith("look at b, of which all links are")
    assert links(hosts, lambda x, y: 1.3 if "b" in (x, y) else 1).ok


def test_a_slow_pair_is_named_and_another_rack_is_not() -> None:
    found = links("abcd", lambda x, y: 2 if (x, y) == ("b", "d") else 1)
    assert not found.ok and found.advice == "slow: b - d 477 MiB/s"
    assert links("abcdefgh", lambda x, y: 2 if (x < "e") != (y < "e") else 1).ok


def test_each_pair_meets_once_and_nobody_twice_in_a_round() -> None:
    for count in range(1, 10):
        found = list(rounds(count))
        assert len(found) <= max(1, count - 1 + count % 2)
        assert sorted(itertools.chain(*found)) == list(itertools.combinations(range(count), 2))
        for matches in found:
            assert len(set(itertools.chain(*matches))) == 2 * len(matches)


@pytest.mark.parametrize(("visible", "device"), [(1, "H100 0"), (8, "H100 3"), (2, "no GPU of its own, of 2")])
def test_a_process_with_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch, visible: int, device: str) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "as the launcher says")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"H100 {index}")
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    assert process_facts("a").device == device


def test_a_taken_port_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr(ports, "DEFAULT_PORT", port)
        found = ports.own_ports()
        assert found.ok and found.value.startswith(f"{port} is taken") and "--rendezvous" in found.advice
        assert sys.platform != "linux" or f"(process {os.getpid()}: " in found.value
    monkeypatch.setattr(ports, "_MASTER_PORT", port)
    assert ports.own_ports().value == f"{port} and {port}, at which jobs meet, are free"


def test_a_rank_that_is_not_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_MEETING_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": 1, "WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(FaultError, match=f"rank 1 does not reach rank 0 at 127.0.0.1:{port}.* come to autopar doctor"):
        job.in_gloo_job()

    def closed(*_: object, **__: object) -> None:
        raise RuntimeError("connectFullMesh failed")

    monkeypatch.setattr(ports, "join_world", closed)
    with pytest.raises(FaultError, match=r"but not each other: connectFullMesh failed\. .* GLOO_SOCKET_IFNAME"):
        job.in_gloo_job()


@pytest.mark.parametrize(("free", "advises"), [(64 << 20, True), (8 << 30, False)])
def test_little_shared_memory_is_told(free: int, advises: bool) -> None:
    found = job._shared([facts(), facts(rank=1, host="b", shared=free)])
    assert found.ok and bool(found.advice) == advises


def test_hosts_of_unequal_size_fit_no_mesh() -> None:
    assert not job._order([facts(), facts(rank=1), facts(rank=2, host="b")]).ok
