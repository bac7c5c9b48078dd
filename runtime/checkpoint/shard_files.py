"""Files of tensors in the safetensors format: a header in JSON, then the bytes of each tensor.

They are written as a stream, since the ``safetensors`` package needs all tensors of a file in memory at once, and
hashed on the way.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.errors import CheckpointError

from .index import DTYPES, dtype_name
from .manifest import FileRecord
from .stores import Store

# Bytes that are copied at once. Chosen: little memory, and each write is worth its call.
_BLOCK_BYTES = 16 << 20
# The longest header that is read. The limit of the safetensors package.
_LONGEST_HEADER = 100_000_000


@dataclass(frozen=True)
class Sheet:
    """A tensor of a file: its name, dtype and shape, and its values on any device, some slices of the first dim after
    the others."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    values: Iterable[torch.Tensor]

    @property
    def bytes(self) -> int:
        """The size of its values."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def header_of(sheets: Sequence[Sheet], metadata: Mapping[str, str]) -> tuple[bytes, list[int]]:
    """The header of a file of ``sheets``, and where the bytes of each begin in the file."""
    table: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position, begins = 0, []
    for sheet in sheets:
        end = position + sheet.bytes
        dtype = dtype_name(sheet.dtype, sheet.name)
        table[sheet.name] = {"dtype": dtype, "shape": list(sheet.shape), "data_offsets": [position, end]}
        begins.append(position)
        position = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, [len(header) + begin for begin in begins]


def write_file(
    store: Store, name: str, sheets: Sequence[Sheet], metadata: Mapping[str, str]
) -> tuple[FileRecord, list[int]]:
    """Writes a file of ``sheets``. Returns its record, and where the bytes of each begin."""
    header, begins = header_of(sheets, metadata)
    digest, size = hashlib.sha256(header), len(header)
    with store.writing(name) as file:
        file.write(header)
        for sheet in sheets:
            for block in (block for value in sheet.values for block in _blocks(value)):
                file.write(block)
                digest.update(block)
                size += len(block)
    return FileRecord(name, size, digest.hexdigest()), begins


def write_text(store: Store, name: str, text: str) -> FileRecord:
    """Writes a file of text."""
    content = text.encode()
    with store.writing(name) as file:
        file.write(content)
    return FileRecord(name, len(content), hashlib.sha256(content).hexdigest())


def _blocks(tensor: torch.Tensor) -> Iterable[memoryview]:
    """The bytes of ``tensor`` in order, a few slices of the first dim at a time."""
    if not tensor.numel():
        return
    rows = tensor.reshape(1) if tensor.dim() == 0 else tensor
    step = max(1, _BLOCK_BYTES * rows.shape[0] // (rows.numel() * rows.element_size()))
    for start in range(0, rows.shape[0], step):
        block = rows[start : start + step].to("cpu").contiguous()
        yield byte_view(block)


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous ``tensor`` of the processor, as bytes."""
    array: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(array).cast("B")


def hash_file(store: Store, name: str, size: int) -> str:
    """The SHA-256 of the first ``size`` bytes of a file, read in blocks."""
    digest = hashlib.sha256()
    for begin in range(0, size, _BLOCK_BYTES):
        digest.update(store.read(name, begin, min(_BLOCK_BYTES, size - begin)))
    return digest.hexdigest()


def read_header(store: Store, name: str) -> dict[str, tuple[torch.dtype, tuple[int, ...], int]]:
    """Dtype, shape and first byte of each tensor of a safetensors file. Raises :class:`CheckpointError` if it is not
    one."""
    try:
        total, length = store.size(name), int.from_bytes(store.read(name, 0, 8), "little")
        if length > min(_LONGEST_HEADER, total - 8):
            raise ValueError(f"its header would have {length} bytes, and the file has {total}")
        table = json.loads(store.read(name, 8, length))
        return {key: _header_entry(line, 8 + length, total) for key, line in table.items() if key != "__metadata__"}
    except (ValueError, TypeError, KeyError, AttributeError, OSError, RecursionError) as error:
        raise CheckpointError(f"{store}/{name} is not a safetensors file: {type(error).__name__}: {error}") from error


def _header_entry(line: Mapping[str, Any], base: int, total: int) -> tuple[torch.dtype, tuple[int, ...], int]:
    dtype, shape, (begin, end) = DTYPES[line["dtype"]], tuple(line["shape"]), line["data_offsets"]
    if any(type(size) is not int or size < 0 for size in (*shape, begin, end)):
        raise ValueError(f"{line} has no valid sizes")
    if end - begin != torch.Size(shape).numel() * dtype.itemsize or base + end > total:
        raise ValueError(f"{line} is beyond the end of the file, or of another size than its shape")
    return dtype, shape, base + begin
