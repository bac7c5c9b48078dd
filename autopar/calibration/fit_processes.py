"""Fits a cluster to what processes measured that share the cores of their host.

Devices are fitted in :mod:`.fit_device`, collectives in :mod:`.fit_links`. The remaining relative errors are part of
the cluster's ``source``.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.cluster.description import Cluster, Link, Rate, machine_memory
from autopar.ir.program import COLLECTIVES

from .combine_samples import mean
from .fit_device import fit_device
from .fit_links import fit_rates
from .measure_step import UPDATED_BYTES, exchange_seconds, step_like_seconds
from .samples import Samples

# Processes have processors of their own if they compute faster alone by less than this share.
# Chosen: about the relative error that remains for products (3 to 15%, docs/cost-model.md, `local`).
LEAST_GAIN = 0.1
# A placeholder for links that have not been measured yet.
NO_LINK = Link("none", None, 1.0, 0.0)


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor_name() -> str:
    return platform.processor() or platform.machine() or "cpu"


def fit_cluster(samples: Sequence[Samples], threads: int) -> Cluster:
    """Fits the cluster ``local`` to what each of several processes measured. Their times are averaged."""
    measured, processes, cores = mean(samples), len(samples), available_cores()
    crowded = processes * threads / cores
    gain = min(crowded if crowded > 1.0 else float(processes), measured.alone)
    cluster, errors = fit_processes(measured, processes, threads, gain)
    fits = {kind: fit_rates([s for s in measured.collectives if s.kind == kind]) for kind in COLLECTIVES}
    errors = {**errors, **{kind: error for kind, (_, error) in fits.items()}}
    rates: dict[str, tuple[Rate, ...]] = {kind: lines for kind, (lines, _) in fits.items()}
    usual = rates["all_reduce"][-1]
    source = (
        f"measured on this machine {time.strftime('%Y-%m-%d %H:%M')}: {processes} gloo processes of {threads} threads "
        f"on {cores} cores; fit errors {error_text(errors)}"
    )
    facts = {"processes": float(processes), "cores": float(cores), **cluster.measurement, **as_facts(errors)}
    links = (Link("gloo", None, usual.bandwidth, usual.latency, rates),)
    cluster = replace(cluster, name="local", source=source, links=links, measurement=facts)
    return exchanging_in_step(cluster, processes, measured.exchange)


def fit_processes(measured: Samples, per_host: int, threads: int, gain: float) -> tuple[Cluster, Mapping[str, float]]:
    """Fits a cluster of processes, ``per_host`` on a host with ``threads`` threads each. Returns it without its links,
    and the relative errors. ``gain``: the factor by which a process computes faster while the others wait."""
    device, errors = fit_device(measured.device, processor_name(), machine_memory() // per_host)
    sharing = per_host if gain > 1.0 + LEAST_GAIN else 1
    cluster = Cluster(
        "",
        f"gloo processes of {threads} threads; fit errors {error_text(errors)}",
        device,
        (NO_LINK,),
        measurement={"threads": float(threads), **as_facts(errors)},
        synchronisation_seconds=measured.synchronisation,
        sharing=sharing,
        cores=sharing / gain if sharing > 1 else 1.0,
        backend="gloo",
    )
    updating = updating_in_step(cluster, measured.update)
    return in_step(updating, measured.step, measured.launch * measured.device.share), errors


def updating_in_step(cluster: Cluster, seconds: float) -> Cluster:
    """``cluster`` with the bandwidth at which the update of :mod:`.measure_step` takes ``seconds``; as it is if they
    are 0."""
    if not seconds:
        return cluster
    return replace(cluster, device=replace(cluster.device, update_bandwidth=UPDATED_BYTES / seconds))


def error_text(errors: Mapping[str, float]) -> str:
    """``all_gather 15%, matmul 3%``."""
    return ", ".join(f"{name} {error:.0%}" for name, error in errors.items())


def as_facts(errors: Mapping[str, float]) -> dict[str, float]:
    """Relative errors as entries of a cluster's ``measurement``."""
    return {f"fit_error_{name.replace(' ', '_')}": error for name, error in errors.items()}


def in_step(cluster: Cluster, seconds: float, launch: float) -> Cluster:
    """``cluster`` with compute rates at which work like a step (:mod:`.measure_step`) takes ``seconds``, and every
    operation ``launch``, if these are more than with the rates of single operations that are repeated."""
    later = max(1.0, launch / cluster.device.launch_seconds)
    device = replace(
        cluster.device,
        launch_seconds=cluster.device.launch_seconds * later,
        view_seconds=cluster.device.view_seconds * later,
    )
    factor = max(1.0, seconds / step_like_seconds(replace(cluster, device=device)))
    rates = {dtype: rate / factor for dtype, rate in device.peak_flops.items()}
    slower = replace(
        device,
        peak_flops=rates,
        memory_bandwidth=device.memory_bandwidth / factor,
        function_seconds=device.function_seconds * factor,
    )
    return replace(cluster, device=slower, measurement={**cluster.measurement, "slower_in_a_step": factor})


def exchanging_in_step(cluster: Cluster, processes: int, seconds: float) -> Cluster:
    """``cluster`` with bandwidths at which exchanging the gradients of such work takes ``seconds``, if that is more
    than with the rates of single collectives that are repeated."""
    # All processes begin the measured exchange at once.
    priced, wire = exchange_seconds(replace(cluster, synchronisation_seconds=0.0), processes)
    factor = max(1.0, (seconds - priced + wire) / wire)

    def slower(link: Link) -> Link:
        rates = {
            kind: tuple(replace(rate, bandwidth=rate.bandwidth / factor) for rate in lines)
            for kind, lines in link.rates.items()
        }
        return replace(link, bandwidth=link.bandwidth / factor, rates=rates)

    facts = {**cluster.measurement, "slower_exchange_in_a_step": factor}
    return replace(cluster, links=tuple(map(slower, cluster.links)), measurement=facts)
