"""The ways to train one Llama on four processes that are compared: torch's own, and autopar.

Each variant is a function of a model and a global batch (int64 [batch, sequence]), which parallelises the
model and returns what one training step is: zero gradients, forward, backward, AdamW. All use the same
optimizer with the same options.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaForCausalLM

import autopar
from autopar.runtime import ParallelModule

Batch = Mapping[str, torch.Tensor]
Step = Callable[[], torch.Tensor]
Variant = Callable[[LlamaForCausalLM, Batch, str], Step]

LEARNING_RATE = 1e-3


def adamw(parameters: list[nn.Parameter]) -> torch.optim.AdamW:
    """The optimizer of every variant; one tensor at a time, as torch itself chooses on a CPU."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, foreach=False)


def slice_of(batch: Batch, index: int, count: int) -> dict[str, torch.Tensor]:
    """Piece ``index`` of ``count`` of the global batch."""
    return {name: value.chunk(count)[index] for name, value in batch.items()}


def training_step(model: nn.Module, batch: Batch) -> Step:
    """The ordinary loop body around a model whose parameters are in place."""
    optimizer = adamw(list(model.parameters()))

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(**batch).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def single_process(model: LlamaForCausalLM, batch: Batch, device: str) -> Step:
    """No parallelism: every process does everything."""
    return training_step(model, batch)


def ddp(model: LlamaForCausalLM, batch: Batch, device: str) -> Step:
    """Replicated weights, gradients summed in buckets."""
    local = slice_of(batch, dist.get_rank(), dist.get_world_size())
    return training_step(DistributedDataParallel(model), local)


def shard_fully(model: LlamaForCausalLM, mesh: DeviceMesh) -> LlamaForCausalLM:
    """FSDP2 as its documentation has it: each block, then the root."""
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def fsdp(model: LlamaForCausalLM, batch: Batch, device: str) -> Step:
    """Weights sharded over all processes."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    return training_step(shard_fully(model, mesh), slice_of(batch, dist.get_rank(), dist.get_world_size()))


def hsdp(model: LlamaForCausalLM, batch: Batch, device: str) -> Step:
    """Weights sharded over pairs, replicated over two pairs."""
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("replicate", "shard"))
    return training_step(shard_fully(model, mesh), slice_of(batch, dist.get_rank(), 4))


def shard_heads(model: LlamaForCausalLM, mesh: DeviceMesh) -> LlamaForCausalLM:
    """Megatron's plan: column then row in attention and in the feed-forward, vocabulary split at the end."""
    plan: dict[str, ParallelStyle] = {
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    for index in range(len(model.model.layers)):
        block = f"model.layers.{index}"
        plan |= {f"{block}.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        plan |= {f"{block}.mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
        plan |= {f"{block}.self_attn.o_proj": RowwiseParallel(), f"{block}.mlp.down_proj": RowwiseParallel()}
    parallelize_module(model, mesh, plan)
    return model


def tp(model: LlamaForCausalLM, batch: Batch, device: str) -> Step:
    """Every product split over all processes, the batch whole."""
    return training_step(shard_heads(model, init_device_mesh(device, (dist.get_world_size(),))), batch)


def fsdp_tp(model: LlamaForCausalLM, batch: Batch, device: str) -> Step:
    """Products split over pairs, weights sharded across the pairs."""
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("dp", "tp"))
    model = shard_fully(shard_heads(model, mesh["tp"]), mesh["dp"])
    return training_step(model, slice_of(batch, mesh["dp"].get_local_rank(), 2))


def autopar_solved(model: LlamaForCausalLM, batch: Batch, device: str) -> Step:
    """The one call on a 2 x 2 mesh, whatever plan it finds."""
    mesh = init_device_mesh(device, (2, 2))
    return parallel_step(autopar.parallelize(model, mesh, example_inputs=dict(batch)), batch)


def parallel_step(parallel: ParallelModule, batch: Batch) -> Step:
    """The training step of what ``autopar.parallelize`` returned."""
    optimizer = parallel.optimizer(torch.optim.AdamW, lr=LEARNING_RATE, foreach=False)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = parallel.step(**batch)
        optimizer.step()
        return loss.detach()

    return step


TORCH_VARIANTS: Mapping[str, Variant] = {
    "DDP": ddp,
    "FSDP2": fsdp,
    "FSDP2 as HSDP 2x2": hsdp,
    "TP": tp,
    "FSDP2 x TP 2x2": fsdp_tp,
}
VARIANTS: Mapping[str, Variant] = {**TORCH_VARIANTS, "autopar 2x2": autopar_solved}
