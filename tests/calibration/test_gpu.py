"""GPUs from measurements of their kernels: made-up ones are found again, a real one is priced as it was measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from autopar.calibration import machine
from autopar.calibration.fit_gpu import fit_gpu, fit_tiles
from autopar.calibration.known_gpus import preset_of
from autopar.calibration.measure_device import AttentionSample, DeviceSamples, MatrixSample
from autopar.calibration.measure_kernels import GPU_MATRICES
from autopar.cluster.description import Cluster, Device, Link
from autopar.cost import node_seconds
from autopar.cost.compute.matmul_efficiency import product_seconds
from autopar.ir.node import Node, TensorType, Value

# Measured on 2026-11-26 by torch 2.11 with CUDA 13; the last eight products in bf16 on another H200 of that day.
H200 = Path(__file__).parent / "h200_samples.json"
NAME, MEMORY = "NVIDIA H200", 150_109_880_320


def test_tiles_of_a_gpu_are_found_again() -> None:
    truth = Device("", {"bf16": 8e14}, 1, 3e12, 5e-6, processors=132, tile_depth=400.0, tile_border=11.0)
    made = []
    for position, (m, n, k) in enumerate(GPU_MATRICES):
        seconds = 5e-6 + product_seconds(truth, 8e14, 1.0, (m, n, k))
        made.append(MatrixSample("bf16", m, n, k, seconds * (1.02 if position % 2 else 1.0)))
    found, error = fit_tiles(made, 132, 5e-6, 3e12, 8e14)
    assert error < 0.02
    for m, n, k in ((4096, 11008, 4096), (1024, 3072, 768), (16384, 4096, 8192)):
        priced, true = (product_seconds(d, d.peak_flops["bf16"], 1.0, (m, n, k)) for d in (found, truth))
        assert priced == pytest.approx(true, rel=0.04)
    cluster = Cluster("a GPU", "", replace(found, name="gpu"), (Link("none", 1, 1.0, 0.0),))
    assert Cluster.from_toml(cluster.to_toml()) == cluster


def measured() -> DeviceSamples:
    table = json.loads(H200.read_text())
    matrices = tuple(MatrixSample(**sample) for sample in table.pop("matrices"))
    attention = tuple(AttentionSample(**sample) for sample in table.pop("attention"))
    pointwise = tuple((int(count), float(seconds)) for count, seconds in table.pop("pointwise"))
    return DeviceSamples(matrices=matrices, attention=attention, pointwise=pointwise, **table)


def priced(device: Device, op: str, *shapes: tuple[int, ...], dtype: torch.dtype, results: int = 1) -> float:
    cluster = Cluster("a GPU", "", device, (Link("none", 1, 1.0, 0.0),))
    kinds = tuple(TensorType(shape, dtype) for shape in shapes)
    node = Node("y", op, tuple(Value(str(index)) for index in range(len(shapes) - results)))
    return node_seconds(cluster, node, kinds[:-results], kinds[-results:])


@pytest.mark.parametrize("known", [True, False], ids=["of a known name", "unknown"])
def test_a_real_gpu(known: bool) -> None:
    preset = preset_of(NAME, MEMORY)
    assert preset is not None
    samples = measured()
    device, error = fit_gpu(samples, NAME, MEMORY, 132, preset.device if known else None)
    assert error < 0.1
    assert device.memory_bandwidth == pytest.approx(4.3e12, rel=0.05)  # Of 4.8e12.
    assert device.launch_seconds < 2e-6 < device.host_seconds < 5e-5
    assert device.peak_flops["bf16"] == (989e12 if known else pytest.approx(823e12 * 1.1, rel=0.01))
    for sample in samples.matrices:
        if sample.m * sample.n * sample.k >= 2048**3:
            dtype = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[sample.dtype]
            shapes = ((sample.m, sample.k), (sample.k, sample.n), (sample.m, sample.n))
            found = priced(device, "aten.mm.default", *shapes, dtype=dtype)
            assert found == pytest.approx(sample.seconds, rel=0.3), sample


def test_what_is_written_of_one_gpu_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(name=NAME, total_memory=MEMORY, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(machine, "measure_kernels", lambda *_: measured())
    monkeypatch.setattr(machine, "with_host", lambda fitted, *_: fitted)
    found = machine.measure_gpu()
    machine.write_cluster(str(tmp_path / "local-gpu.toml"), found)
    assert Cluster.get(str(tmp_path / "local-gpu.toml")) == found


def as_cluster(device: Device) -> Cluster:
    return Cluster("a GPU", "", device, (Link("none", 1, 1.0, 0.0),))


def test_attention_of_a_real_gpu_is_priced() -> None:
    samples = measured()
    device, _ = fit_gpu(samples, NAME, MEMORY, 132)
    for sample in samples.attention:
        if not sample.backward:
            shape = (1, sample.heads, sample.length, sample.width)
            kinds = (*(4 * [TensorType(shape, torch.bfloat16)]), TensorType(shape[:-1], torch.float32))
            values = tuple(map(Value, "qkv"))
            node = Node("y", "autopar.attention.default", (*values, None, True), types=kinds[3:])
            found = node_seconds(as_cluster(device), node, kinds[:3], kinds[3:])
            assert found == pytest.approx(sample.seconds, rel=0.15), sample


def test_masks_slow_attention_as_measured() -> None:
    samples = replace(measured(), masked=2e-4)
    device, _ = fit_gpu(samples, NAME, MEMORY, 132)
    like = samples.attention[0]
    kinds = 3 * (TensorType((1, like.heads, like.length, like.width), torch.bfloat16),)
    mask = TensorType((1, 1, like.length, like.length), torch.bfloat16)
    sums = TensorType((1, like.heads, like.length), torch.float32)
    node = Node("y", "autopar.attention.default", tuple(map(Value, "qkvm")), types=(kinds[0], sums))
    assert node_seconds(as_cluster(device), node, (*kinds, mask), (kinds[0], sums)) == pytest.approx(2e-4)
    assert fit_gpu(measured(), NAME, MEMORY, 132)[0].masked_attention == 1.0


def test_a_gpu_without_such_kernels_keeps_products_prices() -> None:
    device, _ = fit_gpu(replace(measured(), attention=()), "an old GPU", MEMORY, 80)
    assert (device.attention_efficiency, device.name) == (0.0, "an old GPU")
