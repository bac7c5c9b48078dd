"""The part ``messages``: each collective of the runtime through real NCCL, in each dtype that is sent, against the
same done by hand. Also for one process: NCCL then copies, and its checks of dtypes and operands are the same."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.runtime.comm import gloo, nccl
from autopar.runtime.comm.groups import AxisGroup

from .setting import Row, Setting

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
OPS = ("sum", "avg", "max", "min", "product")
DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int8, torch.uint8,
    torch.bool, torch.complex64,
)  # fmt: skip


def cases(setting: Setting) -> list[str]:
    return list(KINDS)


def run(case: str, setting: Setting) -> list[Row]:
    """A row for one kind: how many calls were right, and what was wrong."""
    group = AxisGroup(dist.group.WORLD, dist.get_world_size(), dist.get_rank(), setting.kind, axes=(0,))
    wrong, count = [], 0
    for dtype in DTYPES:
        for op in OPS if case in ("all_reduce", "reduce_scatter") else ("",):
            if dtype.is_complex and op not in ("", "sum"):
                continue
            count += 1
            try:
                found, expected = _exchanged(case, op, dtype, group, setting)
                if not torch.allclose(found.cpu().to(torch.complex128), expected.to(torch.complex128), rtol=1e-2):
                    wrong.append(f"{dtype} {op}: {found.flatten()[:4].tolist()}, not {expected.flatten()[:4].tolist()}")
            except RuntimeError as error:
                wrong.append(f"{dtype} {op}: {type(error).__name__}: {str(error)[:200]}")
    return [{"case": case, "calls": count, "wrong": wrong, "equal": not wrong}]


def _operand(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """What a rank sends, [size, 3, 2]: small whole numbers."""
    numbers = torch.arange(size * 6).reshape(size, 3, 2) % 3 + rank % 2
    return numbers.to(dtype) if dtype != torch.bool else numbers % 2 == 0


def _exchanged(kind: str, op: str, dtype: torch.dtype, group: AxisGroup, setting: Setting) -> tuple[Tensor, Tensor]:
    exchange = nccl if group.backend == "nccl" else gloo
    everyone = torch.stack([_operand(rank, group.size, dtype) for rank in range(group.size)])
    own = everyone[group.index].to(setting.device)
    if kind == "all_gather":
        return exchange.all_gather(own, group)(), everyone
    if kind == "all_to_all":
        return exchange.all_to_all(own, group)(), everyone[:, group.index]
    reduced = gloo.reduce_pieces(everyone, _as_reduced(op, dtype))
    if kind == "all_reduce":
        return exchange.all_reduce(own, op, group)(), reduced
    return exchange.reduce_scatter(own, op, group)(), reduced[group.index]


def _as_reduced(op: str, dtype: torch.dtype) -> str:
    """Integers are not averaged (autopar/runtime/comm/nccl.py)."""
    return "sum" if op == "avg" and not dtype.is_floating_point else op
