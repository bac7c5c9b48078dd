"""Writes a snapshot as a checkpoint: all of it, or nothing that could be taken for one."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
import uuid
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as torch_save

from autopar.errors import CheckpointError

from .claim import claim
from .find import WRITING, checkpoints
from .index import INDEX, Entry, index_to_json
from .manifest import MANIFEST, FileRecord, Manifest
from .ranks import LostReplicaError, Ranks, ranks_of
from .shard_files import write_text
from .snapshot import STATE, Snapshot, Training, take_snapshot
from .stores import Folder, Store, store_of
from .torch_storage import PartPlanner, Writer


def save(
    folder: Folder,
    model: nn.Module,
    optimizer: Any = None,
    *,
    scheduler: Any = None,
    dataloader: Any = None,
    step: int,
    extra: Any = None,
) -> str:
    """Saves a training as ``folder/step-000123``, and returns that path. Called on every rank that has the model.

    Args:
        folder: a local folder that all ranks share, or a URL of fsspec (``s3://bucket/run``).
        model: a parallel model, or a plain module, also with DTensor parameters of its own.
        optimizer, scheduler: optional; state is saved by the name of the parameter.
        dataloader: what has a ``state_dict``: the sampler of ``model.sampler(...)``, a loader that has one.
        step: the number of steps done.
        extra: whatever else: numbers, strings, tensors (whole ones are the same on every rank), in lists and dicts.

    Raises:
        CheckpointError: on every rank, if anything could not be written (then nothing is left that ``load`` would
            take), or if something cannot be saved; names it. With ``Options(sync=...(patience=))`` also if a replica
            leaves in the middle: training may go on.
        FaultError: as of exchanges, with which replicas find out who is left.
    """
    ranks, store = ranks_of(model), store_of(folder)
    snapshot = take_snapshot(Training(model, optimizer, scheduler, dataloader), ranks, step, extra)
    return write_snapshot(snapshot, store, ranks)


# The folders that this process is writing: a save must not take them for what an earlier one left.
_BEING_WRITTEN: set[str] = set()


def step_name(step: int) -> str:
    """The name of the folder of a checkpoint."""
    return f"step-{step:06d}"


def write_snapshot(snapshot: Snapshot, store: Store, ranks: Ranks) -> str:
    """Writes ``snapshot`` into ``store``; returns the path of the checkpoint. Collective."""
    name = ranks.from_first(lambda: _begun(store, snapshot.step))

    def write() -> str:
        try:
            return _write(snapshot, store, name, ranks)
        except CheckpointException as error:
            raise _explained(error, store) from error
        except OSError as error:
            raise _not_saved(store, error) from error

    try:
        final = ranks.together(write)
    except LostReplicaError:
        if ranks.is_first:
            _tidy(store, name)
        raise
    except CheckpointError:
        ranks.from_first(lambda: _tidy(store, name))
        raise
    finally:
        _BEING_WRITTEN.discard(str(store.inside(name)))
    return ranks.from_first(lambda: final)


def _write(snapshot: Snapshot, store: Store, name: str, ranks: Ranks) -> str:
    """Writes this rank's files; on the first rank also the rest, once all have written."""
    committed: list[str] = []

    def finish(index: dict[str, Entry], files: list[FileRecord]) -> None:
        committed.append(_commit(snapshot, store, name, index, files))

    writer = Writer(store.inside(name), f"rank-{ranks.index:05d}", finish)
    planner = PartPlanner()
    if dist.is_initialized() and ranks.group is not None:
        torch_save(dict(snapshot.parts), storage_writer=writer, planner=planner, process_group=ranks.group)
    else:  # What torch does on one rank, without its warning that there are no others.
        planner.set_up_planner(snapshot.parts)
        plans, metadata = planner.create_global_plan([planner.create_local_plan()])
        writer.finish(metadata, [writer.write_data(plans[0], planner).wait()])
    return committed[0] if committed else ""


def _begun(store: Store, step: int) -> str:
    try:
        return _begin(store, step)
    except OSError as error:
        raise _not_saved(store, error) from error


def _not_saved(store: Store, error: OSError) -> CheckpointError:
    return CheckpointError(f"nothing was saved in {store}: {type(error).__name__}: {error}")


def _begin(store: Store, step: int) -> str:
    """Creates the folder to write to. Deletes what earlier saves left that did not end, but not what this process, or
    another one of this host, is writing. Raises :class:`CheckpointError` if another training saves there."""
    store.create()
    claim(store)
    complete = {found.name for found in checkpoints(store)}
    names = list(store.names())
    for name in names:
        unfinished = name.startswith(WRITING) or (not store.renames and name.startswith("step-"))
        written = str(store.inside(name)) in _BEING_WRITTEN or _is_alive(name)
        if unfinished and name not in complete and not written:
            store.remove(name, MANIFEST)
    if store.renames:
        name = f"{WRITING}{step_name(step)}-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    else:
        name = _free_name(step, complete | {n for n in names if str(store.inside(n)) in _BEING_WRITTEN})
    store.inside(name).create()
    _BEING_WRITTEN.add(str(store.inside(name)))
    return name


def _is_alive(name: str) -> bool:
    """Whether a process of this host that is not this one is writing the folder."""
    found = re.search(rf"-{re.escape(socket.gethostname())}-(\d+)-[0-9a-f]{{8}}$", name)
    if found is None or int(found[1]) == os.getpid():
        return False
    try:
        os.kill(int(found[1]), 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True


def _tidy(store: Store, name: str) -> None:
    """Deletes what a save that failed has written, if that is possible: the next save tries again."""
    with contextlib.suppress(OSError):
        if name not in {found.name for found in checkpoints(store)}:
            store.remove(name, MANIFEST)


def _free_name(step: int, taken: set[str]) -> str:
    """A name for a folder that cannot be renamed: no other complete checkpoint has it."""
    names = (step_name(step), *(f"{step_name(step)}-{number}" for number in range(2, len(taken) + 3)))
    return next(name for name in names if name not in taken)


def _commit(snapshot: Snapshot, store: Store, name: str, index: dict[str, Entry], files: list[FileRecord]) -> str:
    """Writes what makes the folder a checkpoint, the manifest last, and gives it its name."""
    folder = store.inside(name)
    for file in files:
        _check_visible(folder, file)
    records = [
        *files,
        write_text(folder, INDEX, index_to_json(index)),
        write_text(folder, STATE, json.dumps(snapshot.state, allow_nan=False)),
    ]
    folder.flush()
    number = max((found.manifest.number for found in checkpoints(store)), default=0) + 1
    manifest = Manifest(snapshot.step, number, time.time(), {file.name: file for file in records})
    write_text(folder, MANIFEST, manifest.to_json())
    folder.flush()
    return _renamed(store, name, snapshot.step)


def _check_visible(folder: Store, file: FileRecord) -> None:
    try:
        size = folder.size(file.name)
    except OSError as error:
        raise CheckpointError(
            f"{folder}/{file.name} was written by another rank, and the first rank does not see it: the folder must be "
            f"on a file system that all hosts share ({error})"
        ) from error
    if size != file.bytes:
        raise CheckpointError(
            f"{folder}/{file.name} has {size} bytes, and {file.bytes} were written: is the disk full?"
        )


def _renamed(store: Store, name: str, step: int) -> str:
    """Gives the complete checkpoint ``name`` its final name; replaces an older one of the same step. At each moment
    one of them is complete, and is found by its manifest."""
    if not store.renames:
        for found in checkpoints(store):
            if found.manifest.step == step and found.name != name:
                store.remove(found.name, MANIFEST)
        return str(store.inside(name))
    final = step_name(step)
    if final in store.names():
        replaced = f"{WRITING}replaced-{uuid.uuid4().hex[:8]}"
        store.rename(final, replaced)
        store.rename(name, final)
        store.flush()
        store.remove(replaced, MANIFEST)
    else:
        store.rename(name, final)
    store.flush()
    return str(store.inside(final))


def _explained(error: CheckpointException, store: Store) -> CheckpointError:
    """torch's error of all ranks, as one sentence."""
    causes = {rank: cause for rank, (cause, *_) in sorted(error.failures.items())}
    rank, cause = next(iter(causes.items()))
    text = str(cause) if isinstance(cause, CheckpointError) else f"{type(cause).__name__}: {cause}"
    more = f" (and {len(causes) - 1} other ranks)" if len(causes) > 1 else ""
    return CheckpointError(f"nothing was saved in {store}: rank {rank}{more}: {text}")
