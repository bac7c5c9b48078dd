"""Measuring a job: what links were made of is found again, and processes of several hosts agree on one description."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from autopar.calibration import default_cluster as defaults
from autopar.calibration import job as calibrate_job_module
from autopar.calibration.default_cluster import default_cluster
from autopar.calibration.fit_job import fit_links, shared_adapters
from autopar.calibration.job import calibrate_job
from autopar.calibration.known_gpus import preset_of
from autopar.calibration.machine import run_job
from autopar.calibration.measure_links import GPU_MESSAGE_BYTES, JobShape, LinkSample
from autopar.cluster.description import Cluster, Device, Link, local_file
from autopar.cluster.links import MESSAGE
from autopar.cost import collective_seconds
from autopar.cost.collective.point_to_point import message_rate
from autopar.errors import OptionsError, WorkerError
from autopar.ir.program import COLLECTIVES

DEVICE = Device("gpu", {"bf16": 1e15}, 1 << 30, 1e12, 5e-6)
SHAPE = JobShape(4, 8)


def machine(algorithms: tuple[str, ...], adapters: int | None = None) -> Cluster:
    inside = Link("nvlink", 8, 4e11, 2e-6)
    between = Link("infiniband", 32, 4e10 if adapters is None else 4e10 * 8 / adapters, 8e-6, adapters=adapters)
    return Cluster("truth", "", DEVICE, (inside, between), algorithms=algorithms)


def measured(truth: Cluster, shape: JobShape = SHAPE) -> list[LinkSample]:
    """What a job on a machine exactly like ``truth`` measures."""
    samples = [
        LinkSample(axes, kind, nbytes, collective_seconds(truth, shape.mesh, kind, axes, nbytes))
        for axes in shape.groups()
        for kind in COLLECTIVES
        for nbytes in GPU_MESSAGE_BYTES
    ]
    for axes in (shape.inside[0], shape.between[0]):
        level = truth.links[axes in shape.between]
        share = level.share(shape.per_host)
        samples += [
            LinkSample(axes, MESSAGE, n, level.latency + n / level.bandwidth / share) for n in GPU_MESSAGE_BYTES
        ]
    return samples


def test_a_job_is_laid_out_in_hosts_and_smaller_groups() -> None:
    assert SHAPE.mesh == (2, 2, 4, 2)
    assert SHAPE.groups() == [(3,), (2, 3), (1,), (0, 1), (0, 1, 2, 3)]
    assert JobShape(1, 8).groups() == [(2,), (1, 2)]
    assert JobShape(3, 1).groups() == [(0,)]


@pytest.mark.parametrize("algorithms", [(), ("direct",), ("ring",)])
def test_links_and_algorithms_are_found_again(algorithms: tuple[str, ...]) -> None:
    truth = machine(algorithms)
    found = fit_links(measured(truth), SHAPE, DEVICE)
    assert found.algorithms == algorithms
    assert max(found.errors.values()) < 0.05
    again = replace(truth, links=found.links)
    for axes, kind, nbytes in (((2, 3), "all_gather", 3 << 20), ((0, 1, 2, 3), "all_reduce", 100 << 20)):
        price = collective_seconds(again, SHAPE.mesh, kind, axes, nbytes)
        assert price == pytest.approx(collective_seconds(truth, SHAPE.mesh, kind, axes, nbytes), rel=0.05)
    latency, bandwidth = message_rate(again, 0, 1, 8)
    assert latency + 2**24 / bandwidth == pytest.approx(8e-6 + 2**24 / 4e10, rel=0.02)


def test_adapters_that_a_host_shares_are_counted() -> None:
    truth = machine(("ring",), adapters=2)
    samples, axes = measured(truth), SHAPE.between[-1]
    # One process of each host has an adapter for itself, which four share when all send.
    largest = GPU_MESSAGE_BYTES[-1]
    together = next(s.seconds for s in samples if (s.axes, s.kind, s.nbytes) == (axes, "all_gather", largest))
    assert shared_adapters([*samples, LinkSample(axes, "all_gather", largest, together, alone=True)], SHAPE) is None
    samples.append(LinkSample(axes, "all_gather", largest, together / 4, alone=True))
    found = fit_links(samples, SHAPE, DEVICE)
    assert found.links[1].adapters == 2
    assert found.links[1].lines("all_gather")[0].bandwidth == pytest.approx(1.6e11, rel=0.05)
    price = collective_seconds(replace(truth, links=found.links), SHAPE.mesh, "all_gather", axes, largest)
    assert price == pytest.approx(together, rel=0.05)


def test_one_host_has_one_level() -> None:
    truth = replace(machine(("ring",)), links=(Link("nvlink", 8, 4e11, 2e-6),))
    shape = JobShape(1, 8)
    samples = [
        LinkSample(axes, kind, n, collective_seconds(truth, shape.mesh, kind, axes, n))
        for axes in shape.groups()
        for kind in COLLECTIVES
        for n in GPU_MESSAGE_BYTES
    ]
    samples += [LinkSample((2,), MESSAGE, n, 2e-6 + n / 4e11) for n in GPU_MESSAGE_BYTES]
    found = fit_links(samples, shape, DEVICE)
    assert [(link.name, link.size) for link in found.links] == [("host", 8)]
    assert "across" not in found.errors and max(found.errors.values()) < 0.05


def test_a_launch_of_unlike_hosts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(OptionsError, match=r"3 in all and 2 here.*torchrun --nproc-per-node"):
        calibrate_job()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.mark.slow
def test_processes_of_two_hosts_measure_themselves(tmp_path: Path) -> None:
    """Two launchers with a process each: what two hosts are to torchrun."""
    target = tmp_path / "job.toml"
    command = [sys.executable, "-m", "autopar", "calibrate", "--seconds", "4", "--output", str(target)]
    common = {**os.environ, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [subprocess.Popen(command, env={**common, "RANK": str(rank)}) for rank in range(2)]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    found = Cluster.get(target)
    assert (found.name, found.backend, [link.size for link in found.links]) == ("local-processes", "gloo", [2])
    assert found.links[0].name == "network" and set(found.links[0].rates) == {*COLLECTIVES, MESSAGE}
    assert "on 2 hosts like" in found.source and "network all_gather" in found.source
    assert all(math.isfinite(value) for value in found.measurement.values())


def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, memory: int) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(name=name, total_memory=memory)
    )


def test_gpus_are_priced_by_their_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = {
        ("NVIDIA A100-SXM4-40GB", 42 * 10**9): "dgx-a100-40gb",
        ("NVIDIA H100 80GB HBM3", 85 * 10**9): "dgx-h100",
        ("NVIDIA H200", 150 * 10**9): "dgx-h200",
        ("Tesla V100-SXM2-16GB", 17 * 10**9): "p3.16xlarge",
        ("AMD Instinct MI300X", 206 * 10**9): "mi300x",
    }
    for (name, memory), preset in names.items():
        found = preset_of(name, memory)
        assert found is not None and found.name == preset and repr(name) in found.source
    assert preset_of("NVIDIA GeForce RTX 4090", 24 * 10**9) is None
    assert preset_of("NVIDIA A100-SXM4-80GB MIG 1g.10gb", 10 * 10**9) is None
    gpu(monkeypatch, tmp_path, "NVIDIA H200", 150 * 10**9)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert default_cluster("cuda", 16).links[0].size == 4
    assert default_cluster("cuda", 4).links[0].size == 8
    assert default_cluster("cpu", 4).name == "local"


def test_a_job_that_hangs_is_ended_with_its_workers(tmp_path: Path) -> None:
    """A launcher whose worker would write a file later."""
    late = tmp_path / "late"
    worker = f"import time; time.sleep(3); open({str(late)!r}, 'w')"
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {worker!r}])"
    with pytest.raises(WorkerError, match="did not end in 1 s"):
        run_job([sys.executable, "-c", launcher], 1.0)
    time.sleep(3.0)
    assert not late.exists()
    with pytest.raises(WorkerError, match=r"failed \(exit code 3\):\nno"):
        run_job([sys.executable, "-c", "print('no'); raise SystemExit(3)"], 30.0)


def calibrated(name: str, **facts: object) -> None:
    device = replace(Cluster.get("dgx-h200").device, name="NVIDIA H200")
    mine = replace(Cluster.get("dgx-h200").of_devices(16), name=name, source="mine", device=device)
    local_file(name).write_text(replace(mine, **facts).to_toml())  # type: ignore[arg-type]


def test_a_calibration_of_these_gpus_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu(monkeypatch, tmp_path, "NVIDIA H200", 150 * 10**9)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    calibrated("local-job", measurement={"processes": 16.0, "hosts": 2.0})
    assert default_cluster("cuda", 16).source.startswith("mine")
    assert default_cluster("cuda", 32).name == "dgx-h200"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert default_cluster("cuda", 4).source.startswith("mine")
    # Two hosts of four are not a host of eight, and what one process of each host has is no link inside a host.
    assert default_cluster("cuda", 8).name == "dgx-h200"
    calibrated("local-job", measurement={"processes": 16.0, "hosts": 16.0})
    assert default_cluster("cuda", 4).name == "dgx-h200"


def test_calibrations_of_other_devices_are_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu(monkeypatch, tmp_path, "NVIDIA H200", 150 * 10**9)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    calibrated("local-gpu", backend="gloo")
    calibrated("local-job", device=replace(Cluster.get("dgx-a100-80gb").device, name="NVIDIA A100-SXM4-80GB"))
    assert default_cluster("cuda", 8).name == "dgx-h200"
    with pytest.raises(OptionsError, match=r"nothing is known about 'xpu' devices.*dgx-h100"):
        default_cluster("xpu", 8)


def test_a_local_file_from_before_backends_is_of_gloo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    text = Cluster.get("local").to_toml()
    local_file("local").write_text("".join(line for line in text.splitlines(True) if "backend" not in line))
    assert Cluster.get("local").backend == "gloo"


@pytest.mark.parametrize(
    ("visible", "own", "device"), [(8, False, "cuda:3"), (1, True, "cuda:0"), (2, True, ""), (0, False, "cpu")]
)
def test_each_process_takes_a_gpu(monkeypatch: pytest.MonkeyPatch, visible: int, own: bool, device: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: visible > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if own:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    if device:
        assert str(calibrate_job_module._device(JobShape(2, 8))) == device
    else:
        with pytest.raises(OptionsError, match="8 processes on this host see 2 GPUs"):
            calibrate_job_module._device(JobShape(2, 8))


def test_an_unknown_gpu_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu(monkeypatch, tmp_path, "NVIDIA L4", 24 * 10**9)
    device = replace(DEVICE, host_bandwidth=1e10, host_memory_bytes=1 << 38)
    alone = Cluster("local-gpu", "measured", device, (Link("none", 1, 1.0, 0.0),))
    monkeypatch.setattr(defaults, "_measure_once", lambda: alone)
    found = default_cluster("cuda", 4)
    assert found.size is None and found.device == replace(device, host_memory_bytes=1 << 36)
    assert "links between GPUs assumed (10 GB/s)" in found.source and "autopar calibrate" in found.source
