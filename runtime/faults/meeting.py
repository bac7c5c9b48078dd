"""Where ranks meet at the beginning: those that do not come are named, instead of being waited for in silence."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from autopar.errors import FaultError
from autopar.runtime.torch_internals.collectives import world_timeout

from .diagnosis import LENIENCE


def join_world(backend: str, timeout: float) -> None:
    """``init_process_group(backend)`` with the variables of torchrun. Ranks that do not come within ten times
    ``timeout`` seconds are named by :class:`FaultError`; 0: they are waited for as torch does."""
    if timeout <= 0:
        dist.init_process_group(backend)
        return
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = _store(rank, timeout)
    await_all(store, range(world), rank, timeout)
    dist.init_process_group(backend, store=PrefixStore("world", store), rank=rank, world_size=world)


def _store(rank: int, timeout: float) -> Any:
    """The store that torch's own ``env://`` would use, without its wait for all ranks."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    of_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    limit, master = timedelta(seconds=LENIENCE * timeout), rank == 0 and not of_launcher
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, None, master, limit, wait_for_workers=False, multi_tenant=True
        )
    except RuntimeError as error:
        raise FaultError(
            f"rank {rank} does not reach rank 0 at {host}:{port} within {limit.total_seconds():g} s: rank 0 did not "
            f"come to autopar.parallelize, or cannot be reached from here ({str(error).splitlines()[0]})"
        ) from error
    usual = world_timeout("gloo")
    if usual is not None:
        store.set_timeout(usual)
    return PrefixStore(f"autopar/start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def await_all(store: Any, ranks: Sequence[int], rank: int, timeout: float) -> None:
    """Waits until all ``ranks`` have come to the ``store``, longer than in calls: they may still load weights or data.
    Raises :class:`FaultError` that names those that have not."""
    store.set(f"came{rank}", "")
    keys, named = {each: f"came{each}" for each in ranks}, ""
    for seconds in (timeout, (LENIENCE - 1) * timeout):
        with suppress(RuntimeError):
            store.wait(list(keys.values()), timedelta(seconds=seconds))
            return
        missing = [each for each, key in keys.items() if not store.check([key])]
        if not missing:
            return
        named = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        if rank == min(set(ranks) - set(missing)):
            print(f"autopar: {named} not in autopar.parallelize yet; the others wait", file=sys.stderr, flush=True)
    raise FaultError(
        f"{named} did not come to autopar.parallelize within {LENIENCE * timeout:g} s; the others wait there. Every "
        "rank of the mesh must call it; Options(timeout=...) lets them wait ten times as long"
    )
