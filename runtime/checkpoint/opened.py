"""Opens a checkpoint: reads and verifies its files, on all ranks together."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from autopar.errors import AutoparError, CheckpointError

from .find import Found, checkpoints, find
from .index import INDEX, Entry, read_index
from .manifest import FileRecord, read_manifest
from .ranks import Ranks
from .shard_files import hash_file
from .snapshot import STATE
from .stores import Store
from .torch_storage import Reader, read_box


@dataclass(frozen=True)
class Opened:
    """A checkpoint that was verified: ``index`` of its tensors, ``state`` of everything else."""

    store: Store
    step: int
    index: Mapping[str, Entry]
    state: Mapping[str, Any]

    @property
    def reader(self) -> Reader:
        """Reads its tensors."""
        return Reader(self.store, self.index)

    def whole(self, name: str) -> torch.Tensor:
        """A whole tensor, in host memory. Raises :class:`CheckpointError` if there is none of that name."""
        entry = self.index.get(name)
        if entry is None:
            raise CheckpointError(f"the checkpoint {self.store} has no tensor {name}")
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        for piece in entry.pieces:
            target = tensor
            for dim, (offset, size) in enumerate(zip(piece.offsets, piece.sizes, strict=True)):
                target = target.narrow(dim, offset, size)
            read_box(self.store, entry.dtype, piece, (0,) * len(entry.shape), target)
        return tensor


def open_checkpoint(store: Store, ranks: Ranks, *, verify: bool = True) -> Opened:
    """Opens the checkpoint ``store``, or the newest in it. With ``verify`` the hashes of all files are compared, each
    on one rank; without, only those of the index and the state. Collective. Raises :class:`CheckpointError`, on every
    rank, that names a damaged file."""
    name, text = ranks.from_first(lambda: _chosen(find(store)))
    folder, manifest = (store.inside(name) if name else store), read_manifest(text)
    first = [manifest.files.get(file) for file in (INDEX, STATE)]
    if None in first:
        raise CheckpointError(f"{folder} is not a checkpoint of a training: it has no {INDEX} or no {STATE}")
    others = [file for file in manifest.files.values() if file.name not in (INDEX, STATE)]
    own = sorted(others, key=lambda file: -file.bytes)[ranks.index :: ranks.count] if verify else []
    damaged = [damage for file in own if (damage := _damage(folder, file)) is not None]
    index, state = ranks.together(lambda: [_read(folder, file) for file in first])  # type: ignore[arg-type]
    everywhere = [damage for of_rank in ranks.all(damaged) for damage in of_rank]
    if everywhere:
        raise CheckpointError(f"{'; '.join(everywhere)}{ranks.from_first(lambda: _older(store, folder))}")
    sizes = {file.name: file.bytes for file in manifest.files.values()}
    return Opened(folder, manifest.step, read_index(index, sizes), _state(folder, state))


def _chosen(found: Found) -> tuple[str, str]:
    return found.name, found.manifest.to_json()


def _damage(store: Store, file: FileRecord) -> str | None:
    """What is wrong with a file, or None."""
    try:
        size = store.size(file.name)
        if size != file.bytes:
            return f"{store}/{file.name} is damaged: it has {size} bytes, and {file.bytes} were written"
        if hash_file(store, file.name, size) != file.sha256:
            return f"{store}/{file.name} is damaged: its content is not that which was written (SHA-256)"
    except OSError as error:
        return f"{store}/{file.name} cannot be read: {error}"
    return None


def _read(store: Store, file: FileRecord) -> bytes:
    damage = _damage(store, file)
    if damage is not None:
        raise CheckpointError(damage)
    return store.read(file.name)


def _older(store: Store, damaged: Store) -> str:
    others = [found for found in checkpoints(store) if str(found.store) != str(damaged)]
    return f". Another complete checkpoint: load({str(others[-1].store)!r}, ...)" if others else ""


def _state(store: Store, text: bytes) -> dict[str, Any]:
    try:
        state = json.loads(text)
        if isinstance(state, dict) and {"model", "optimizer", "random", "extra"} <= state.keys():
            return state
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{store}/{STATE} is not JSON: {error}") from error
    raise CheckpointError(f"{store}/{STATE} is not the state of a training")


@contextmanager
def reading_state(opened: Opened) -> Iterator[None]:
    """Turns what a file that was changed by hand leads to into :class:`CheckpointError`."""
    try:
        yield
    except AutoparError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, RecursionError, OverflowError) as error:
        raise CheckpointError(
            f"{opened.store}/{STATE} is not the state of a training: {type(error).__name__}: {error}"
        ) from error
