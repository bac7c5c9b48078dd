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
from autopar.processes.port_owner import is_taken, port_owner
from autopar.runtime.comm.minority import named
from autopar.runtime.torch_internals.collectives import world_timeout

from .diagnosis import LENIENCE

# Seconds in which a rank that has come looks which others have not.
# Chosen: thousands of questions to a store.
_ASKED_SECONDS = 10.0
# Where ranks meet, in errors.
WHERE = "autopar.parallelize"


def join_world(backend: str, timeout: float, where: str = WHERE, limit: timedelta | None = None) -> None:
    """``init_process_group(backend)`` with the variables of torchrun. Ranks that do not come to ``where`` within ten
    times ``timeout`` seconds are named by :class:`FaultError`; 0: they are waited for as torch does. ``limit``: what
    one communication of the group may take; None: torch's."""
    if timeout <= 0:
        dist.init_process_group(backend)
        return
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = _store(rank, timeout, where)
    await_all(store, range(world), rank, timeout, where)
    dist.init_process_group(backend, store=PrefixStore("world", store), rank=rank, world_size=world, timeout=limit)


def _store(rank: int, timeout: float, where: str) -> Any:
    """The store that torch's own ``env://`` would use, without its wait for all ranks."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    of_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    limit, master = timedelta(seconds=LENIENCE * timeout), rank == 0 and not of_launcher
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, None, master, limit, wait_for_workers=False, multi_tenant=True
        )
    except RuntimeError as error:
        detail, seconds = str(error).splitlines()[0], limit.total_seconds()
        if master:
            raise FaultError(_why_not_kept(detail, host, port)) from error
        raise FaultError(_why_not_reached(detail, rank, host, port, seconds, where)) from error
    usual = world_timeout("gloo")
    if usual is not None:
        store.set_timeout(usual)
    return PrefixStore(f"autopar/start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _why_not_reached(detail: str, rank: int, host: str, port: int, seconds: float, where: str) -> str:
    return (
        f"rank {rank} does not reach rank 0 at {host}:{port} within {seconds:g} s: rank 0 did not come to {where}, "
        f"cannot be reached from here, or another program has that port ({detail})"
    )


def _why_not_kept(detail: str, host: str, port: int) -> str:
    if not is_taken(port):
        return f"rank 0 cannot wait for the other ranks at {host}:{port} (MASTER_ADDR and MASTER_PORT): {detail}"
    return (
        f"rank 0 cannot wait for the other ranks at {host}:{port}: another program has taken port {port} of this host"
        f"{port_owner(port)}. End it, or choose another port: torchrun --master-port, or MASTER_PORT of all ranks; "
        "`autopar run` takes a free one, so start it again"
    )


def await_all(store: Any, ranks: Sequence[int], rank: int, timeout: float, where: str = WHERE) -> None:
    """Waits until all ``ranks`` have come to the ``store``, longer than in calls: they may still load weights or data.
    Raises :class:`FaultError` that names those that have not. Ranks wait for one key, and only the first of those that
    have come looks at all: the store answers one after the other."""
    # Keys of a number of ranks: torchrun's store outlives a change of members.
    store.set(_key(rank), "")
    everyone = f"all{len(ranks)}"
    if store.add(f"count{len(ranks)}", 1) >= len(ranks):
        store.set(everyone, "")
    absent = ""
    for number, seconds in enumerate((timeout, (LENIENCE - 1) * timeout)):
        with suppress(RuntimeError):
            store.wait([everyone], timedelta(seconds=seconds))
            return
        absent = _absent(store, ranks, rank, f"absent{len(ranks)}.{number}")
        if not absent:
            return
        if number == 0 and rank == _first(store, ranks, rank):
            print(f"autopar: {absent} not in {where} yet; the others wait", file=sys.stderr, flush=True)
    raise FaultError(
        f"{absent} did not come to {where} within {LENIENCE * timeout:g} s; the others wait there. Every "
        "rank of the mesh must call it; Options(timeout=...) lets them wait ten times as long"
    )


def _key(rank: int) -> str:
    return f"came{rank}"


def _first(store: Any, ranks: Sequence[int], rank: int) -> int:
    """The first of the ``ranks`` that have come, of which ``rank`` is one."""
    return next(each for each in ranks if each == rank or store.check([_key(each)]))


def _absent(store: Any, ranks: Sequence[int], rank: int, key: str) -> str:
    """The ranks that have not come, in words; "" if none. The first that has come says it to the others by ``key``."""
    if _first(store, ranks, rank) != rank:
        with suppress(RuntimeError):
            store.wait([key], timedelta(seconds=_ASKED_SECONDS))
            return str(store.get(key).decode())
    missing = [each for each in ranks if not store.check([_key(each)])]
    text = named(missing) if missing else ""
    store.set(key, text)
    return text
