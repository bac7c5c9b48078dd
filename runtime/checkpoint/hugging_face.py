"""Weights in the format of Hugging Face: safetensors files with an index, tied weights once, and the configuration."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from autopar.errors import CheckpointError
from autopar.torch_internals.hugging_face import names_not_saved

from .find import checkpoints
from .gather import Sent, blocks, who_sends
from .index import Entry, Location, Piece
from .manifest import MANIFEST
from .opened import open_checkpoint
from .ranks import Ranks, ranks_of
from .restore_model import match_tensors, restore_model, source_of, tensors_of
from .shard_files import Sheet, read_header, write_file, write_text
from .sources import Source
from .stores import Folder, LocalStore, Store, store_of

# The names that Hugging Face gives its files.
_ONE, _MANY, _INDEX = "model.safetensors", "model-{:05d}-of-{:05d}.safetensors", "model.safetensors.index.json"
# The bytes of a file of an export. The former default of save_pretrained; files may be downloaded in parallel.
_FILE_BYTES = 5_000_000_000


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """``model.state_dict()`` with whole plain tensors, in the host memory of the first rank; empty on the others. They
    are gathered a block of 4 MiB at a time; tied weights share their memory. Collective. Raises
    :class:`CheckpointError` before a meta model has values."""
    ranks, found = ranks_of(model), tensors_of(model)
    tensors = {names[0]: tensor for names, tensor in found}
    ranks.together(lambda: _check_real(tensors))
    sent = who_sends(tensors, ranks)
    wholes: dict[str, torch.Tensor] = {}
    for names, tensor in found:
        whole = torch.empty(tensor.shape if ranks.is_first else (0,), dtype=tensor.dtype)
        begin = 0
        for block in blocks(names[0], tensor, sent, ranks):
            if ranks.is_first:
                (whole.narrow(0, begin, block.shape[0]) if whole.dim() else whole).copy_(block)
            begin += block.shape[0] if block.dim() else 0
        wholes.update(dict.fromkeys(names, whole))
    return {name: wholes[name] for name in model.state_dict(keep_vars=True) if name in wholes and ranks.is_first}


def _check_real(tensors: dict[str, torch.Tensor]) -> None:
    meta = [name for name, tensor in tensors.items() if tensor.is_meta]
    if meta:
        raise CheckpointError(f"{meta[0]} is on the meta device still: it has no values before the first batch")


def save_safetensors(folder: Folder, model: nn.Module, *, file_bytes: int = _FILE_BYTES) -> None:
    """Writes the weights as ``save_pretrained`` does: ``model.safetensors``, or files of about ``file_bytes`` and an
    index; a tied weight under one name; and the configuration, if the model has one. ``from_pretrained`` and
    ``parallelize(..., weights=folder)`` read it. The first rank writes; a block of 4 MiB at a time is gathered there.
    Collective. Raises :class:`CheckpointError` on every rank if it fails."""
    ranks, store = ranks_of(model), store_of(folder)
    tensors = _exported(model)
    ranks.together(lambda: _check_real(tensors))
    sent, files = who_sends(tensors, ranks), list(_files(tensors, file_bytes))
    names = [_ONE] if len(files) == 1 else [_MANY.format(i + 1, len(files)) for i in range(len(files))]
    ranks.from_first(store.create)
    failure: OSError | None = None
    for name, file in zip(names, files, strict=True):
        failure = _write(store, name, file, sent, ranks, failure)

    def finish() -> None:
        if failure is not None:
            raise CheckpointError(f"{store} was not written: {failure}") from failure
        if len(files) > 1:
            write_text(store, _INDEX, _index_text(names, files))
        _write_configuration(store, model)

    ranks.from_first(finish)


def _exported(model: nn.Module) -> dict[str, torch.Tensor]:
    """Each tensor under the name that ``save_pretrained`` keeps: not one that the class says is tied to another."""
    tied, ignored = names_not_saved(model)
    kept = {next((name for name in names if name not in tied), names[0]): tensor for names, tensor in tensors_of(model)}
    return {name: tensor for name, tensor in kept.items() if name not in ignored}


def _files(tensors: dict[str, torch.Tensor], limit: int) -> Iterator[dict[str, torch.Tensor]]:
    file: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if file and _size(file) + tensor.numel() * tensor.element_size() > limit:
            yield file
            file = {}
        file[name] = tensor
    yield file


def _size(file: dict[str, torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in file.values())


def _write(
    store: Store, name: str, file: dict[str, torch.Tensor], sent: Sent, ranks: Ranks, failure: OSError | None
) -> OSError | None:
    """Writes a file on the first rank. After a failure the rest is received, and dropped: other ranks send it."""
    streams = {tensor_name: blocks(tensor_name, tensor, sent, ranks) for tensor_name, tensor in file.items()}
    if ranks.is_first and failure is None:
        sheets = [Sheet(n, t.dtype, tuple(t.shape), streams[n]) for n, t in file.items()]
        try:
            write_file(store, name, sheets, {"format": "pt"})
        except OSError as error:
            failure = error
    for stream in streams.values():
        for _ in stream:
            pass
    return failure


def _index_text(names: list[str], files: list[dict[str, torch.Tensor]]) -> str:
    where = {tensor: name for name, file in zip(names, files, strict=True) for tensor in file}
    total = sum(map(_size, files))
    return json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2, sort_keys=True) + "\n"


def _write_configuration(store: Store, model: nn.Module) -> None:
    for attribute in ("config", "generation_config"):
        configuration = getattr(model, attribute, None)
        if configuration is not None and hasattr(configuration, "to_json_string"):
            name = "config.json" if attribute == "config" else "generation_config.json"
            write_text(store, name, configuration.to_json_string())


def safetensors_source(store: Store) -> Source:
    """The tensors of the safetensors files in ``store``: those of the index, if there is one. Raises
    :class:`CheckpointError` if there are none, or files are damaged."""
    names = store.names()
    if _INDEX in names:
        try:
            files = sorted(set(json.loads(store.read(_INDEX))["weight_map"].values()))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{store}/{_INDEX} is not an index: {type(error).__name__}: {error}") from error
    else:
        files = [_ONE] if _ONE in names else [name for name in names if name.endswith(".safetensors")]
    foreign = [file for file in files if file not in names]
    if foreign or not files:
        missing = f"has no file {foreign[0]!r}, which its index names" if foreign else "has no safetensors files"
        raise CheckpointError(f"{store} {missing}")
    return Source(store, {name: entry for file in files for name, entry in _entries(store, file)}, {})


def _entries(store: Store, file: str) -> Iterator[tuple[str, Entry]]:
    for name, (dtype, shape, begin) in read_header(store, file).items():
        where = Location(file, begin, torch.Size(shape).numel() * dtype.itemsize)
        yield name, Entry(dtype, shape, (Piece((0,) * len(shape), shape, where),))


def load_weights(folder: Folder, model: nn.Module) -> None:
    """Fills parameters and buffers of ``model`` from a folder of safetensors (of ``save_pretrained``, or of the Hugging
    Face Hub), or from the weights of a checkpoint. Each rank reads its own parts; those on the meta device when the
    first batch has brought the plan. Collective. Raises :class:`CheckpointError`, before anything has changed, for a
    tensor that only one of them has, or of another shape."""
    ranks, store = ranks_of(model), store_of(folder)
    if ranks.from_first(lambda: MANIFEST in store.names() or bool(checkpoints(store))):
        source = source_of(open_checkpoint(store, ranks))
    else:
        source = ranks.together(lambda: safetensors_source(_existing(store)))
    matched = ranks.together(lambda: match_tensors(source, model))
    ranks.together(lambda: restore_model(source, model, matched))


def _existing(store: Store) -> Store:
    if isinstance(store, LocalStore) and not Path(str(store)).is_dir():
        raise CheckpointError(f"{store} is not a folder")
    return store
