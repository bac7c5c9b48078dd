"""Whether the ranks' GPUs are those that a plan can run on: errors that name the ranks and what they have."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from autopar.errors import OptionsError, PlanMismatchError

from .minority import minority, named

# The oldest GPUs with units for bfloat16: Ampere (CUDA C++ Programming Guide, "Arithmetic Instructions").
_BF16_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class Gpu:
    """A rank's GPU: its name, bytes of memory, and compute capability (of AMD's GPUs, what torch says)."""

    name: str
    memory: int
    capability: tuple[int, int]

    @staticmethod
    def of(device: torch.device) -> Gpu:
        found = torch.cuda.get_device_properties(device)
        return Gpu(found.name, int(found.total_memory), (int(found.major), int(found.minor)))

    def __str__(self) -> str:
        return f"{self.name} ({self.memory / 2**30:.1f} GiB)"


def require_nccl() -> None:
    """Raises :class:`OptionsError` where torch has GPUs, but no NCCL for them."""
    if not dist.is_nccl_available():
        raise OptionsError(
            f"there are GPUs here, but torch {torch.__version__} was built without NCCL, by which the ranks' programs "
            "communicate: install a build of torch for Linux and CUDA, or hide the GPUs (CUDA_VISIBLE_DEVICES=) to run "
            "on processors"
        )


def own_gpu() -> int:
    """The index of the GPU of this process: that of its local rank, or the only one it sees, if the launcher gives each
    process its own. Raises :class:`OptionsError` if there is none."""
    rank, visible = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if rank < visible:
        return rank
    if visible == 1 and "CUDA_VISIBLE_DEVICES" in os.environ:
        return 0
    raise OptionsError(
        f"the process of local rank {rank} sees {visible} GPU{'s' if visible > 1 else ''}: start at most as many "
        f"processes on this host (torchrun --nproc-per-node {visible}), or hide the GPUs (CUDA_VISIBLE_DEVICES=) to "
        "run on processors"
    )


def check_gpus(gpus: Sequence[Gpu], ranks: Sequence[int], precision: str | None, peak: int | None) -> None:
    """Checks the GPUs of ``ranks``. ``precision``: the policy; ``peak``: predicted bytes of a rank, if there is a plan.

    Raises :class:`OptionsError` if they differ from each other, or are too old for the policy, and
    :class:`PlanMismatchError` if the plan needs more memory than they have.
    """
    odd, others = minority([(gpu.name, round(gpu.memory / 2**30)) for gpu in gpus])
    if odd:
        raise OptionsError(
            f"{_what(gpus, ranks, odd)}, but {_what(gpus, ranks, others)}: a plan divides work among equal devices, so "
            "start the job on GPUs of one kind"
        )
    gpu = gpus[0]
    if precision == "bf16" and torch.version.hip is None and gpu.capability < _BF16_CAPABILITY:
        raise OptionsError(
            f'precision="bf16" needs GPUs of compute capability {_dotted(_BF16_CAPABILITY)} or above (Ampere), but '
            f'{gpu} has {_dotted(gpu.capability)}, with units for float16 and float32: use precision="fp16"'
        )
    if peak is not None and peak > gpu.memory:
        raise PlanMismatchError(
            f"the plan needs {peak / 2**30:.1f} GiB on each device, but each rank has {gpu}: plan for "
            f"Options(memory_limit={gpu.memory * 9 // 10}), or for this cluster by its name"
        )


def _what(gpus: Sequence[Gpu], ranks: Sequence[int], places: Sequence[int]) -> str:
    """Which ranks have what."""
    have = ", ".join(dict.fromkeys(str(gpus[place]) for place in places))
    return f"{named([ranks[place] for place in places])} {'has' if len(places) == 1 else 'have'} {have}"


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
