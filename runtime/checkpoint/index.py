"""The index of a checkpoint: for each tensor its dtype and shape, and where its pieces are, as JSON.

It takes the place of the ``.metadata`` of torch.distributed.checkpoint, which is a pickle, and is read as torch's
``Metadata``, so that torch plans what to read for any shards.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from autopar.errors import CheckpointError

# The name of the file.
INDEX = "index.json"
# Dtypes by the names that the safetensors format gives them.
DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Location:
    """The bytes of a piece: ``length`` of them from ``begin`` on in ``file``."""

    file: str
    begin: int
    length: int


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, and where it lies."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    where: Location


@dataclass(frozen=True)
class Entry:
    """A tensor of a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


Index = Mapping[str, Entry]


def dtype_name(dtype: torch.dtype, name: str) -> str:
    """The name of ``dtype`` in the safetensors format. Raises :class:`CheckpointError` if it has none; ``name``: of the
    tensor."""
    if dtype not in _NAMES:
        raise CheckpointError(f"{name} has the dtype {dtype}, which the safetensors format has not: convert it first")
    return _NAMES[dtype]


def index_to_json(index: Index) -> str:
    """The text of the file, a line for each tensor. Raises :class:`CheckpointError` if pieces are missing."""
    files = sorted({piece.where.file for entry in index.values() for piece in entry.pieces})
    number = {file: position for position, file in enumerate(files)}
    lines = []
    for name, entry in sorted(index.items()):
        _check_covered(name, entry)
        pieces = [
            [list(piece.offsets), list(piece.sizes), number[piece.where.file], piece.where.begin]
            for piece in entry.pieces
        ]
        line = {"dtype": dtype_name(entry.dtype, name), "shape": list(entry.shape), "pieces": pieces}
        lines.append(f"{json.dumps(name)}: {json.dumps(line)}")
    return f'{{"files": {json.dumps(files)},\n"tensors": {{\n' + ",\n".join(lines) + "\n}}\n"


def read_index(text: str | bytes, sizes: Mapping[str, int]) -> dict[str, Entry]:
    """Reads an index; ``sizes``: of the files of the checkpoint, in bytes. Raises :class:`CheckpointError` if it is not
    one, or refers to bytes that are not there."""
    try:
        body = json.loads(text)
        files: list[str] = body["files"]
        index = {str(name): _entry(line, files) for name, line in body["tensors"].items()}
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{INDEX} is not an index of tensors: {type(error).__name__}: {error}") from error
    for name, entry in index.items():
        _check_covered(name, entry)
        for piece in entry.pieces:
            where = piece.where
            if where.file not in sizes or where.begin < 0 or where.begin + where.length > sizes[where.file]:
                raise CheckpointError(f"{INDEX} says that a piece of {name} is where {where.file} has no bytes")
    return index


def _entry(line: Mapping[str, Any], files: Sequence[str]) -> Entry:
    dtype, shape = DTYPES[line["dtype"]], _numbers(line["shape"])
    pieces = []
    for offsets, sizes, file, begin in line["pieces"]:
        (position, first) = _numbers((file, begin))
        extent = _numbers(sizes)
        location = Location(files[position], first, math.prod(extent) * dtype.itemsize)
        pieces.append(Piece(_numbers(offsets), extent, location))
    return Entry(dtype, shape, tuple(pieces))


def _numbers(values: Sequence[Any]) -> tuple[int, ...]:
    if any(type(value) is not int or value < 0 for value in values):
        raise ValueError(f"{values!r} are not sizes")
    return tuple(values)


def _check_covered(name: str, entry: Entry) -> None:
    """Raises :class:`CheckpointError` unless the pieces are the whole tensor, each element once."""
    boxes = [(piece.offsets, piece.sizes) for piece in entry.pieces]
    inside = all(
        len(offsets) == len(sizes) == len(entry.shape)
        and all(o + s <= n for o, s, n in zip(offsets, sizes, entry.shape, strict=True))
        for offsets, sizes in boxes
    )
    if not inside or sum(math.prod(sizes) for _, sizes in boxes) != math.prod(entry.shape) or _overlap(boxes):
        raise CheckpointError(
            f"the pieces of {name}, of shape {list(entry.shape)}, are not the whole of it: {boxes[:8]}"
        )


def _overlap(boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Whether two boxes have an element in common: compared with those before that begin no later and end after."""
    full = sorted(box for box in boxes if all(box[1]))
    active: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for offsets, sizes in full:
        active = [a for a in active if not a[0] or a[0][0] + a[1][0] > offsets[0]]
        for other, extent in active:
            if all(max(a, b) < min(a + n, b + m) for a, n, b, m in zip(offsets, sizes, other, extent, strict=True)):
                return True
        active.append((offsets, sizes))
    return False


def as_metadata(index: Index) -> Metadata:
    """The index in torch's form."""
    tensors: dict[str, Any] = {name: tensor_metadata(entry) for name, entry in index.items()}
    return Metadata(tensors)


def tensor_metadata(entry: Entry) -> TensorStorageMetadata:
    """An entry in torch's form."""
    pieces = [ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes)) for p in entry.pieces]
    return TensorStorageMetadata(TensorProperties(dtype=entry.dtype), torch.Size(entry.shape), pieces)
