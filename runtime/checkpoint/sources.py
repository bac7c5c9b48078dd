"""Named tensors in files, from which a model takes its values: a checkpoint, or a folder of safetensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from .fill import Target, fill
from .index import Index
from .stores import Store
from .torch_storage import Reader


class Source:
    """The tensors of ``index`` whose names begin with ``prefix``; ``tied``: other names of some, without the prefix."""

    def __init__(self, store: Store, index: Index, tied: Mapping[str, str], prefix: str = "") -> None:
        self._store, self.index, self._tied, self.prefix = store, index, tied, prefix
        self._reader = Reader(store, index)

    def __str__(self) -> str:
        return str(self._store)

    @property
    def names(self) -> list[str]:
        """The names in the index."""
        return [name for name in self.index if name.startswith(self.prefix)]

    def find(self, names: Sequence[str]) -> str | None:
        """The name in the index of a tensor that a model calls by any of ``names``, or None."""
        for name in names:
            for candidate in (name, self._tied.get(name)):
                if candidate is not None and f"{self.prefix}{candidate}" in self.index:
                    return f"{self.prefix}{candidate}"
        return None

    def fill(self, found: str, tensor: torch.Tensor) -> None:
        """Fills this rank's part of ``tensor`` from that of the name ``found``. Raises :class:`CheckpointError` for
        another shape."""
        self.fill_all([(found, tensor)])

    def fill_all(self, targets: Iterable[Target]) -> None:
        """:meth:`fill` of several."""
        fill(self._reader, self.index, list(targets))
