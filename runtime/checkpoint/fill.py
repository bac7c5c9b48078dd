"""Fills tensors, of which each rank has any part, from a checkpoint. No collectives: each rank reads what it needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from autopar.errors import CheckpointError

from .boxes import Box, boxes_of, local_part
from .index import Entry, tensor_metadata
from .torch_storage import Reader

# A tensor, of which this rank may have a part, and its name in the checkpoint.
Target = tuple[str, torch.Tensor]


class BoxPlanner(LoadPlanner):
    """Plans to read the boxes of ``targets`` (name in the checkpoint -> tensor) that this rank holds."""

    def __init__(self, index: Mapping[str, Entry], targets: Mapping[str, torch.Tensor]) -> None:
        self._index = index
        self._boxes: dict[str, list[Box]] = {name: boxes_of(tensor, name) for name, tensor in targets.items()}
        self._local = {name: local_part(tensor) for name, tensor in targets.items()}

    def set_up_planner(
        self, state_dict: Mapping[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """All is known already."""

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for name, boxes in self._boxes.items():
            chunks = [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in boxes]
            items += create_read_items_for_chunk_list(name, tensor_metadata(self._index[name]), chunks)
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise CheckpointError("checkpoints of autopar have tensors alone, and nothing that is pickled")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        name, position = read_item.dest_index.fqn, read_item.dest_index.index
        target = self._boxes[name][position or 0].of(self._local[name])
        for dim, (begin, size) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, begin, size)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """The values were written into the tensor's own memory."""


def check_shape(index: Mapping[str, Entry], name: str, tensor: torch.Tensor) -> None:
    """Raises :class:`CheckpointError` if ``tensor`` has another shape than the checkpoint's tensor ``name``."""
    saved = index[name].shape
    if saved != tuple(tensor.shape):
        raise CheckpointError(
            f"{name} has shape {list(saved)} in the checkpoint, and {list(tensor.shape)} here: build the model "
            "with the sizes that were saved"
        )


def fill(reader: Reader, index: Mapping[str, Entry], targets: Sequence[Target]) -> None:
    """Fills each tensor of ``targets``, converted to its dtype. Raises :class:`CheckpointError` if one has another
    shape."""
    for name, tensor in targets:
        check_shape(index, name, tensor)
    waiting = list(targets)
    while waiting:  # In rounds, if several tensors take one value: weights that were tied and no longer are.
        now = dict(waiting)
        kept = {id(tensor) for tensor in now.values()}
        waiting = [(name, tensor) for name, tensor in waiting if id(tensor) not in kept]
        planner = BoxPlanner(index, now)
        with torch.no_grad():
            reader.read_data(planner.create_local_plan(), planner)
