"""What torchtitan's trainer reads from in :mod:`benchmarks.torchtitan_loop`: random tokens, each rank its rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer

from .token_batches import VOCABULARY, batch_of


class NoTokenizer(BaseTokenizer):  # type: ignore[misc]
    """Data are tokens already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):  # type: ignore[misc]
        def build(self, **further: Any) -> NoTokenizer:
            return NoTokenizer()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return VOCABULARY


class Ranks(BaseDataLoader):  # type: ignore[misc]
    """The rows of each global batch that a data rank trains on."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, **further: Any) -> None:
        self.ranks, self.rank = dp_world_size, dp_rank

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        step = 0
        while True:
            inputs, labels = (part.chunk(self.ranks)[self.rank] for part in batch_of(step))
            yield {"input": inputs}, labels
            step += 1

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass
