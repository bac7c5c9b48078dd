"""``autopar run``: nothing is left behind, whatever ends the launcher, and a taken port is named at once."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from autopar.cli.late_ranks import LateRanks, has_come, local_ranks
from autopar.cli.rendezvous import DEFAULT_PORT, _parts, check_endpoint
from autopar.errors import OptionsError
from tests.house.sources import ROOT

# Ranks that say who they are, and sleep: "deaf" ones ignore SIGTERM, "saving" ones leave a second after it.
SLEEPER = """
import os, pathlib, signal, sys, time
folder, manner = pathlib.Path(sys.argv[1]), sys.argv[2]
def leave(*_):
    time.sleep(1)
    (folder / f"saved{os.environ['RANK']}").touch()
    sys.exit(0)
if manner != "plain":
    signal.signal(signal.SIGTERM, leave if manner == "saving" else signal.SIG_IGN)
(folder / f"{os.environ['RANK']}.tmp").write_text(str(os.getpid()))
(folder / f"{os.environ['RANK']}.tmp").rename(folder / f"rank{os.environ['RANK']}")
time.sleep(120)
"""


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., tuple[subprocess.Popen[str], list[int]]]]:
    """Starts ``autopar run`` with two ranks that sleep; returns the launcher and the ranks' process ids."""
    processes: list[subprocess.Popen[str]] = []
    ranks: list[int] = []

    def start(manner: str, *options: str) -> tuple[subprocess.Popen[str], list[int]]:
        script = tmp_path / "sleeper.py"
        script.write_text(SLEEPER)
        command = [sys.executable, "-m", "autopar", "run", "--nproc", "2", *options, str(script), str(tmp_path), manner]
        processes.append(subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True))
        files = [tmp_path / "rank0", tmp_path / "rank1"]
        assert wait_for(lambda: all(file.exists() for file in files), 60)
        ranks.extend(int(file.read_text()) for file in files)
        return processes[0], ranks

    yield start
    for process in processes:
        process.kill()
        process.communicate()
    for pid in filter(alive, ranks):
        os.kill(pid, signal.SIGKILL)


Started = Callable[..., tuple[subprocess.Popen[str], list[int]]]


@pytest.mark.slow
def test_killing_the_launcher_kills_the_ranks(started: Started) -> None:
    launcher, ranks = started("deaf")
    launcher.kill()
    assert wait_for(lambda: not any(map(alive, ranks)), 5)


@pytest.mark.slow
def test_sigterm_lets_ranks_save(started: Started, tmp_path: Path) -> None:
    launcher, ranks = started("saving")
    launcher.terminate()
    assert launcher.wait(20) == 128 + signal.SIGTERM
    assert not any(map(alive, ranks))
    assert (tmp_path / "saved0").exists() and (tmp_path / "saved1").exists()
    assert "Traceback" not in (launcher.stderr.read() if launcher.stderr else "")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_other_signals_end_the_ranks(started: Started, number: signal.Signals) -> None:
    launcher, ranks = started("plain")
    launcher.send_signal(number)
    assert launcher.wait(20) == 128 + number
    assert not any(map(alive, ranks))


@pytest.mark.slow
def test_deaf_and_stopped_ranks_end_with_the_grace_period(started: Started) -> None:
    launcher, ranks = started("deaf", "--grace", "1")
    os.kill(ranks[0], signal.SIGSTOP)
    begin = time.monotonic()
    launcher.terminate()
    launcher.wait(20)
    assert time.monotonic() - begin < 10
    assert not any(map(alive, ranks))


def test_a_taken_port_is_named_at_once() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port, begin = other.getsockname()[1], time.monotonic()
        with pytest.raises(OptionsError, match=rf"port {port} .* \(process {os.getpid()}: "):
            check_endpoint(f"127.0.0.1:{port}")
        assert time.monotonic() - begin < 10


def test_a_store_and_a_free_port_are_no_errors(capsys: pytest.CaptureFixture[str]) -> None:
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    check_endpoint(f"127.0.0.1:{store.port}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    check_endpoint(f"127.0.0.1:{port}")
    assert capsys.readouterr().err == ""
    with pytest.raises(OptionsError, match="is not a port"):
        check_endpoint("host:http")


def test_a_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of real processes: one has a connection to the store, the other has none."""
    script = (
        "import os, socket, sys\nif os.environ['RANK'] == '0': there = socket.create_connection(('127.0.0.1', {port}))"
    )
    with socket.create_server(("127.0.0.1", 0)) as store:
        port, processes = store.getsockname()[1], []
        for rank in range(2):
            environment = {**os.environ, "RANK": str(rank), "MASTER_PORT": str(port)}
            command = [sys.executable, "-S", "-c", f"{script.format(port=port)}\nprint(flush=True)\nsys.stdin.read()"]
            processes.append(
                subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
        try:
            for process in processes:
                assert process.stdout is not None and process.stdout.readline()
            late, ranks = LateRanks(), [each for each in local_ranks() if each.port == port]
            assert [each.rank for each in ranks] == [0, 1] and list(map(has_come, ranks)) == [True, False]
            assert late.look(ranks, 100.0) == late.look(ranks, 159.0) == ""
            assert late.look(ranks, 161.0) == (
                f"rank 1 (process {processes[1].pid}) has not come to init_process_group or autopar.parallelize after "
                "61 s; rank 0 waits there (no error so far)"
            )
            assert late.look(ranks, 180.0) == "" and "after 130 s" in late.look(ranks, 230.0)
            assert late.look(ranks[1:], 500.0) == "", "nobody waits"
        finally:
            for process in processes:
                process.communicate()
    assert [each for each in local_ranks() if each.port == port] == []


def test_words_of_a_script_are_its_own(tmp_path: Path) -> None:
    """Also those that torch's launcher would take for abbreviations of its options."""
    script = tmp_path / "words.py"
    script.write_text("import os, pathlib, sys\npathlib.Path(sys.argv[1]).write_text(' '.join(sys.argv[2:]))\n")
    words = ["--log", "a", "--nnodes", "7", "--r=3", "--", "-m"]
    command = [sys.executable, "-m", "autopar", "run", "--nproc", "1", str(script), str(tmp_path / "said"), *words]
    subprocess.run(command, cwd=ROOT, check=True, timeout=60)
    assert (tmp_path / "said").read_text() == " ".join(words)


RESTARTED = """
import os, pathlib, signal, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
world, attempt = dist.get_world_size(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
assert int(total) == world
if attempt < 2 and dist.get_rank() == attempt:
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
if dist.get_rank() == 0:
    pathlib.Path(sys.argv[1]).write_text(f"{attempt} {world}")
"""


@pytest.mark.slow
def test_two_kills_are_survived(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RESTARTED)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{free.getsockname()[1]}"
    out = tmp_path / "out"
    options = ["--nproc", "2", "--nnodes", "1:4", "--rendezvous", place, "--max-restarts", "3"]
    command = [sys.executable, "-m", "autopar", "run", *options, str(tmp_path / "train.py"), str(out)]
    assert subprocess.run(command, cwd=ROOT, timeout=240, check=False).returncode == 0
    assert out.read_text() == "2 2"


def test_addresses_of_both_kinds_are_taken() -> None:
    """As torch's launcher reads them."""
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    for endpoint in ("[::1]:29401", "[::1]", "127.0.0.1:29401", "localhost"):
        host, port = _parts(endpoint)
        assert (host, int(port)) == parse_rendezvous_endpoint(endpoint, DEFAULT_PORT)
    with pytest.raises(OptionsError, match=r"\[::1\]:29400"):
        check_endpoint("::1:29400")


@pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")
def test_an_address_of_ipv6_is_looked_at() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as other:
        port = other.getsockname()[1]
        with pytest.raises(OptionsError, match=f"port {port} of this host is taken"):
            check_endpoint(f"[::1]:{port}")
    check_endpoint(f"[::1]:{port}")
