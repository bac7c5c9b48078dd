"""What is said where ranks do not have the GPUs that a plan can run on. No GPU is needed: torch's answers are set."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from autopar.api import device_mesh
from autopar.errors import OptionsError, PlanMismatchError
from autopar.runtime.comm.devices import Gpu, check_gpus, own_gpu, require_nccl

A100 = Gpu("NVIDIA A100-SXM4-80GB", 85_000_000_000, (8, 0))
SMALLER = Gpu("NVIDIA A100-SXM4-40GB", 42_000_000_000, (8, 0))
V100 = Gpu("Tesla V100-SXM2-32GB", 34_000_000_000, (7, 0))


def test_a_gpu_is_described_as_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    said = SimpleNamespace(name=V100.name, total_memory=V100.memory, major=7, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: said)
    assert Gpu.of(torch.device("cuda", 0)) == V100


def test_equal_gpus_are_fine() -> None:
    check_gpus([A100, Gpu(A100.name, A100.memory - 2**20, (8, 0))], [0, 1], "bf16", 60 * 10**9)
    check_gpus([V100], [0], "fp16", None)


def test_the_fewer_ranks_are_named() -> None:
    with pytest.raises(
        OptionsError, match=r"rank 5 has NVIDIA A100-SXM4-40GB \(39.1 GiB\), but ranks 4, 6 have NVIDIA A100-SXM4-80GB"
    ):
        check_gpus([A100, SMALLER, A100], [4, 5, 6], None, None)


def test_bf16_needs_ampere() -> None:
    with pytest.raises(OptionsError, match=r"8.0 or above .* V100.* has 7.0.*fp16"):
        check_gpus([V100, V100], [0, 1], "bf16", None)


def test_a_plan_for_more_memory_names_a_limit() -> None:
    with pytest.raises(PlanMismatchError, match=r"needs 55.9 GiB .*39.1 GiB.*memory_limit=37800000000"):
        check_gpus([SMALLER], [0], "bf16", 60 * 10**9)


def test_without_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(OptionsError, match=r"without NCCL.*CUDA_VISIBLE_DEVICES="):
        require_nccl()
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(OptionsError, match="without NCCL"):
        device_mesh(1)


@pytest.mark.parametrize(
    ("rank", "visible", "limited", "index"),
    [("3", 8, None, 3), ("3", 1, "3", 0), ("0", 1, None, 0)],
)
def test_the_gpu_of_a_process(
    monkeypatch: pytest.MonkeyPatch, rank: str, visible: int, limited: str | None, index: int
) -> None:
    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if limited is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", limited)
    assert own_gpu() == index


def test_more_processes_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(OptionsError, match=r"local rank 2 sees 2 GPUs: .*--nproc-per-node 2"):
        own_gpu()
