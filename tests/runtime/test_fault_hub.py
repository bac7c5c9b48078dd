"""The hub hears records of all ranks and tells them what is wrong: connections of this process stand for ranks."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import select
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from autopar.runtime.faults import hub as hubs
from autopar.runtime.faults.hub import Hub
from autopar.runtime.faults.link import Link, Silence, _readable
from autopar.runtime.faults.process_state import allow_descriptors
from autopar.runtime.faults.record import Record, to_json

INTERVAL = 0.1
WAITS = Record(number=3, name="model.step()", waits=True, still=5.0, timeout=60.0, line="train.py:9")
OUTSIDE = Record(number=2, timeout=60.0, where="process 5 on elsewhere")


class Rank:
    """A connection to the hub, as that of a rank."""

    def __init__(self, port: int, hello: bytes) -> None:
        self.connection = socket.create_connection(("127.0.0.1", port), 10.0)
        self.unread = b""
        self.connection.sendall(hello)

    def send(self, line: str | Record) -> None:
        text = to_json(line) if isinstance(line, Record) else line
        self.connection.sendall(text.encode() + b"\n")

    def hear(self, wanted: Callable[[dict[str, Any]], object], say: Record | None = None) -> dict[str, Any]:
        """The first message that is ``wanted``; meanwhile it says something at each interval."""
        deadline = time.monotonic() + 20.0
        while time.monotonic() < deadline:
            if say is not None:
                self.send(say)
            if select.select([self.connection], [], [], INTERVAL)[0]:
                self.unread += self.connection.recv(1 << 16)
            *lines, self.unread = self.unread.split(b"\n")
            for message in map(json.loads, lines):
                if wanted(message):
                    return dict(message)
        raise AssertionError("not heard")

    def is_dropped(self) -> bool:
        """Whether the hub ends the connection, without a message."""
        try:
            return self.connection.recv(1) == b""
        except ConnectionResetError:
            return True


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Of the ranks 4 and 6."""
    monkeypatch.setattr(hubs, "interval_of", lambda ranks: INTERVAL)
    made = Hub((4, 6), "secret", "here")
    yield made
    made.close(0, "")
    assert not made.is_alive()
    made.abandon()


Join = Callable[..., Rank]


@pytest.fixture
def join(hub: Hub) -> Iterator[Join]:
    """Connects a rank."""
    made: list[Rank] = []

    def connect(rank: int, hello: bytes = b"") -> Rank:
        made.append(Rank(hub.port, hello or b'{"rank": %d, "token": "secret"}\n' % rank))
        return made[-1]

    yield connect
    for each in made:
        each.connection.close()


@pytest.mark.parametrize(
    "hello",
    [
        b'{"rank": 4, "token": "guessed"}\n', b'{"rank": 5, "token": "secret"}\n', b"GET / HTTP/1.1\n", b"[1]\n",
        b"{}\n", b"\xff\n", b"[" * 60_000 + b"\n", b"x" * (1 << 17),
    ],
    ids=range(8),
)  # fmt: skip
def test_others_than_the_ranks_are_dropped(join: Join, hello: bytes) -> None:
    assert join(4, hello).is_dropped()
    assert join(4).hear(lambda message: True) == {"fault": "", "look": []}


def test_all_ranks_hear_the_same_of_one_that_is_gone(hub: Hub, join: Join) -> None:
    """What it sent that is no record is left out; nothing is said before all have joined."""
    first, second = join(4), join(6)
    first.send(WAITS)
    second.send(OUTSIDE)
    second.send('{"state": "odd"}')
    assert first.hear(lambda message: True, WAITS)["fault"] == ""
    second.connection.close()
    said = first.hear(lambda message: message["fault"], WAITS)["fault"]
    assert said.startswith("rank 6 died without a word (process 5 on elsewhere;")
    assert "rank 4 waits for it in model.step() (collective call 3) at train.py:9" in said
    assert first.hear(lambda message: True)["fault"] == said, "it stays so"


def test_a_failed_communication_is_named_with_its_cause(hub: Hub, join: Join) -> None:
    first, second = join(4), join(6)
    first.send(replace(WAITS, state="broken", still=0.0, note="RuntimeError: reset"))
    second.send(replace(OUTSIDE, state="failed", note="ValueError: x"))
    said = second.hear(lambda message: message["fault"])["fault"]
    assert said.startswith("rank 6 failed: ValueError: x; rank 4 waits for it")


def test_neighbours_are_asked_about_a_silent_rank(hub: Hub, join: Join) -> None:
    """Of another host, whose processes the hub cannot see."""
    first, second = join(4), join(6)
    waits = replace(WAITS, timeout=1.0)
    second.send(replace(OUTSIDE, timeout=1.0))
    asked = first.hear(lambda message: message["look"], waits)
    assert asked["look"] == ["process 5 on elsewhere"]
    first.send('{"letters": {"process 5 on elsewhere": "T"}}')
    said = first.hear(lambda message: message["fault"], waits)["fault"]
    assert said.startswith("rank 6 (process 5 on elsewhere) is stopped (SIGSTOP), last seen outside of autopar")


def test_the_end_of_the_first_rank_is_told(hub: Hub, join: Join) -> None:
    rank = join(6)
    rank.hear(lambda message: True)
    hub.close(9, "rank 4 failed: ValueError: x")
    ended = rank.hear(lambda message: "ended" in message)
    assert ended == {"fault": "rank 4 failed: ValueError: x", "ended": 9}


def test_a_rank_that_does_not_read_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It hears the rest of the message that was being sent, and the latest one; the others hear all."""
    monkeypatch.setattr(Hub, "start", lambda self: None)
    hub = Hub((4, 6), "secret", "here")
    ranks = [Rank(hub.port, b'{"rank": %d, "token": "secret"}\n' % rank) for rank in (4, 6)]
    for _ in ranks:
        hub._join()
    for peer in hub._peers():
        hub._read(peer)
    hub._tell({"number": 0, "text": "x" * (1 << 23)})
    left = len(hub._joined[4].unsent)
    assert left > 0
    for number in (1, 2):
        hub._tell({"number": number})
    assert len(hub._joined[4].unsent) == left
    heard, deadline = b"", time.monotonic() + 20.0
    while not heard.endswith(b"3}\n") and time.monotonic() < deadline:
        if _readable([ranks[0].connection], 0.01):
            heard += ranks[0].connection.recv(1 << 20)
        else:
            hub._tell({"number": 3})
    assert [json.loads(line)["number"] for line in heard.splitlines()][:2] == [0, 3]
    for each in ranks:
        each.connection.close()
    hub.abandon()


def test_no_descriptors_left_is_said_once(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none_left(self: socket.socket) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(socket.socket, "accept", none_left)
    with socket.create_connection(("127.0.0.1", hub.port)):
        time.sleep(5 * INTERVAL)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("autopar: 2 ranks cannot join: ") and "Too many open files" in line and "ulimit -n" in line


def test_a_link_takes_any_descriptor() -> None:
    """``select`` takes none from 1024 on, and the first rank has more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2000:
        pytest.skip("may not open so many files")
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
        allow_descriptors(1600)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 1600
        one, other = socket.socketpair()
        with one, other, socket.socket(fileno=fcntl.fcntl(one.fileno(), fcntl.F_DUPFD, 1500)) as high:
            assert _readable([high], 0.0) == []
            other.send(b"!")
            assert _readable([high], 1.0) == [high]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_link_says_where_it_is_and_hears_the_fault(hub: Hub, join: Join, request: pytest.FixtureRequest) -> None:
    heard: list[tuple[str, Silence]] = []
    token = '{"rank": 4, "token": "secret"}'
    link = Link(["127.0.0.1"], hub.port, token, lambda: WAITS, lambda *said: heard.append(said), INTERVAL)
    request.addfinalizer(link.close)
    second = join(6)
    second.send(OUTSIDE)
    second.hear(lambda message: True)
    link.send_now(5.0)
    second.connection.close()
    deadline = time.monotonic() + 20.0
    while not (heard and heard[-1][0]) and time.monotonic() < deadline:
        time.sleep(INTERVAL)
    assert heard[-1][0].startswith("rank 6 died") and heard[-1][1].seconds < 5.0
    hub.close(3, "")
    while heard[-1][1].ended is None and time.monotonic() < deadline:
        time.sleep(INTERVAL)
    assert heard[-1][1].ended == 3
