"""Calibration: the fits recover what made the figures; processes that fail or hang end it."""

from __future__ import annotations

import math
import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autopar.calibration import fit_processes as fitting
from autopar.calibration import machine as calibration
from autopar.calibration.combine_samples import mean, undisturbed
from autopar.calibration.fit_device import fit_attention, fit_device, fit_matrices
from autopar.calibration.fit_links import fit_rates
from autopar.calibration.fit_processes import exchanging_in_step, fit_cluster, in_step
from autopar.calibration.machine import calibrate
from autopar.calibration.measure_device import (
    CPU_ATTENTION,
    CPU_MATRICES,
    FUNCTION_ELEMENTS,
    HEADS,
    AttentionSample,
    DeviceSamples,
    MatrixSample,
    lower_quartile,
)
from autopar.calibration.measure_process import MESSAGE_BYTES
from autopar.calibration.measure_step import UPDATED_BYTES, exchange_seconds, step_like_seconds
from autopar.calibration.samples import CollectiveSample, Samples
from autopar.cluster.description import Cluster, Device, Link, Rate
from autopar.cost import collective_seconds, node_seconds
from autopar.cost.compute.matmul_efficiency import attention_seconds
from autopar.errors import OptionsError, WorkerError
from autopar.ir.node import Node, TensorType, Value
from autopar.ir.program import COLLECTIVES

DEVICE = Device("cpu", {"f32": 4e10, "bf16": 1e10}, 1 << 30, 8e9, 5e-6, 2e-6, matmul_padding=8)


def machine(*rates: Rate) -> Cluster:
    return Cluster("made up", "", DEVICE, (Link("gloo", None, 1.0, 1.0, dict.fromkeys(COLLECTIVES, rates)),))


def collectives(truth: Cluster, noise: float = 0.0) -> tuple[CollectiveSample, ...]:
    """What a machine exactly like ``truth`` would measure; every other figure ``noise`` too high."""
    return tuple(
        CollectiveSample(k, n, size, collective_seconds(truth, (n,), k, (0,), size) * (1 + noise * (i % 2)))
        for k in COLLECTIVES
        for n in (2, 4)
        for i, size in enumerate(MESSAGE_BYTES)
    )


def product(m: int, n: int, k: int, dtype: str, device: Device = DEVICE) -> MatrixSample:
    kind = {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]
    shapes = [TensorType(shape, kind) for shape in ((m, k), (k, n), (m, n))]
    node = Node("y", "aten.mm.default", (Value("a"), Value("b")))
    cluster = replace(machine(Rate(0, 1)), device=device)
    return MatrixSample(dtype, m, n, k, node_seconds(cluster, node, tuple(shapes[:2]), (shapes[2],)))


def test_what_is_slower_in_a_step_slows_all_computing() -> None:
    truth = machine(Rate(1e-4, 1e9))
    usual = step_like_seconds(truth)
    assert in_step(truth, 0.5 * usual, 1e-9).device == truth.device
    slower = in_step(truth, 2.0 * usual, 0.0)
    assert usual < step_like_seconds(slower) <= 2.0 * usual
    assert slower.device.flops(torch.float32) == truth.device.flops(torch.float32) / 2.0
    later = in_step(truth, 0.0, 3.0 * DEVICE.launch_seconds).device
    assert (later.launch_seconds, later.view_seconds) == (3.0 * DEVICE.launch_seconds, 3.0 * DEVICE.view_seconds)


def test_what_an_exchange_takes_in_a_step_slows_the_links() -> None:
    truth = machine(Rate(1e-4, 1e9))
    usual, wire = exchange_seconds(truth, 4)
    assert exchanging_in_step(truth, 4, 0.5 * usual).links == truth.links
    slower = exchanging_in_step(truth, 4, usual + wire)
    assert exchange_seconds(slower, 4)[0] == pytest.approx(usual + wire)
    assert slower.links[0].lines("all_to_all")[0].bandwidth == pytest.approx(5e8)


def test_processes_that_gain_alone_share_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "available_cores", lambda: 2)
    measured = samples(machine(Rate(1e-4, 1e9)))
    four = [replace(measured, alone=2.0)] * 4
    assert (fit_cluster(four, 1).sharing, fit_cluster(four, 1).cores) == (4, 2.0)
    assert [fit_cluster(four, 1).speed(k) for k in (1, 2, 3, 4)] == [2.0, 2.0, 4 / 3, 1.0]
    assert fit_cluster([replace(measured, alone=3.7)] * 4, 1).cores == 2.0  # The machine was busy with something else.
    own = fit_cluster([replace(measured, alone=1.01)] * 4, 1)
    assert (own.sharing, own.cores) == (1, 1.0)


def samples(truth: Cluster) -> Samples:
    matrices = (*(product(*shape, "f32") for shape in CPU_MATRICES), product(256, 256, 256, "bf16"))
    pointwise = tuple((size, DEVICE.launch_seconds + size / DEVICE.memory_bandwidth) for size in (10**5, 10**7))
    return Samples(DeviceSamples(5e-6, 2e-6, matrices, pointwise), collectives(truth))


@pytest.mark.parametrize("truth", [Rate(3e-4, 8e8), Rate(2e-4, 1e9, 3.0), Rate(0.0, 5e8), Rate(1e-3, math.inf)])
@pytest.mark.parametrize("kind", COLLECTIVES)
def test_rates_are_recovered(truth: Rate, kind: str) -> None:
    (rate,), error = fit_rates([s for s in collectives(machine(truth)) if s.kind == kind])
    assert error < 1e-9
    assert rate.growth == truth.growth
    assert rate.latency == pytest.approx(truth.latency, abs=1e-9)
    assert min(rate.bandwidth, 1e15) == pytest.approx(min(truth.bandwidth, 1e15), rel=1e-6)


def test_a_bend_is_recovered() -> None:
    truth = (Rate(1e-3, 5e9), Rate(1e-6, 5e8))
    rates, error = fit_rates([s for s in collectives(machine(*truth)) if s.kind == "all_gather"])
    assert len(rates) == 2
    assert error < 0.05
    assert rates[0].latency == pytest.approx(1e-3, rel=0.05)
    assert rates[1].bandwidth == pytest.approx(5e8, rel=0.05)


def test_the_error_that_remains_is_told() -> None:
    noisy = collectives(machine(Rate(1e-3, 1e9)), noise=0.4)
    _, error = fit_rates([s for s in noisy if s.kind == "all_reduce"])
    assert 0.1 < error < 0.25


def test_matrices_are_recovered() -> None:
    found, error = fit_matrices([product(*shape, "f32") for shape in CPU_MATRICES], 5e-6, 8e9)
    assert error < 0.01
    assert found.peak_flops["f32"] == pytest.approx(4e10, rel=0.02)
    assert found.matmul_padding == pytest.approx(8, abs=0.5)
    assert found.memory_stalls < 0.05


def test_operands_that_are_waited_for_are_found() -> None:
    waiting = replace(DEVICE, memory_stalls=0.8, matmul_padding=2)
    found, error = fit_matrices([product(*shape, "f32", waiting) for shape in CPU_MATRICES], 5e-6, 8e9)
    assert error < 0.01
    assert found.memory_stalls == pytest.approx(0.8, abs=0.05)
    assert found.peak_flops["f32"] == pytest.approx(4e10, rel=0.02)


def test_attention_and_functions_are_recovered() -> None:
    truth = replace(DEVICE, attention_efficiency=0.4, attention_width=50.0, attention_length=20.0)
    attention = tuple(
        AttentionSample(
            length, width, back, 5e-6 + attention_seconds(truth, 4e10, HEADS * length**2 * width * x, width, length)
        )
        for length, width in CPU_ATTENTION
        for back, x in ((False, 2), (True, 5))
    )
    like, error = fit_attention(attention, DEVICE)
    assert (like.attention_efficiency, like.attention_width) == (
        pytest.approx(0.4, rel=0.02),
        pytest.approx(50, rel=0.05),
    )
    assert like.attention_length == pytest.approx(20, rel=0.05)
    assert error < 0.01
    measured = replace(samples(machine(Rate(1e-4, 1e9))).device, attention=attention, function=5e-6 + 1e-3)
    found, errors = fit_device(measured, "cpu", 1 << 30)
    assert set(errors) == {"matmul", "attention"}
    assert found.function_seconds == pytest.approx(1e-3 / FUNCTION_ELEMENTS)


def test_work_like_a_step_is_priced_as_measured() -> None:
    truth = machine(Rate(1e-4, 1e9))
    before = fit_cluster([samples(truth)] * 2, 1)
    usual = step_like_seconds(before)
    early, late = (replace(samples(truth), step=t * usual, update=t * UPDATED_BYTES / 4e9) for t in (2.0, 4.0))
    found = fit_cluster([early, late], 1)
    assert step_like_seconds(found) == pytest.approx(3.0 * usual, rel=0.01)
    assert found.device.updates == pytest.approx(4e9 / 3.0)
    assert before.device.updates == before.device.memory_bandwidth


def test_of_work_like_a_step_the_usual_time_counts() -> None:
    one = samples(machine(Rate(1e-4, 1e9)))
    combined = undisturbed([replace(one, step=t, update=2 * t, launch=t) for t in (4.0, 1.0, 3.0, 2.0)])
    assert (combined.step, combined.update, combined.launch) == (2.5, 5.0, 1.75)
    assert mean([replace(one, own_step=t) for t in (1.0, 2.0, 6.0)]).own_step == 3.0


def test_rounds_that_were_disturbed_do_not_count() -> None:
    one = replace(samples(machine(Rate(3e-4, 8e8))), synchronisation=1e-3, alone=2.0)

    def slower(factor: float, missing: int = 0) -> Samples:
        times = tuple(replace(c, seconds=factor * c.seconds) for c in one.collectives[missing:])
        matrices = tuple(replace(m, seconds=factor * m.seconds) for m in one.device.matrices)
        return replace(
            one, collectives=times, device=replace(one.device, matrices=matrices), synchronisation=factor * 1e-3
        )

    found = undisturbed([slower(3.0), one, slower(9.0, missing=1), one])
    assert found.collectives == one.collectives[1:]
    assert found.device == one.device
    assert found.synchronisation == 2e-3
    assert lower_quartile([5.0]) == 5.0


def test_the_fitted_cluster_prices_as_the_machine_does() -> None:
    truth = machine(Rate(3e-4, 8e8, 2.0))
    one = replace(samples(truth), synchronisation=2e-3)
    slow = replace(one, collectives=tuple(replace(s, seconds=2 * s.seconds) for s in one.collectives))
    assert Samples.from_json(one.to_json()) == one
    cluster = fit_cluster([one, one], threads=1)
    assert cluster.device.memory_bandwidth == pytest.approx(8e9)
    assert cluster.device.peak_flops["bf16"] == pytest.approx(1e10, rel=0.02)
    assert "2 gloo processes of 1 threads" in cluster.source
    assert "all_gather 0%" in cluster.source
    assert Cluster.from_toml(cluster.to_toml()) == cluster
    assert cluster.synchronisation_seconds == pytest.approx(2e-3)
    skewed = replace(slow, synchronisation=4e-3)
    assert fit_cluster([one, skewed], 1).synchronisation_seconds == pytest.approx(3e-3)
    truth = replace(truth, synchronisation_seconds=2e-3)
    for kind in COLLECTIVES:
        ours, theirs = (collective_seconds(c, (2, 4), kind, (0,), 12345) for c in (cluster, truth))
        assert ours == pytest.approx(theirs)
        mean = collective_seconds(fit_cluster([one, slow], 1), (2, 4), kind, (0,), 12345)
        assert mean == pytest.approx(1.5 * (theirs - 2e-3) + 2e-3)


def test_one_process_has_nothing_to_measure() -> None:
    with pytest.raises(OptionsError, match="at least 2 processes, not 1"):
        calibrate(processes=1)


def test_a_process_that_fails_ends_it_with_its_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    worker = "import sys, time\nif sys.argv[2] == '1': raise ValueError('no such card')\ntime.sleep(60)"
    monkeypatch.setattr(calibration, "_WORKER", worker)
    started = time.monotonic()
    with pytest.raises(WorkerError, match=r"(?s)rank 1 of 3 failed.*ValueError: no such card"):
        calibrate(processes=3, path=tmp_path / "x.toml")
    assert time.monotonic() - started < 30
    assert not (tmp_path / "x.toml").exists()


def test_processes_that_hang_are_ended(tmp_path: Path) -> None:
    process = subprocess.Popen(["sleep", "60"])
    try:
        with pytest.raises(WorkerError, match=r"did not end in time; ranks \[0\] of 1"):
            calibration._wait([process], time.monotonic() + 0.2, tmp_path)
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_calibrates_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
    started = time.monotonic()
    cluster = calibrate(processes=2, seconds=16)
    assert time.monotonic() - started < 60
    assert Cluster.get("local").links == cluster.links
    assert "2 gloo processes" in Cluster.get("local").source
    assert set(cluster.links[0].rates) == set(COLLECTIVES)
    assert 0 <= cluster.synchronisation_seconds < 1.0
    assert 1e8 < cluster.device.peak_flops["f32"] < 1e13
    assert 1e7 < cluster.device.memory_bandwidth < 1e13
    assert 0 < cluster.device.view_seconds < 1e-3
    for kind in COLLECTIVES:
        assert 1e-5 < collective_seconds(cluster, (2,), kind, (0,), 1 << 20) < 1.0
