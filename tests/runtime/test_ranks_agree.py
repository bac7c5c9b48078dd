"""What one rank alone does or has: every rank gets an error, or all take the same way; none waits for the others."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.runtime.comm.groups import mesh_groups
from tests.helpers.planning import on


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.flag = nn.Linear(6, 10), nn.Linear(10, 4), False

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.a(x).tanh() if self.flag else self.a(x).relu()
        return nn.functional.cross_entropy(self.b(hidden), y)


def batch(size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    return torch.randn(size, 6, generator=source), torch.randint(0, 4, (size,), generator=source)


@pytest.mark.parametrize("check", ["first", pytest.param("never", marks=pytest.mark.slow)])
def test_an_attribute_changed_on_one_rank_before_a_batch_of_another_size(check: str) -> None:
    """No rank has a program for the call, and only some have a trace that holds."""

    def work(rank: int, world: int) -> None:
        model = autopar.parallelize(Net(), (2,), options=autopar.Options(check_inputs=check))  # type: ignore[arg-type]
        model.step(*batch())
        model.module.flag = rank == 1
        with pytest.raises(autopar.AutoparError, match=r"(?s)differ|runs other operations on rank 1"):
            model.step(*batch(6))
        model.module.flag = False
        assert torch.isfinite(model.step(*batch(6)))

    on(2, work)


def test_a_block_that_fails_on_one_rank_writes_nothing_back() -> None:
    def work(rank: int, world: int) -> None:
        model = autopar.parallelize(Net(), (2,))
        loss = model.step(*batch())
        with (
            pytest.raises(KeyError if rank == 1 else autopar.AutoparError, match=r"mine|on rank 1"),
            model.full_params(writeback=True) as whole,
        ):
            whole.a.weight.data.zero_()
            if rank == 1:
                raise KeyError("mine")
        with (
            pytest.raises(autopar.AutoparError, match=r"a.weight of shape|on rank 0"),
            model.full_params(writeback=True) as whole,
        ):
            if rank == 0:
                whole.a.weight = nn.Parameter(torch.ones(3, 3))
        torch.testing.assert_close(model.step(*batch()), loss)

    on(2, work)


def test_ranks_compare_at_the_same_calls() -> None:
    def work(rank: int, world: int) -> str:
        with pytest.raises(autopar.OptionsError, match="check_inputs: 'never' on rank 0; 'first' on rank 1") as raised:
            autopar.parallelize(Net(), (2,), options=autopar.Options(check_inputs="first" if rank else "never"))
        return str(raised.value)

    assert len(set(on(2, work))) == 1


def test_meshes_of_the_same_ranks_share_one_group_through_cpus() -> None:
    def work(rank: int, world: int) -> None:
        groups = mesh_groups(init_device_mesh("cpu", (2, 1)))
        group = groups.through_cpus()
        assert groups.regrouped((1, 2)).through_cpus() is group
        assert mesh_groups(init_device_mesh("cpu", (2,))).through_cpus() is group
        model = autopar.parallelize(Net(), (2,))
        if rank == 0:
            copy.deepcopy(model)  # On one rank alone: it makes no group.

    on(2, work)


def test_a_staged_model_called_by_keyword_and_by_position() -> None:
    def work(rank: int, world: int) -> None:
        options = autopar.Options(stages=2, microbatches=2)
        model = autopar.parallelize(Net(), (2,), options=options)
        x, y = batch()
        loss = model.step(x=x, y=y)
        for again in (model.step(x, y), model.step(x, y=y), model.step(y=y, x=x)):
            torch.testing.assert_close(again, loss)

    on(2, work)
