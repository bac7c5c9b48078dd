"""Meshes that planning must not arrange anew: refused at once, or planned on as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar import Options
from autopar.compiler.fixed_axes import with_fixed_axes
from autopar.errors import OptionsError
from autopar.runtime.comm.groups import mesh_groups
from tests.helpers.marks import needs_groups_in_order
from tests.helpers.planning import on, slow_devices


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))


def mean(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


@needs_groups_in_order
def test_a_transposed_mesh_is_planned_on_as_it_is_or_refused_at_once() -> None:
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    on_a_line = autopar.plan(
        model(), (4,), (x,), loss_fn=mean, cluster=slow_devices(), options=Options(stages=1, mesh_search=False)
    )
    assert on_a_line.mesh == (4,)

    def work(rank: int, world: int) -> None:
        mesh = DeviceMesh("cpu", torch.tensor([[0, 2], [1, 3]]))

        def parallel(**given: Any) -> autopar.ParallelModule:
            return autopar.parallelize(model(), mesh, loss_fn=mean, cluster=slow_devices(), **given)

        usual = mesh_groups(DeviceMesh("cpu", torch.arange(4).reshape(2, 2)))
        assert with_fixed_axes(Options(stages=4), None, usual) == Options(stages=4)
        assert not with_fixed_axes(Options(), None, mesh_groups(mesh)).mesh_search
        # Nothing has been planned yet, since there was no batch.
        with pytest.raises(OptionsError, match=r"stages=4 needs the devices on a mesh \(4, 1\).*order them"):
            parallel(options=Options(stages=4, microbatches=4))
        with pytest.raises(OptionsError, match=r"the plan for the mesh \(4,\) needs the devices on a mesh \(4,\)"):
            parallel(plan=on_a_line)
        wanted = mean(model()(x)).detach()
        for options in (Options(), Options(stages=2, microbatches=2)):
            torch.testing.assert_close(parallel(options=options).step(x), wanted)

    on(4, work)
