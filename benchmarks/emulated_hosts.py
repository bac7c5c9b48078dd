"""Several hosts on one machine: network namespaces joined by a bridge, each with its outgoing link limited.

Sockets and contention are real, and each host has a name, which the others find; what is emulated is the rate of the
link (``tc tbf``). Needs root, ``ip``, ``tc`` and ``unshare``. Traffic inside a host is not limited.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

BRIDGE, SUBNET, PORT = "apbridge", "10.79.0", 29533
# Files in folders of this one stand for those of /etc within the namespaces of these names.
NAMESPACES = Path("/etc/netns")


def _command(*words: str, check: bool = True) -> None:
    subprocess.run(words, check=check, stderr=None if check else subprocess.DEVNULL)


def host_name(index: int) -> str:
    """By which the other hosts find it."""
    return f"aphost{index}"


@contextmanager
def emulated_hosts(count: int, megabits: int) -> Iterator[None]:
    """Within, ``count`` hosts exist whose outgoing links carry ``megabits`` per second each."""
    _down(count)
    try:
        _command("ip", "link", "add", BRIDGE, "type", "bridge")
        _command("ip", "addr", "add", f"{SUBNET}.254/24", "dev", BRIDGE)
        _command("ip", "link", "set", BRIDGE, "up")
        names = "".join(f"{SUBNET}.{index + 1} {host_name(index)}\n" for index in range(count))
        for index in range(count):
            _up(index, megabits)
            (NAMESPACES / host_name(index)).mkdir(parents=True, exist_ok=True)
            (NAMESPACES / host_name(index) / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        yield
    finally:
        _down(count)


def _up(index: int, megabits: int) -> None:
    host, wire = host_name(index), f"apwire{index}"
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
        _command("ip", "netns", "del", host_name(index), check=False)
        shutil.rmtree(NAMESPACES / host_name(index), ignore_errors=True)
    _command("ip", "link", "del", BRIDGE, check=False)


def start_on_hosts(
    count: int, per_host: int, words: Sequence[str], output: IO[str] | None = None
) -> list[subprocess.Popen[bytes]]:
    """Starts ``torchrun words`` on every host, ``per_host`` processes each."""
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={count}", f"--nproc-per-node={per_host}"]
    rendezvous = [f"--master-addr={SUBNET}.1", f"--master-port={PORT}"]
    return [start_on_host(i, [*launcher, f"--node-rank={i}", *rendezvous, *words], output) for i in range(count)]


def start_on_host(index: int, words: Sequence[str], output: IO[str] | None = None) -> subprocess.Popen[bytes]:
    """Starts the command ``words`` on one host."""
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0"}
    named = ["unshare", "--uts", "sh", "-c", 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"', host_name(index)]
    command = ["ip", "netns", "exec", host_name(index), *named, *words]
    return subprocess.Popen(command, env=environment, stdout=output, stderr=output)


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
    _command("ip", "-n", host_name(index), "link", "set", "eth0", "down")
