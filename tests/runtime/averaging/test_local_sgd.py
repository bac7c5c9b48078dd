"""Local SGD against replicas in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autopar import LocalSGD
from tests.runtime.averaging.training import Exchange, assert_same, batches, simulated, trained


def mean_every(every: int, buffers: bool = False) -> Exchange:
    def exchange(models: list[nn.Module], step: int) -> None:
        if step % every == 0:
            for group in zip(*(model.parameters() for model in models), strict=True):
                mean = torch.stack(list(group)).mean(0)
                for parameter in group:
                    parameter.copy_(mean)
            for group in zip(*(model.buffers() for model in models), strict=True):
                if buffers and group[0].is_floating_point():
                    mean = torch.stack(list(group)).mean(0)
                    for buffer in group:
                        buffer.copy_(mean)

    return exchange


@pytest.mark.parametrize(
    "mesh, options",
    [
        ((2,), {}),
        pytest.param((4,), {}, marks=pytest.mark.slow),
        ((2, 2), {"pins": {"middle.weight": "S(0)"}, "mesh_search": False}),
        pytest.param((2, 2), {"zero": 3}, marks=pytest.mark.slow),
        pytest.param((2, 2), {"zero": 1}, marks=pytest.mark.slow),
        pytest.param((2, 2), {"stages": 2, "microbatches": 1}, marks=pytest.mark.slow),
    ],
)
def test_the_mean_of_all_replicas_every_third_step(mesh: tuple[int, ...], options: dict[str, Any]) -> None:
    found = trained(LocalSGD(every=3), mesh, data := batches(8, rows=2 * mesh[0] + 3), **options)
    assert_same(found, simulated(mean_every(3), mesh[0], data))
    assert not torch.equal(found[0]["inside.weight"], found[1]["inside.weight"])
