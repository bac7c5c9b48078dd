"""Calibration of a local disk: fits recover what made the figures, and what is measured goes into the description."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autopar.calibration.disk import with_disk
from autopar.calibration.measure_disk import LARGE, MOMENTS, SMALL, DiskSample, measure_disk
from autopar.cluster.description import Cluster
from autopar.cluster.device import Device
from autopar.command_line import main
from autopar.errors import OptionsError
from autopar.runtime.state import disk

DEVICE = Device("cpu", {"f32": 4e10}, 1 << 30, 8e9, 5e-6)


@pytest.mark.parametrize("shared", [1.0, 0.6])
def test_rates_are_found_again(shared: float) -> None:
    """``shared``: the part of the sum of both times that reading beside writing takes."""
    read, write, latency, moved = 2e9, 1e9, 1e-4, 4 * MOMENTS * LARGE
    beside = shared * (moved / read + moved / write)
    small = 2 * latency + 4 * MOMENTS * SMALL / moved * beside
    sample = DiskSample(2 * latency + beside, small, moved / read, moved / write, free=1 << 40)
    found = with_disk(DEVICE, [sample, replace(sample, free=1 << 39)])
    assert found.nvme_bytes == 1 << 38
    assert found.nvme_latency == pytest.approx(latency)
    assert found.nvme_read_bandwidth == pytest.approx(read / shared)
    assert found.nvme_write_bandwidth == pytest.approx(write / shared)
    assert found.nvme_read(moved) + found.nvme_write(moved) == pytest.approx(2 * latency + beside)


def test_a_disk_is_measured_by_processes_and_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(disk.FOLDER, str(tmp_path))
    target = tmp_path / "local.toml"
    assert main(["calibrate", "--disk", "--nproc", "2", "--seconds", "0.1", "--output", str(target)]) == 0
    found, before = Cluster.get(str(target)), Cluster.get("local")
    assert found.device.has_nvme and not before.device.has_nvme
    assert found.links == before.links and "disk of" in found.source
    # Whatever the machine is: faster than a floppy and slower than memory.
    assert 1e6 < found.device.nvme_read_bandwidth < 1e11 and 1e6 < found.device.nvme_write_bandwidth < 1e11
    assert not list(tmp_path.glob("autopar-offload-*"))


def test_too_little_room_is_said_before_anything_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(disk.FOLDER, str(tmp_path))
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(OptionsError, match="has 1000 bytes free; measuring its disk takes"):
        measure_disk(0.1, lambda: None)
    assert not list(tmp_path.iterdir())
