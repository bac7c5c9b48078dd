"""Checks that this machine has what autopar needs: versions, communication backends, devices, calibration, caches."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import shlex
from pathlib import Path

import torch
import torch.distributed as dist

from autopar import supported
from autopar.cluster.description import Cluster, local_file, machine_memory
from autopar.content.cache_folder import KINDS, cache_folder, caching_enabled
from autopar.errors import OptionsError
from autopar.plans.views.quantities import size
from autopar.supported import PYTHON, TORCH, is_supported, text

from .finding import Examination, Finding
from .ports import own_ports

NEEDED = ("torch", "numpy", "ortools", "networkx", "sympy", "rich", "cloudpickle")


def examine() -> Examination:
    """Examines this machine; starts no process and changes nothing."""
    return Examination((*_versions(), *_backends(), _devices(), _memory(), own_ports(), _calibration(), *_caches()))


def _versions() -> list[Finding]:
    return [
        _python(platform.python_version()),
        Finding("autopar", importlib.metadata.version("autopar")),
        *map(_version, NEEDED),
    ]


def _python(version: str) -> Finding:
    fits = is_supported(version, PYTHON)
    advice = "" if fits else f"autopar supports Python {text(PYTHON)}"
    return Finding("python", f"{version} (supported: {text(PYTHON)})", fits, advice)


def _torch(version: str) -> Finding:
    advice = supported.advice(version)
    return Finding("torch", f"{version} (supported: {text(TORCH)})", not advice, advice)


def _version(package: str) -> Finding:
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return Finding(package, "missing", False, f"pip install {package}")
    return _torch(version) if package == "torch" else Finding(package, version)


def _backends() -> list[Finding]:
    gloo = dist.is_available() and dist.is_gloo_available()
    nccl = dist.is_available() and dist.is_nccl_available()
    needs_nccl = torch.cuda.is_available() and not nccl
    return [
        Finding("gloo", "available" if gloo else "missing", gloo, "" if gloo else "needed to run on CPU processes"),
        Finding(
            "nccl",
            "available" if nccl else "missing",
            not needs_nccl,
            "GPUs are here but this build of torch lacks NCCL" if needs_nccl else "",
        ),
    ]


def _devices() -> Finding:
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        return Finding("devices", ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)))
    return Finding("devices", f"CPU with {os.cpu_count()} cores, {torch.get_num_threads()} threads per process")


def _memory() -> Finding:
    return Finding("memory", f"{machine_memory() / 2**30:.1f} GiB")


def _calibration() -> Finding:
    if not local_file().is_file():
        return Finding("calibration", "none", True, "run `autopar calibrate` to price plans for this machine")
    try:
        return Finding("calibration", str(Cluster.get("local")))
    except OptionsError as error:
        return Finding("calibration", str(local_file()), False, f"unreadable: {error}; run `autopar calibrate`")


def _caches() -> list[Finding]:
    """The caches and their sizes (docs/cache.md)."""
    folder = cache_folder()
    findings = [_contents_of(folder / kind) for kind in KINDS]
    if not caching_enabled():
        return [Finding("cache", "off (AUTOPAR_CACHE=off): traces, plans and rules are made each time"), *findings]
    paths = " ".join(shlex.quote(str(folder / kind)) for kind in KINDS)
    advice = f"may be deleted at any time (rm -r {paths}); AUTOPAR_CACHE=FOLDER moves it, AUTOPAR_CACHE=off ends it"
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(nearest, os.W_OK):
        return [Finding("cache", f"{folder}, which cannot be written to", True, "set AUTOPAR_CACHE=FOLDER"), *findings]
    return [Finding("cache", str(folder), True, advice), *findings]


def _contents_of(folder: Path) -> Finding:
    sizes = []
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):  # Another process deleted it meanwhile.
            if file.is_file():
                sizes.append(file.stat().st_size)
    return Finding(folder.name, f"{len(sizes)} kept, {size(sum(sizes))}")
