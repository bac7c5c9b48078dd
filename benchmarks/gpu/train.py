"""The part ``train``: steps of models in bf16 (:mod:`.models`), beside eager and torch's own parallelisms.

A step is forward, backward and AdamW (fused) on the same batch. Weights, gradients and the optimizer's state are
float32; products are bf16: by ``precision="bf16"`` (autopar), autocast (eager, ``torch.compile``, DDP, TP) or FSDP2's
policy for mixed precision. On one device each variant has it alone; on several, the batch is that many times as large,
and eager and TP, which compute all of it on each, accumulate gradients over slices.
Losses of the first steps must be eager's within 1%: bf16 rounds by 0.4%, at other places in each variant.

Step time is the mean of back-to-back steps by the device's clock, on the slowest rank, after warm-up. MFU counts the
operations of the model (:func:`.models.flops`), not recomputation, against the described peak of the device. The peak
of memory is ``torch.cuda.max_memory_allocated`` in one step, less what was allocated before the model; the predicted
one is the plan's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import autopar
from autopar.calibration.default_cluster import default_cluster

from .models import LANGUAGE, TRAINED, make_batch, make_model, model_flops
from .setting import Row, Setting

LEARNING_RATE = 1e-4
# Steps before the clock, which compile and fill the allocator, and whose losses are compared.
WARMUP = 4
# Steps on the clock. Chosen: of 100 ms or more each.
STEPS, TINY_STEPS = 10, 2
Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Running:
    """A variant that runs: its step, which returns the mean loss of this rank's rows, and the plan, if it has one."""

    step: Callable[[], Tensor]
    plan: autopar.Plan | None = None


def cases(setting: Setting) -> list[str]:
    """Eager is first: its losses are what the others must have."""
    beside = ("torch.compile", "FSDP2") if setting.world == 1 else ("DDP", "FSDP2", "TP")
    variants = ("eager", "autopar", "autopar compiled", *beside)
    return [f"{m} {v}" for m in TRAINED for v in variants if v != "TP" or m == "llama"]


def run(case: str, setting: Setting) -> list[Row]:
    """One row: what a variant of a model takes."""
    name, _, variant = case.partition(" ")
    before = setting.bytes_now()
    start = time.perf_counter()
    model = make_model(name, setting)
    batch = make_batch(name, setting)
    work, rows = (
        model_flops(name, model, batch),
        batch["input_ids"].numel() if name in LANGUAGE else len(batch["labels"]),
    )
    running = make(variant, model, batch, setting)
    del model
    losses = [running.step() for _ in range(WARMUP)]
    setting.synchronise()
    ready = time.perf_counter() - start
    setting.bytes_now()
    running.step()
    peak = setting.peak_bytes() - before
    seconds = _slowest(setting.seconds(running.step, TINY_STEPS if setting.tiny else STEPS), setting)
    row: Row = {
        "case": case,
        "losses": [float(_mean(loss)) for loss in losses],
        "ready_seconds": ready,
        "step_seconds": seconds,
        "rows_per_second": rows / seconds,
        "mfu": None if work is None else work / seconds / (_peak_flops(setting) * setting.world),
        "peak_bytes": int(peak),
    }
    if running.plan is not None:
        predicted = running.plan.predicted
        row |= {"predicted_seconds": predicted.step_seconds, "predicted_bytes": predicted.peak_bytes}
        row |= {"plan": f"{running.plan.mesh}", "warnings": list(running.plan.warnings)}
    return [row]


def _peak_flops(setting: Setting) -> float:
    cluster = default_cluster(setting.kind, setting.world)
    return cluster.device.flops(torch.bfloat16 if setting.kind == "cuda" else torch.float32)


def _mean(loss: Tensor) -> Tensor:
    """The mean over ranks."""
    total = loss.detach().double()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def _slowest(seconds: float, setting: Setting) -> float:
    found = torch.tensor(seconds, dtype=torch.float64, device=setting.device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def _adamw(parameters: Any, setting: Setting) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=setting.kind == "cuda")


def make(variant: str, model: nn.Module, batch: Batch, setting: Setting) -> Running:
    """The step of a variant of ``model``, which is moved to the device."""
    if variant.startswith("autopar"):
        return _autopar(model, batch, setting, compiled=variant == "autopar compiled")
    model = model.to(setting.device)
    slices = [{n: v.chunk(setting.world)[index] for n, v in batch.items()} for index in range(setting.world)]
    own = slices[dist.get_rank() : dist.get_rank() + 1]
    match variant:
        case "torch.compile":
            return _torch(torch.compile(model), slices, setting)
        case "DDP":
            return _torch(DistributedDataParallel(model), own, setting)
        case "FSDP2":
            return _torch(_fsdp(model, setting), own, setting, autocast=False)
        case "TP":
            return _torch(_tp(model, setting), slices, setting)
    return _torch(model, slices, setting)


def _torch(model: Any, slices: Sequence[Batch], setting: Setting, *, autocast: bool = True) -> Running:
    """Steps on equal ``slices`` of a batch, one after the other: all of several devices' would not fit into one."""
    optimizer = _adamw(model.parameters(), setting)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=setting.device)
        for batch in slices:
            with torch.autocast(setting.kind, torch.bfloat16, enabled=autocast):
                loss = model(**batch).loss / len(slices)
            loss.backward()
            total = total + (loss.full_tensor() if isinstance(loss, DTensor) else loss).detach()
        optimizer.step()
        return total

    return Running(step)


def _autopar(model: nn.Module, batch: Batch, setting: Setting, *, compiled: bool) -> Running:
    options = autopar.Options(precision="bf16", compile=compiled)
    mesh = init_device_mesh(setting.kind, (setting.world,))
    parallel = autopar.parallelize(model, mesh, example_inputs=dict(batch), options=options)
    optimizer = parallel.optimizer(torch.optim.AdamW, lr=LEARNING_RATE, fused=setting.kind == "cuda")

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = parallel.step(**batch)
        optimizer.step()
        return loss

    return Running(step, parallel.plan)


def _layers(model: Any) -> Any:
    """The longest list of modules: the layers of a language model, the stages of a network of convolutions."""
    return max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=len)


def _fsdp(model: nn.Module, setting: Setting) -> nn.Module:
    mesh = init_device_mesh(setting.kind, (setting.world,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in _layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def _tp(model: nn.Module, setting: Setting) -> nn.Module:
    """Megatron's plan of a Llama: column then row in attention and in the feed-forward, vocabulary split at the end."""
    plan: dict[str, ParallelStyle] = {"lm_head": ColwiseParallel(output_layouts=Replicate())}
    for index in range(len(_layers(model))):
        block = f"model.layers.{index}"
        plan |= {f"{block}.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        plan |= {f"{block}.mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
        plan |= {f"{block}.self_attn.o_proj": RowwiseParallel(), f"{block}.mlp.down_proj": RowwiseParallel()}
    return parallelize_module(model, init_device_mesh(setting.kind, (setting.world,)), plan)
