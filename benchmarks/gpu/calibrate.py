"""The part ``calibrate``: measures this machine's devices, as ``autopar calibrate`` does, beside the preset of their
name. GPUs are written where plans without ``cluster=`` look for them, so the parts after this one are priced by it."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

from autopar.calibration.known_gpus import preset_of
from autopar.calibration.machine import calibrate, measure_gpu, run_job, write_cluster
from autopar.cluster.description import Cluster, local_file

from .setting import Row, Setting

# Seconds of measuring one GPU, and several with their links.
# Chosen: what `autopar calibrate` takes for one, and the least for links between a few.
_ONE, _SEVERAL = 10.0, 40.0
# The least that starts processes (autopar/calibration/machine.py) and measures each figure once.
_TINY = 13.0


def cases(setting: Setting) -> list[str]:
    return [setting.kind]


def run(case: str, setting: Setting) -> list[Row]:
    """One row: rates and their source."""
    measured = _measure(setting)
    row: Row = {"case": case, "source": measured.source, "toml": measured.to_toml(), **_rates(measured)}
    if setting.kind == "cuda":
        gpu = torch.cuda.get_device_properties(setting.device)
        preset = preset_of(gpu.name, int(gpu.total_memory))
        row |= {
            "gpu": gpu.name,
            "capability": f"{gpu.major}.{gpu.minor}",
            "memory_bytes": int(gpu.total_memory),
            "cuda": torch.version.cuda,
            "nccl": _nccl(),
            "preset": None if preset is None else {"name": preset.name, **_rates(preset)},
        }
    return [row]


def _nccl() -> str:
    """The version of NCCL, or why there is none."""
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _rates(cluster: Cluster) -> Row:
    device = cluster.device
    return {
        "peak_flops": dict(device.peak_flops),
        "memory_bandwidth": device.memory_bandwidth,
        "launch_seconds": device.launch_seconds,
    }


def _measure(setting: Setting) -> Cluster:
    if setting.kind != "cuda":
        with tempfile.TemporaryDirectory() as folder:
            return calibrate(2, _TINY, Path(folder) / "local.toml")
    target = local_file("local-gpu")
    if setting.world == 1:
        measured = measure_gpu(_ONE)
        write_cluster(target, measured)
        return measured
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={setting.world}"]
    run_job([*command, "-m", "autopar", "calibrate", "--seconds", str(_SEVERAL), "--output", str(target)], 8 * _SEVERAL)
    return Cluster.get(str(target))
