"""The storage of checkpoints in the interfaces of torch.distributed.checkpoint.

``torch.distributed.checkpoint.save`` with :class:`PartPlanner` and :class:`Writer` agrees with all ranks and writes;
:class:`Reader` reads any shards, also for a ``torch.distributed.checkpoint.load`` of the user's own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from autopar.errors import CheckpointError

from .boxes import Box
from .index import Entry, Location, Piece, as_metadata
from .manifest import FileRecord
from .shard_files import Sheet, byte_view, write_file
from .stores import Folder, Store

# The bytes of a file, about. Chosen: few files, and a reader may check several at once.
_FILE_BYTES = 4 << 30
# The bytes that are read at once. Chosen: little memory beside the shards themselves.
_READ_BYTES = 64 << 20


@dataclass(frozen=True)
class Part:
    """What this rank writes of a tensor: boxes, and their values (in the memory of the tensor, or copied from it)."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: tuple[tuple[Box, torch.Tensor], ...]


@dataclass(frozen=True)
class _Written:
    """Where a piece was written, and the record of its file."""

    file: FileRecord
    begin: int


class PartPlanner(SavePlanner):
    """Plans to write :class:`Part` objects: each rank what it has, since they are divided among ranks already."""

    def set_up_planner(
        self, state_dict: Mapping[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self._values = {
            MetadataIndex(name, torch.Size(box.offsets)): value
            for name, part in state_dict.items()
            for box, value in part.boxes
        }
        self._parts = state_dict

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_item(name, part, box) for name, part in self._parts.items() for box, _ in part.boxes])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        value: torch.Tensor = self._values[MetadataIndex(write_item.index.fqn, write_item.index.offset)]
        return value


def _item(name: str, part: Part, box: Box) -> WriteItem:
    offsets = torch.Size(box.offsets)
    chunk = ChunkStorageMetadata(offsets, torch.Size(box.sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype=part.dtype), torch.Size(part.shape))
    return WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data)


Finish = Callable[[dict[str, Entry], list[FileRecord]], None]


class Writer(StorageWriter):
    """Writes the pieces of this rank to ``store``, in files whose names begin with ``prefix``. On the first rank
    ``finish`` is then called with the index of all tensors and the records of all files."""

    def __init__(self, store: Store, prefix: str, finish: Finish) -> None:
        self._store, self._prefix, self._finish = store, prefix, finish

    def reset(self, checkpoint_id: Folder | None = None) -> None:
        """One writer writes one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The folder exists before."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        for number, items in enumerate(_files(plan.items)):
            sheets = [_sheet(item, planner) for item in items]
            record, begins = write_file(self._store, f"{self._prefix}-{number:03d}.safetensors", sheets, {})
            for item, sheet, begin in zip(items, sheets, begins, strict=True):
                results.append(WriteResult(item.index, sheet.bytes, _Written(record, begin)))
        self._store.flush()
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        written = [result for of_rank in results for result in of_rank]
        files = {result.storage_data.file.name: result.storage_data.file for result in written}
        self._finish(_index(metadata, written), list(files.values()))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Folder) -> bool:
        return bool(os.fspath(checkpoint_id))


def _files(items: Sequence[WriteItem]) -> Iterator[list[WriteItem]]:
    """The items of each file."""
    file: list[WriteItem] = []
    total = 0
    for item in items:
        size = _tensor_data(item).chunk.sizes.numel() * _tensor_data(item).properties.dtype.itemsize
        if file and total + size > _FILE_BYTES:
            yield file
            file, total = [], 0
        file.append(item)
        total += size
    if file:
        yield file


def _tensor_data(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None
    return item.tensor_data


def _sheet(item: WriteItem, planner: SavePlanner) -> Sheet:
    data = _tensor_data(item)
    whole = data.chunk.sizes == data.size
    name = item.index.fqn if whole else f"{item.index.fqn}@{','.join(map(str, data.chunk.offsets))}"
    return Sheet(name, data.properties.dtype, tuple(data.chunk.sizes), _values_of(item, planner))


def _values_of(item: WriteItem, planner: SavePlanner) -> Iterator[torch.Tensor]:
    """The value of ``item``, once it is asked for."""
    value = planner.resolve_data(item)
    assert isinstance(value, torch.Tensor)
    yield value


def _index(metadata: Metadata, written: Sequence[WriteResult]) -> dict[str, Entry]:
    tensors = {n: t for n, t in metadata.state_dict_metadata.items() if isinstance(t, TensorStorageMetadata)}
    pieces: dict[str, list[Piece]] = {name: [] for name in tensors}
    sizes = {
        (name, tuple(chunk.offsets)): tuple(chunk.sizes) for name, tensor in tensors.items() for chunk in tensor.chunks
    }
    for result in written:
        name, offsets = result.index.fqn, tuple(result.index.offset or ())
        where = Location(result.storage_data.file.name, result.storage_data.begin, result.size_in_bytes)
        pieces[name].append(Piece(offsets, sizes[name, offsets], where))
    return {
        name: Entry(tensor.properties.dtype, tuple(tensor.size), tuple(pieces[name]))
        for name, tensor in tensors.items()
    }


class Reader(StorageReader):
    """Reads the tensors of ``index`` from ``store``: what a plan asks for, and little more."""

    def __init__(self, store: Store, index: Mapping[str, Entry]) -> None:
        self._store, self._index = store, index
        self._pieces = {(name, piece.offsets): piece for name, entry in index.items() for piece in entry.pieces}

    def reset(self, checkpoint_id: Folder | None = None) -> None:
        """One reader reads one checkpoint."""

    def read_metadata(self) -> Metadata:
        return as_metadata(self._index)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Where pieces lie is known from the index."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            target, source = planner.resolve_tensor(item).detach(), item.storage_index
            piece = self._pieces[source.fqn, tuple(source.offset or ())]
            read_box(self._store, self._index[source.fqn].dtype, piece, item.storage_offsets, target)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Folder) -> bool:
        return bool(os.fspath(checkpoint_id))


def read_box(store: Store, dtype: torch.dtype, piece: Piece, begin: Sequence[int], target: torch.Tensor) -> None:
    """Fills ``target`` with the box of its shape that begins at ``begin`` inside ``piece``, converted to its dtype.
    Whole slices of the piece's first dim are read, some at a time. Raises :class:`CheckpointError` if bytes are
    missing."""
    if not target.numel():
        return
    if not piece.sizes:
        target.copy_(_values(store, piece, dtype, 0, 1).reshape(()))
        return
    slice_bytes = piece.where.length // piece.sizes[0]
    step = max(1, _READ_BYTES // slice_bytes)
    for first in range(0, target.shape[0], step):
        count = min(step, target.shape[0] - first)
        values = _values(store, piece, dtype, begin[0] + first, count)
        for dim in range(1, target.dim()):
            values = values.narrow(dim, begin[dim], target.shape[dim])
        target.narrow(0, first, count).copy_(values)


def _values(store: Store, piece: Piece, dtype: torch.dtype, first: int, count: int) -> torch.Tensor:
    """``count`` slices of the first dim of ``piece``."""
    slices = piece.sizes[0] if piece.sizes else 1
    slice_bytes = piece.where.length // slices
    values = torch.empty((count, *piece.sizes[1:]), dtype=dtype)
    buffer = byte_view(values)
    if store.read_into(piece.where.file, piece.where.begin + first * slice_bytes, buffer) != len(buffer):
        raise CheckpointError(f"{store}/{piece.where.file} ends before the tensors that it should have")
    return values
