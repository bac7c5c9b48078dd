"""Several hosts on one machine: network namespaces joined by a bridge, each with its outgoing link limited.

Sockets and contention are real; what is emulated is the rate of the link (``tc tbf``). Needs root, ``ip`` and ``tc``.
Traffic inside a host is not limited.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO

BRIDGE, SUBNET, PORT = "apbridge", "10.79.0", 29533


def _command(*words: str, check: bool = True) -> None:
    subprocess.run(words, check=check, stderr=None if check else subprocess.DEVNULL)


def _host(index: int) -> str:
    return f"aphost{index}"


@contextmanager
def emulated_hosts(count: int, megabits: int) -> Iterator[None]:
    """Within, ``count`` hosts exist whose outgoing links carry ``megabits`` per second each."""
    _down(count)
    try:
        _command("ip", "link", "add", BRIDGE, "type", "bridge")
        _command("ip", "addr", "add", f"{SUBNET}.254/24", "dev", BRIDGE)
        _command("ip", "link", "set", BRIDGE, "up")
        for index in range(count):
            _up(index, megabits)
        yield
    finally:
        _down(count)


def _up(index: int, megabits: int) -> None:
    host, wire = _host(index), f"apwire{index}"
    _command("ip", "netns", "add", host)
    _command("ip", "link", "add", wire, "type", "veth", "peer", "name", "eth0", "netns", host)
    _command("ip", "link", "set", wire, "master", BRIDGE, "up")
    _command("ip", "-n", host, "addr", "add", f"{SUBNET}.{index + 1}/24", "dev", "eth0")
    for device in ("eth0", "lo"):
        _command("ip", "-n", host, "link", "set", device, "up")
    shape = ("tbf", "rate", f"{megabits}mbit", "burst", "64kb", "latency", "50ms")
    _command("ip", "netns", "exec", host, "tc", "qdisc", "add", "dev", "eth0", "root", *shape)


def _down(count: int) -> None:
    for index in range(count):
        _command("ip", "netns", "del", _host(index), check=False)
    _command("ip", "link", "del", BRIDGE, check=False)


def start_on_hosts(
    count: int, per_host: int, words: Sequence[str], output: IO[str] | None = None
) -> list[subprocess.Popen[bytes]]:
    """Starts ``torchrun words`` on every host, ``per_host`` processes each."""
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0"}
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={count}", f"--nproc-per-node={per_host}"]
    rendezvous = [f"--master-addr={SUBNET}.1", f"--master-port={PORT}"]
    return [
        subprocess.Popen(
            ["ip", "netns", "exec", _host(i), *launcher, f"--node-rank={i}", *rendezvous, *words],
            env=environment,
            stdout=output,
            stderr=output,
        )
        for i in range(count)
    ]


def run_on_hosts(count: int, per_host: int, module: str, words: Sequence[str], timeout: float) -> int:
    """Runs ``torchrun -m module words`` on every host to its end; the first failing exit status."""
    running = start_on_hosts(count, per_host, ["-m", module, *words])
    try:
        return next((code for process in running if (code := process.wait(timeout))), 0)
    finally:
        for process in running:
            process.kill()


def freeze(index: int) -> None:
    """Cuts a host off: nothing arrives, and nobody is told."""
    _command("ip", "-n", _host(index), "link", "set", "eth0", "down")
