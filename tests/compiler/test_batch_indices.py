"""Example batches with ids and labels that the model does not have are planned for with a warning."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import autopar


class Model(nn.Module):
    """An embedding, a head, and a loss that is shifted as in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 7)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        shifted = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
        return nn.functional.cross_entropy(self.head(self.embed(ids)).flatten(0, 1), shifted.flatten())


def said(ids: torch.Tensor, labels: torch.Tensor, **more: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        autopar.plan(Model(), (2,), {"ids": ids, "labels": labels}, cluster="dgx-a100-80gb", **more)
    return [str(each.message) for each in caught]


def batch(most_id: int = 10, most_label: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    ids, labels = torch.zeros(2, 4, 3, dtype=torch.int64)
    ids[1, 2], labels[2, 1], labels[3] = most_id, most_label, -100
    return ids, labels


@pytest.mark.parametrize(
    ("ids", "labels", "found"),
    [
        (10, 6, []),
        (11, 6, ["embed looks up index 11 of the input 'ids', but embed.weight has 11 rows"]),
        (-1, 6, ["embed looks up index -1 of the input 'ids'"]),
        (10, 7, ["looks up index 7 of the input 'labels', but 7 classes"]),
    ],
)
def test_what_is_out_of_range_is_warned_of(ids: int, labels: int, found: list[str]) -> None:
    heard = said(*batch(ids, labels))
    assert len(heard) == len(found)
    assert all(text in each for text, each in zip(found, heard, strict=True))


def test_what_has_no_values_is_not_read() -> None:
    assert said(*(torch.empty(4, 3, dtype=torch.int64, device="meta") for _ in range(2))) == []


def test_a_label_that_is_shifted_away_is_not_looked_up() -> None:
    ids, labels = batch()
    labels[0, 0] = 99
    assert said(ids, labels) == []
