"""Rounds of replicas of which some are killed, or stopped, at random moments."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.runtime import run_local
from autopar.runtime.averaging.agreed_rounds import AgreedRounds
from autopar.runtime.averaging.ledger import APPLY, REDO, Ledger
from autopar.runtime.averaging.mean import WholeMean
from autopar.runtime.averaging.pending import Pending
from autopar.runtime.averaging.replicas import Replicas
from autopar.runtime.averaging.waits import LostPeersError
from autopar.runtime.comm.groups import AxisGroup, mesh_groups
from tests.runtime.averaging.leaving import (
    PATIENCE,
    Blow,
    check_rounds,
    moment,
    rounds_under,
    says_that_it_left,
)

COUNT = 80
# Seconds in which all rounds are over on an idle machine.
SPAN = 0.4
# Longer than the patience, which is exceeded by what a busy machine and the last answers take.
MOST = 3 * PATIENCE + 10


def test_one_of_three_is_killed() -> None:
    found = rounds_under(Blow((1,), 0.05), (3, 1), 4 * COUNT)
    assert check_rounds(found, (3, 1), {1}, 4 * COUNT)["members"] == (0, 2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "mesh, ranks, left, delay",
    [
        ((2, 1), (1,), {1}, 0),
        ((3, 1), (0,), {0}, 0),
        ((3, 1), (2,), {2}, 3),
        ((4, 1), (1, 2), {1, 2}, 0),
        ((4, 1), (0, 3), {0, 3}, 2),
        ((2, 2), (3,), {1}, 0),
        ((3, 2), (2,), {1}, 1),
        ((3, 2), (1, 4), {0, 2}, 0),
    ],
)
def test_ranks_are_killed_at_any_moment(
    mesh: tuple[int, int], ranks: tuple[int, ...], left: set[int], delay: int, seed: int
) -> None:
    numel = 3001 if seed % 2 else 300_001
    found = rounds_under(Blow(ranks, moment(seed, SPAN)), mesh, COUNT, numel, delay)
    assert check_rounds(found, mesh, left, COUNT)["longest"] < MOST
    beside = {rank for rank in range(mesh[0] * mesh[1]) if rank // mesh[1] in left} - set(ranks)
    assert says_that_it_left(found, beside)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_another_is_killed_while_the_others_come_together_again(seed: int) -> None:
    blow = Blow((1, 3), moment(seed, SPAN), apart=moment(seed + 100, 1.0))
    found = rounds_under(blow, (4, 1), 4 * COUNT)
    assert check_rounds(found, (4, 1), {1, 3}, 4 * COUNT)["longest"] < MOST


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_who_comes_back_at_the_last_moment_is_in_or_out_for_all(seed: int) -> None:
    blow = Blow((1,), moment(seed, SPAN), stopped=PATIENCE - 1 + moment(seed + 100, 6.0))
    found = rounds_under(blow, (3, 1), 4 * COUNT)
    back = found[1]
    assert back is not None
    assert check_rounds(found, (3, 1), {1} if back.error else set(), 4 * COUNT)["longest"] < MOST


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mesh, rank", [((3, 1), 1), ((2, 2), 2)])
def test_who_was_stopped_for_too_long_does_not_come_back(mesh: tuple[int, int], rank: int, seed: int) -> None:
    blow = Blow((rank,), moment(seed, SPAN / 2), stopped=PATIENCE + 12)
    found = rounds_under(blow, mesh, 4 * COUNT, 30_001)
    assert check_rounds(found, mesh, {1}, 4 * COUNT)["longest"] < MOST
    assert says_that_it_left(found, {rank})


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_who_was_stopped_for_less_is_waited_for(seed: int) -> None:
    found = rounds_under(Blow((1,), moment(seed, SPAN / 2), stopped=1.5), (3, 1), COUNT, patience=20.0)
    assert check_rounds(found, (3, 1), set(), COUNT)["members"] == (0, 1, 2)


@pytest.mark.slow
def test_replicas_that_never_reach_each_other_end() -> None:
    def work(rank: int, world: int) -> str:
        devices = DeviceMesh("cpu", torch.arange(world).reshape(2, 1))
        rounds = AgreedRounds(Replicas.of(mesh_groups(devices)), PATIENCE)

        def send(peers: AxisGroup) -> Pending:
            if rank == 1:
                raise RuntimeError("a cable is missing")
            return WholeMean().start({"x": torch.ones(3)})(peers)

        with pytest.raises(LostPeersError, match="have not reached each other in 4 tries") as error:
            rounds.begin("x", send).wait()
        return str(error.value)

    assert "a cable is missing" in run_local(work, 2, timeout=120.0, backend="gloo")[1]


def test_who_writes_first_decides() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    one, other = Ledger(store, 10.0), Ledger(store, 10.0)
    assert [one.vote(0, 7), other.vote(0, 7)] == [1, 2]
    assert one.decision(0, 7) is None
    assert [one.decide(0, 7, APPLY), other.decide(0, 7, REDO), other.decision(0, 7)] == [APPLY] * 3
    assert one.successor(0) is None and not one.is_doubted(0)
    one.succeed(0, (0, 2), {1: "late"})
    other.succeed(0, (1,), {0: "late", 2: "late"})
    assert one.successor(0) == other.successor(0) == ((0, 2), {1: "late"})
    assert other.is_doubted(0) and not other.is_doubted(1)
    one.answer(0, 3)
    assert other.have_answered(0, [3]) and not other.have_answered(0, [3, 4])
    one.forget(0, 7)
    assert other.decision(0, 7) is None


def test_a_store_that_does_not_answer_ends_the_wait() -> None:
    class Silent:
        def check(self, _keys: object) -> bool:
            threading.Event().wait(30.0)
            return False

    begin = time.monotonic()
    with pytest.raises(LostPeersError, match=r"the ranks' store has not answered for 0\.2 s"):
        Ledger(Silent(), 0.2).published("anything")
    assert time.monotonic() - begin < 10.0
