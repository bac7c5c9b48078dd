"""Checks that the processes of a job fit together: order of ranks, versions, devices, shared memory, clocks, links."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence

from autopar.calibration.host_pairs import HostPair, ProcessFacts, all_facts, clock_spread, measure_pairs
from autopar.plans.views.quantities import duration, size

from .finding import Examination, Finding
from .ports import in_group, job_ports

# A host is called slow if its quickest link has less than this share of the others'; a pair, of the median pair's.
# Chosen: adapters of one kind differ by a few per cent; a cable at a lower rate, or one of two adapters, by half.
_SLOW = 0.6
# What /dev/shm should have free. Chosen: NCCL takes tens of megabytes for each pair of GPUs, loaders their batches.
_SHARED = 1 << 30
# Clocks that differ by more make logs of several hosts hard to read, and caches by time go wrong.
# Chosen: far more than NTP leaves, and than a barrier takes.
_CLOCK = 0.5


def examine_job(host: str | None = None) -> Examination:
    """Examines the job that this process is part of. All processes call this, with gloo initialised, and get the same.
    ``host``: the name of this process's host, if it is to be another than the machine's."""
    facts = all_facts(host)
    spread, pairs = clock_spread(), measure_pairs(facts)
    return Examination(
        (_order(facts), *_alike(facts), _shared(facts), job_ports(), _clocks(spread, facts), *_links(pairs)),
    )


def in_gloo_job() -> Examination:
    """:func:`examine_job`, in a process that ``torchrun`` started. Raises :class:`autopar.FaultError` that says why
    if the processes do not meet."""
    with in_group():
        return examine_job()


def _order(facts: Sequence[ProcessFacts]) -> Finding:
    """Whether ranks of a host are consecutive: otherwise the innermost axis of a mesh crosses hosts."""
    hosts = [f.host for f in facts]
    blocks = [host for i, host in enumerate(hosts) if i == 0 or hosts[i - 1] != host]
    counts = Counter(hosts)
    value = f"{len(facts)} ranks on {len(counts)} host{'s' if len(counts) > 1 else ''}: " + ", ".join(
        f"{host} x{count}" for host, count in list(counts.items())[:4]
    )
    torn = sorted(host for host, times in Counter(blocks).items() if times > 1)
    if torn:
        ranks = [f.rank for f in facts if f.host == torn[0]]
        return Finding(
            "ranks",
            value,
            False,
            f"ranks {ranks} are on {torn[0]}: a mesh's innermost axis would cross hosts. Number a host's ranks one "
            "after the other, as torchrun does (SLURM: one task on each host, not --distribution=cyclic)",
        )
    if len(set(counts.values())) > 1:
        return Finding(
            "ranks", value, False, "hosts have different numbers of processes: a mesh cannot be laid over them"
        )
    return Finding("ranks", value)


def _alike(facts: Sequence[ProcessFacts]) -> Iterator[Finding]:
    """Whether all have the same versions and devices."""
    names = dict.fromkeys(name for f in facts for name, _ in f.versions)
    for name in (*names, "device"):
        by_value: dict[str, list[str]] = {}
        for f in facts:
            value = f.device if name == "device" else dict(f.versions).get(name, "missing")
            by_value.setdefault(value, []).append(f.host)
        if len(by_value) == 1:
            yield Finding(name, f"{next(iter(by_value))} on all")
            continue
        usual = max(by_value, key=lambda value: len(by_value[value]))
        others = [
            f"{value} on {', '.join(dict.fromkeys(hosts))}" for value, hosts in by_value.items() if value != usual
        ]
        yield Finding(
            name, f"{usual}, but {'; '.join(others)}", False, "make them the same: plans and traces are compared"
        )


def _shared(facts: Sequence[ProcessFacts]) -> Finding:
    known = [(f.shared, f.host) for f in facts if f.shared is not None]
    if not known:
        return Finding("shared memory", "no /dev/shm")
    least, host = min(known)
    advice = "" if least >= _SHARED else "containers: docker run --shm-size, or a volume of medium Memory at /dev/shm"
    return Finding("shared memory", f"at least {size(least)} free, on {host}", True, advice)


def _clocks(spread: float, facts: Sequence[ProcessFacts]) -> Finding:
    if len({f.host for f in facts}) == 1:
        return Finding("clocks", "one host")
    advice = "" if spread < _CLOCK else "set the hosts' clocks (chrony, systemd-timesyncd)"
    return Finding("clocks", f"within {duration(spread)}", spread < _CLOCK, advice)


def _links(pairs: Sequence[HostPair]) -> Iterator[Finding]:
    """The bandwidth between hosts, and who is slow."""
    if not pairs:
        return
    usual, latency = statistics.median(p.bandwidth for p in pairs), statistics.median(p.latency for p in pairs)
    of = f"medians of {len(pairs)} pairs" if len(pairs) > 1 else "one pair, with nothing to compare it with"
    value = f"{size(usual)}/s between hosts by gloo, {duration(latency)} ({of})"
    hosts, slow = _slow(pairs)
    listed = ", ".join(f"{p.first} - {p.second} {size(p.bandwidth)}/s" for p in slow[:4])
    look = f"; look at {' and '.join(hosts)}, of which all links are" if hosts else ""
    yield Finding("links", value, not slow, f"slow: {listed}{look}" if slow else "")


def _slow(pairs: Sequence[HostPair]) -> tuple[list[str], list[HostPair]]:
    """The hosts all of whose links are slow, and the pairs that are slow, for that or by themselves.

    A host is judged by its quickest link: in a job of few hosts most pairs are those of the one slow host, and hosts of
    another rack are not slow."""
    best: dict[str, float] = {}
    for pair in pairs:
        for host in (pair.first, pair.second):
            best[host] = max(best.get(host, 0.0), pair.bandwidth)
    typical = statistics.median_high(best.values())
    hosts = [host for host, bandwidth in best.items() if bandwidth < _SLOW * typical]
    others = [p for p in pairs if p.first not in hosts and p.second not in hosts]
    usual = statistics.median(p.bandwidth for p in others)
    slow = [p for p in pairs if p.bandwidth < _SLOW * (usual if p in others else typical)]
    return hosts, slow
