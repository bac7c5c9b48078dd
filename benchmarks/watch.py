"""What the watch over ranks costs the first of them: the hub hears thousands of ranks, which connections stand for.

    python -m benchmarks.watch [--ranks 8 64 512 1024 3072] [--json] [--output FILE]

Another process has a connection for each rank and sends their records, evenly over the interval. Measured: the share of
a processor that the hub's thread takes while all is well and while all wait, bytes that arrive and leave, and the
seconds from the end of one connection until the last of the others has heard whose it was.
"""

from __future__ import annotations

import argparse
import multiprocessing
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

from rich.table import Table

from autopar.runtime.faults.hub import Hub
from autopar.runtime.faults.pace import interval_of
from autopar.runtime.faults.process_state import allow_descriptors
from autopar.runtime.faults.record import Record, to_json
from autopar.runtime.faults.stack import Thread

from .report import describe_machine, emit, make_table

RESULTS = Path(__file__).with_name("results") / "watch.json"
# Seconds of a measurement, and intervals before it.
SECONDS, SETTLE = 12.0, 2
# As long as those of a real training.
RECORD = Record(
    number=1234, name="model.step()", line="train.py:123", timeout=60.0, where="process 123456 on node-0123.cluster",
    instruction="the instruction %mm_12_all_gather (collective.wait) of module layers.12.attention, forward",
)  # fmt: skip
LIMIT = 300.0


class Ranks:
    """The connections, in a process of their own."""

    def __init__(self, port: int, count: int) -> None:
        allow_descriptors(count + 64)
        self.interval, self.selector = interval_of(count), selectors.DefaultSelector()
        self.sent = self.received = 0
        self.connections: list[socket.socket] = []
        for rank in range(count):
            self.connections.append(socket.create_connection(("127.0.0.1", port)))
            self.connections[-1].sendall(b'{"rank": %d, "token": "secret"}\n' % rank)
            self.selector.register(self.connections[-1], selectors.EVENT_READ, rank)

    def speak(self, record: Record, seconds: float) -> None:
        """All say this once an interval, for so many seconds."""
        lines = [to_json(replace(record, where=f"{record.where}-{rank}")).encode() for rank in range(self.count)]
        begin, said = time.monotonic(), 0
        while (now := time.monotonic() - begin) < seconds:
            due = int(now / self.interval * self.count)
            for each in range(said, due):
                line = lines[each % self.count] + b"\n"
                self.connections[each % self.count].sendall(line)
                self.sent += len(line)
            said = due
            self.listen()

    @property
    def count(self) -> int:
        return len(self.connections)

    def listen(self, seconds: float = 0.01) -> dict[int, bytes]:
        """What they hear within so many seconds."""
        heard = {}
        for key, _ in self.selector.select(seconds):
            heard[key.data] = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
            self.received += len(heard[key.data])
        return heard

    def lose(self, rank: int) -> float:
        """Ends one connection while all wait; the seconds until all others have heard of it."""
        begin, knowing = time.monotonic(), set[int]()
        self.selector.unregister(self.connections[rank])
        self.connections[rank].close()
        while len(knowing) < self.count - 1 and time.monotonic() < begin + LIMIT:
            knowing |= {each for each, text in self.listen().items() if f"rank {rank} died".encode() in text}
        return time.monotonic() - begin


def act(pipe: Connection, port: int, count: int) -> None:
    """What the other process does: a phase for each message, whose figures it sends back."""
    ranks = Ranks(port, count)
    waits = replace(RECORD, waits=True, still=30.0)
    for phase in iter(pipe.recv, "end"):
        ranks.sent = ranks.received = 0
        if phase == "lose":
            pipe.send((ranks.lose(count // 2), 0))
            continue
        record = waits if phase == "waiting" else RECORD
        ranks.speak(record, SETTLE * ranks.interval)
        pipe.send(None)
        ranks.sent = ranks.received = 0
        ranks.speak(record, SECONDS)
        pipe.send((ranks.sent, ranks.received))
    pipe.close()


def measure(count: int) -> dict[str, float]:
    """The figures for so many ranks."""
    hub = Hub(range(count), "secret", "elsewhere")
    here, there = multiprocessing.Pipe()
    other = multiprocessing.get_context("spawn").Process(target=act, args=(there, hub.port, count))
    other.start()
    row: dict[str, float] = {"ranks": count, "interval_seconds": interval_of(count)}
    try:
        for phase in ("well", "waiting"):
            here.send(phase)
            here.recv()
            before, begin = computed(hub), time.monotonic()
            sent, received = here.recv()
            seconds = time.monotonic() - begin
            row[f"{phase}_processor"] = (computed(hub) - before) / seconds
            row[f"{phase}_bytes_in_per_second"] = sent / seconds
            row[f"{phase}_bytes_out_per_second"] = received / seconds
        here.send("lose")
        row["seconds_until_all_know"] = here.recv()[0]
        here.send("end")
        other.join()
    finally:
        other.kill()
        hub.close(0, "")
    return row


def computed(hub: Hub) -> float:
    """The seconds that the hub's thread has computed."""
    assert hub.ident is not None and hub.native_id is not None
    return Thread(hub.ident, hub.native_id, time.pthread_getcpuclockid(hub.ident)).seconds_computed()


def report(rows: Sequence[dict[str, float]]) -> Table:
    """The table."""
    columns = ("ranks", "interval", "processor", "all wait", "kB/s in", "kB/s out", "all know after")
    return make_table(
        "the watch of many ranks, at the first of them", columns,
        [
            (
                f"{row['ranks']}", f"{row['interval_seconds']:g} s", f"{row['well_processor']:.2%}",
                f"{row['waiting_processor']:.2%}", f"{row['well_bytes_in_per_second'] / 1e3:.0f}",
                f"{row['well_bytes_out_per_second'] / 1e3:.0f}", f"{row['seconds_until_all_know']:.1f} s",
            )
            for row in rows
        ],
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512, 1024, 3072])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--output", default=str(RESULTS))
    arguments = parser.parse_args()
    rows = [measure(count) for count in arguments.ranks]
    figures = {"benchmark": "watch", "machine": describe_machine(), "rows": rows}
    emit(figures, report(rows), arguments.json, arguments.output)


if __name__ == "__main__":
    main()
