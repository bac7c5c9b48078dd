"""The collectives as they are called for NCCL, run by gloo: they give what the forms chosen for gloo give."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh

from autopar.runtime.comm import gloo, nccl
from autopar.runtime.comm.groups import AxisGroup, mesh_groups
from autopar.runtime.launch import run_local
from tests.runtime.test_collectives import DTYPES


def _send(dtype: torch.dtype, group: AxisGroup) -> torch.Tensor:
    """[ranks, 2, 5] small whole numbers, whose sums are exact in every dtype; others on each rank."""
    generator = torch.Generator().manual_seed(group.index)
    return torch.randint(0, 2 if dtype == torch.bool else 6, (group.size, 2, 5), generator=generator).to(dtype)


def _differences(rank: int, world: int) -> list[str]:
    group = mesh_groups(init_device_mesh("cpu", (world,))).over((0,))
    wrong = []
    for dtype in (*DTYPES, torch.complex64):
        send = _send(dtype, group)
        ops = ("sum",) if dtype.is_complex else ("sum", "max", "min")
        pairs = {
            "all_to_all": (gloo.all_to_all(send, group), nccl.all_to_all(send, group)),
            "all_gather": (gloo.all_gather(send[0], group), nccl.all_gather(send[0], group)),
            **{f"all_reduce {op}": (gloo.all_reduce(send, op, group), nccl.all_reduce(send, op, group)) for op in ops},
            **{
                f"reduce_scatter {op}": (gloo.reduce_scatter(send, op, group), nccl.reduce_scatter(send, op, group))
                for op in ops
            },
        }
        for name, (finish, finish_native) in pairs.items():
            expected, result = finish(), finish_native()
            if result.dtype != dtype or not torch.equal(expected, result):
                wrong.append(f"{name} of {dtype}")
    return wrong


def test_the_forms_for_nccl_give_what_those_for_gloo_give() -> None:
    assert run_local(_differences, 3, timeout=120) == [[], [], []]
