"""Rounds of replicas of which some are killed or stopped at random moments, without a model around them."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from autopar.runtime import run_local
from autopar.runtime.averaging.agreed_rounds import AgreedRounds, LeftError
from autopar.runtime.averaging.mean import WholeMean
from autopar.runtime.averaging.replicas import Replicas
from autopar.runtime.averaging.waits import LostPeersError
from autopar.runtime.comm.groups import mesh_groups

PATIENCE = 4.0


@dataclass(frozen=True)
class Blow:
    """What happens to ``ranks``: after ``seconds`` of rounds, and further ones ``apart``, they are killed, or stopped
    for ``stopped`` seconds."""

    ranks: tuple[int, ...]
    seconds: float
    stopped: float = 0.0
    apart: float = 0.0

    def fall(self, rank: int) -> None:
        """Called on each of these ranks when the rounds begin."""
        number, own = (signal.SIGSTOP if self.stopped else signal.SIGKILL), os.getpid()

        def strike() -> None:
            if self.stopped:
                subprocess.Popen(["sh", "-c", f"sleep {self.stopped}; kill -CONT {own}"], start_new_session=True)
            os.kill(own, number)

        threading.Timer(self.seconds + self.ranks.index(rank) * self.apart, strike).start()


@dataclass
class Seen:
    """What a rank saw: of each round the members and the mean, the longest that one took, and how it ended."""

    members: list[tuple[int, ...]] = field(default_factory=list)
    means: list[torch.Tensor] = field(default_factory=list)
    longest: float = 0.0
    error: str = ""


def value_of(replica: int, place: int, number: int, numel: int) -> torch.Tensor:
    """What a rank gives to a round."""
    source = torch.Generator().manual_seed(1_000_003 * number + 1009 * place + replica)
    return torch.randn(numel, generator=source, dtype=torch.float64)


def rounds_under(
    blow: Blow, mesh: tuple[int, int], count: int, numel: int = 3001, delay: int = 0, patience: float = PATIENCE
) -> list[Seen | None]:
    """What each rank of ``mesh`` (replicas, ranks of one) saw of ``count`` rounds, each of which is waited for after
    ``delay`` others have begun; None for those that died."""

    def work(rank: int, world: int) -> Seen:
        devices = DeviceMesh("cpu", torch.arange(world).reshape(mesh))
        replicas = Replicas.of(mesh_groups(devices))
        rounds, seen, flying = AgreedRounds(replicas, patience), Seen(), []
        if rank in blow.ranks:
            blow.fall(rank)
        try:
            for number in range(count):
                own = value_of(replicas.members.own, rank % mesh[1], number, numel)
                flying.append(rounds.begin(number % (delay + 1), WholeMean().start({"x": own})))
                while len(flying) > (delay if number < count - 1 else 0):
                    begin = time.monotonic()
                    mean = flying.pop(0).wait()["x"]
                    seen.longest = max(seen.longest, time.monotonic() - begin)
                    seen.means.append(mean)
                    seen.members.append(replicas.members.present)
        except LostPeersError as error:
            seen.error = f"{type(error).__name__}: {error}"
        return seen

    return run_local(work, mesh[0] * mesh[1], timeout=120.0, backend="gloo", may_die=True)


def check_rounds(found: list[Seen | None], mesh: tuple[int, int], left: set[int], count: int) -> dict[str, Any]:
    """Replicas that have not ``left`` have gone through all rounds, with the means of the members of each, bit-equal;
    what the others saw is the beginning of that. Returns what is worth printing."""
    whole = [(rank, seen) for rank, seen in enumerate(found) if rank // mesh[1] not in left]
    for rank, seen in whole:
        assert seen is not None, f"rank {rank} died"
        assert not seen.error, f"rank {rank}: {seen.error}"
        assert len(seen.means) == count
    first = whole[0][1]
    assert first is not None
    for rank, seen in enumerate(found):
        if seen is None:
            continue
        assert seen.members == first.members[: len(seen.members)], f"rank {rank}"
        same_place = next(each for other, each in whole if other % mesh[1] == rank % mesh[1])
        assert same_place is not None
        for number, mean in enumerate(seen.means):
            assert torch.equal(mean, same_place.means[number]), f"round {number} on rank {rank}"
    for place in range(mesh[1]):
        seen = next(each for other, each in whole if other % mesh[1] == place)
        assert seen is not None
        for number, (members, mean) in enumerate(zip(seen.members, seen.means, strict=True)):
            values = [value_of(each, place, number, mean.numel()) for each in members]
            torch.testing.assert_close(mean, torch.stack(values).mean(0), rtol=1e-12, atol=1e-12)
    everyone = tuple(range(mesh[0]))
    at = sum(members == everyone for members in first.members)
    longest = max(seen.longest for _, seen in whole if seen is not None)
    return {"left after": at, "longest": round(longest, 2), "members": first.members[-1]}


def says_that_it_left(found: list[Seen | None], ranks: set[int]) -> bool:
    """Whether these ranks ended with an error that says so."""
    kind = LeftError.__name__
    return all((seen := found[rank]) is not None and seen.error.startswith(kind) for rank in ranks)


def moment(seed: int, most: float) -> float:
    """A random moment."""
    return random.Random(seed).uniform(0.0, most)
