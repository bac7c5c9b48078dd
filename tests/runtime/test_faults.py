"""Faults of real ranks: every rank ends in time, with one message that names the cause."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.runtime import run_local
from autopar.runtime.faults.meeting import join_world
from autopar.runtime.torch_internals import collectives
from autopar.runtime.torch_internals.collectives import world_timeout
from autopar.runtime.torch_internals.interrupt import gloo_sockets, interrupt_communication
from tests.helpers.planning import on

TIMEOUT = 4.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 10), nn.Linear(10, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.b(self.a(x).relu()), y)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    return torch.randn(8, 6, generator=source), torch.randint(0, 4, (8,), generator=source)


def set_clocks_apart() -> None:
    """In this process, for Python: of the two clocks, one is before and one after those of others."""
    for name, days in (("time", 3), ("monotonic", -40)):
        clock = getattr(time, name)
        setattr(time, name, lambda clock=clock, days=days: clock() + days * 86400)


def messages(fault: Callable[[Any], Any]) -> list[str]:
    """The messages of two ranks, the second of which has the ``fault`` instead of a third step, and then goes on. Its
    clocks are days apart from the first one's."""

    def work(rank: int, world: int) -> tuple[str, float]:
        if rank == 1:
            set_clocks_apart()
        model = autopar.parallelize(Net(), (2,), options=autopar.Options(timeout=TIMEOUT, zero=3))
        for _ in range(2):
            model.step(*batch())
        begin = time.monotonic()
        with pytest.raises(autopar.FaultError) as raised:
            if rank == 1:
                fault(model)
            for _ in range(2):
                model.step(*batch())
        return str(raised.value), time.monotonic() - begin

    results = on(2, work)
    assert all(seconds < TIMEOUT + 15 for _, seconds in results)
    return [text for text, _ in results]


def test_a_call_on_one_rank_only_is_named() -> None:
    first, second = messages(lambda model: model.full_tensor(model.get_parameter("a.weight")))
    assert first == second
    assert "rank 1 in model.full_tensor() (collective call 4)" in first and "rank 0 in model.step()" in first
    assert "test_faults.py:" in first


@pytest.mark.slow
def test_a_rank_that_rests_after_an_error_is_named() -> None:
    def fault(model: Any) -> None:
        with pytest.raises(AttributeError):
            model.full_tensor("no tensor")
        time.sleep(TIMEOUT + 6)

    first, second = messages(fault)
    assert first == second
    assert first.startswith("rank 1 is outside of autopar at test_faults.py:")
    assert "its last call raised AttributeError" in first
    assert "rank 0 waits for it in model.step() (collective call 4)" in first


def test_ranks_that_do_not_come_are_named() -> None:
    def work(rank: int, world: int) -> str:
        if rank == 1:
            time.sleep(4)
            return ""
        with pytest.raises(autopar.FaultError) as raised:
            autopar.parallelize(Net(), (2,), options=autopar.Options(timeout=0.2))
        return str(raised.value)

    assert on(2, work)[0].startswith("rank 1 did not come to autopar.parallelize within 2 s")


@pytest.mark.slow
def test_a_rank_that_works_for_long_is_no_fault() -> None:
    """Neither outside of autopar's calls, nor before the first of them."""

    def work(rank: int, world: int) -> float:
        compute(0.6 * rank)
        model = autopar.parallelize(Net(), (2,), options=autopar.Options(timeout=0.2, zero=3))
        model.step(*batch())
        compute(3.0 * rank)
        return float(model.step(*batch()))

    def compute(seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass

    first, second = on(2, work)
    assert first == second


def test_only_connections_between_ranks_are_shut_down() -> None:
    def work(rank: int, world: int) -> str:
        with socket.create_server(("127.0.0.1", 0)) as server:
            other = socket.create_connection(server.getsockname()).detach()  # As one of a library in C++.
            end, _ = server.accept()
        with gloo_sockets() as connections:
            assert len(connections) >= 1
        dist.barrier()
        interrupt_communication()
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(1))
        os.write(other, b"alive")
        os.close(other)
        with end:
            return end.recv(5).decode()

    assert on(2, work) == ["alive"] * 2


def test_options_that_differ_are_named() -> None:
    def work(rank: int, world: int) -> str:
        with pytest.raises(autopar.OptionsError) as raised:
            autopar.parallelize(Net(), (3,), options=autopar.Options(zero=rank // 2, pins={"a": "R"} if rank else {}))
        return str(raised.value)

    texts = on(3, work)
    assert texts == texts[:1] * 3
    assert "zero: 1 on rank 2; 0 on ranks 0, 1" in texts[0] and "pins: {} on rank 0; {'a': 'R'} on" in texts[0]


class Deep(nn.Module):
    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(depth))
        self.head = nn.Linear(6, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x).square().mean()


def test_models_that_differ_are_named() -> None:
    def work(rank: int, world: int) -> list[str]:
        texts = []
        for depth, width in ((3 if rank == 0 else 2, 4), (2, 5 if rank == 2 else 4)):
            with pytest.raises(autopar.PlanMismatchError) as raised:
                autopar.parallelize(Deep(depth, width), (3,), options=autopar.Options(check_inputs="never"))
            texts.append(str(raised.value))
        return texts

    results = on(3, work)
    assert results == results[:1] * 3
    deeper, wider = results[0]
    assert deeper.startswith("rank 0 has another model than ranks 1, 2:")
    assert "layers.2.weight: f32[6, 6] on rank 0; none on ranks 1, 2" in deeper
    assert "rank 2 has another model" in wider and "head.bias: f32[5] on rank 2; f32[4] on ranks 0, 1" in wider


def test_the_fewer_ranks_are_the_odd_ones() -> None:
    def work(rank: int, world: int) -> str:
        model = autopar.parallelize(Net(), (3,), options=autopar.Options(check_inputs="never"))
        if rank == 0:
            model.module.a.forward = lambda x: x @ model.module.a.weight.T  # type: ignore[method-assign]
        with pytest.raises(autopar.PlanMismatchError) as raised:
            model.step(*batch())
        return str(raised.value)

    texts = on(3, work)
    assert texts == texts[:1] * 3
    assert "other operations on rank 0 of the mesh than on its ranks 1, 2" in texts[0]


def test_groups_have_the_timeout_that_the_user_set() -> None:
    def work(rank: int, world: int) -> list[tuple[float, ...]]:
        backend, found = dist.group.WORLD._get_backend(torch.device("cpu")), []  # type: ignore[union-attr]
        for minutes in (None, 180.0, 0.5):
            if minutes is not None:
                backend.options._timeout = timedelta(minutes=minutes)
            both = world_timeout("gloo"), world_timeout()
            found.append(tuple(each.total_seconds() / 60 for each in both if each is not None))
        return found

    assert on(2, work) == [[(30.0, 30.0), (180.0, 180.0), (0.5, 0.5)]] * 2


@pytest.mark.parametrize(("minutes", "gloo"), [(10.0, 30.0), (5.0, 5.0), (60.0, 60.0)])
def test_a_default_of_nccl_is_not_taken_for_one_that_was_set(
    monkeypatch: pytest.MonkeyPatch, minutes: float, gloo: float
) -> None:
    def backend(device: torch.device) -> Any:
        if device.type != "cuda":
            raise RuntimeError("no backend")
        return SimpleNamespace(options=SimpleNamespace(_timeout=timedelta(minutes=minutes)))

    world = SimpleNamespace(_get_backend=backend)
    monkeypatch.setattr(collectives, "dist", SimpleNamespace(group=SimpleNamespace(WORLD=world)))
    monkeypatch.setattr(collectives, "default_pg_nccl_timeout", timedelta(minutes=10))
    assert world_timeout("gloo") == timedelta(minutes=gloo)
    assert world_timeout() == timedelta(minutes=minutes)


@pytest.mark.parametrize("late", [None, 0, 1])
def test_ranks_that_do_not_come_to_the_start_are_named(late: int | None) -> None:
    def work(rank: int, world: int) -> str:
        if rank == late:
            return ""
        if late is None:
            join_world("gloo", 3.0)
            total = torch.ones(1)
            dist.all_reduce(total)
            return str(int(total))
        with pytest.raises(autopar.FaultError) as raised:
            join_world("gloo", 0.1)
        return str(raised.value)

    found = run_local(work, 2, timeout=60, backend=None)
    if late is None:
        assert found == ["2", "2"]
    else:
        assert found[1 - late].startswith(f"rank {late} did not come to autopar.parallelize within 1 s")


def test_a_port_that_is_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 says so at once; another rank finds a program there that never answers, or nothing."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", port)):
            monkeypatch.setenv(name, str(value))
        begin = time.monotonic()
        with pytest.raises(autopar.FaultError) as raised:
            join_world("gloo", 5.0)
        assert time.monotonic() - begin < 10
    assert f"at 127.0.0.1:{port}: another program has taken port {port} of this host" in str(raised.value)
    assert "--master-port, or MASTER_PORT" in str(raised.value)
    if sys.platform == "linux":
        assert f"(process {os.getpid()}: " in str(raised.value)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(autopar.FaultError, match=f"rank 1 does not reach rank 0 at 127.0.0.1:{port} within 1 s"):
        join_world("gloo", 0.1)


def test_ranks_go_on_after_a_plan_that_does_not_fit() -> None:
    def work(rank: int, world: int) -> list[str]:
        messages = []
        for _ in range(2):
            model = autopar.parallelize(Net(), (world,), options=autopar.Options(memory_limit=100))
            with pytest.raises(autopar.InfeasibleError) as raised:
                model.step(*batch())
            assert raised.value.__cause__ is not raised.value
            messages.append(str(raised.value))
        return messages

    first, second = on(2, work)
    assert first == second and first[0] == first[1]
