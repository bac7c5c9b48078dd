"""Models that read one row of each sample (a classifier of sequences) in stages and microbatches, and sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autopar


class Classifier(nn.Module):
    """The last valid token of each sequence decides; its positions count from the end where they are negative."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle, self.head = nn.Embedding(17, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, ids: torch.Tensor, last: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.middle(self.embed(ids)))
        pooled = hidden[torch.arange(len(ids)), last]
        return nn.functional.cross_entropy(self.head(pooled), labels)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ((1,), {"stages": 1, "microbatches": 2}),
        ((2,), {"stages": 2, "microbatches": 4}),
        ((2,), {"stages": 1}),
        ((2, 2), {"stages": 2, "microbatches": 2}),
    ],
)
def test_it_is_one_process(mesh: tuple[int, ...], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    batch = {
        "ids": torch.randint(0, 17, (8, 5)),
        "last": torch.tensor([4, 0, -1, 2, -5, 3, 1, -2]),
        "labels": torch.arange(8) % 3,
    }
    asked = autopar.Options(**options)
    report = autopar.verify(Classifier(), mesh, batch, options=asked, cluster="dgx-a100-80gb")
    assert report.ok and not report.unpriced, str(report)
    assert report.plan.microbatches == options.get("microbatches", 1)
