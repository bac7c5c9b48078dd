"""A small model, its steps by autopar and by torch alone, and how far they are apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.calibration.default_cluster import default_cluster

from .setting import Row, Setting

STEPS = 3
SGD: Mapping[str, Any] = {"lr": 0.05, "momentum": 0.9}
VOCABULARY, WIDTH, LAYERS, HEADS, LENGTH, ROWS = 515, 128, 3, 4, 48, 8
Batch = Mapping[str, Tensor]


def small(dropout: float = 0.0) -> nn.Module:
    """A GPT-2 of odd sizes."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=2 * LENGTH, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def a_batch(setting: Setting, rows: int = ROWS) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCABULARY, (rows, LENGTH), generator=generator).to(setting.device)
    return {"input_ids": ids, "labels": ids}


def parallel(setting: Setting, model: nn.Module | None = None, **options: Any) -> autopar.ParallelModule:
    mesh = init_device_mesh(setting.kind, (1,))
    given = {"compile": False, "seed": 0, **options}
    return autopar.parallelize(model or small(), mesh, options=autopar.Options(**given), cluster=with_host(setting))


def with_host(setting: Setting) -> autopar.Cluster:
    """The devices as they are priced, with host memory and a disk to offload to."""
    cluster = default_cluster(setting.kind, 1)
    host = replace(cluster.device, host_bandwidth=20e9, host_memory_bytes=2**36)
    disk = replace(host, nvme_read_bandwidth=1e9, nvme_write_bandwidth=1e9, nvme_bytes=2**36)
    return replace(cluster, device=disk)


def trained(module: Any, optimizer: torch.optim.Optimizer, batch: Batch, steps: int = STEPS) -> dict[str, Tensor]:
    """Losses, and weights after ``steps``, by name, on the processor."""
    losses = {}
    for index in range(steps):
        optimizer.zero_grad()
        losses[f"loss {index}"] = module.step(**batch).detach().clone()
        optimizer.step()
    return {n: module.full_tensor(v).detach().cpu() for n, v in (*losses.items(), *module.named_parameters())}


def run_autopar(
    setting: Setting, batch: Batch, model: nn.Module | None = None, *, adam: bool = False, **options: Any
) -> dict[str, Tensor]:
    """By SGD, whose steps differ no more than gradients do, or by AdamW where numbers are equal to the bit."""
    module = parallel(setting, model, optimizer="adamw" if adam else "momentum", **options)
    optimizer = module.optimizer(torch.optim.AdamW, lr=1e-3) if adam else module.optimizer(torch.optim.SGD, **SGD)
    return trained(module, optimizer, batch)


def run_eager(
    setting: Setting, batch: Batch, precision: str = "fp32", steps: int = STEPS, *, adam: bool = False
) -> dict[str, Tensor]:
    model = small().to(setting.device)
    weights = model.parameters()
    optimizer = torch.optim.AdamW(weights, lr=1e-3) if adam else torch.optim.SGD(weights, **SGD)
    scaler = torch.amp.GradScaler(setting.kind, enabled=precision == "fp16")
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    losses = {}
    for index in range(steps):
        optimizer.zero_grad()
        with torch.autocast(setting.kind, dtype, enabled=precision != "fp32"):
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses[f"loss {index}"] = loss.detach().clone()
    return {n: v.detach().cpu() for n, v in (*losses.items(), *model.named_parameters())}


def compared(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float) -> Row:
    """The largest error relative to the largest element, and where; ``tolerance`` 0: equal to the bit."""
    worst = (0.0, "")
    for name, value in expected.items():
        size = float(value.double().abs().max()) or 1.0
        error = float((found[name].double() - value.double()).abs().max()) / size
        worst = max(worst, (error if error == error else float("inf"), name))
    return {"error_found": worst[0], "allowed": tolerance, "at": worst[1], "compared": len(expected),
            "equal": worst[0] <= tolerance}  # fmt: skip


def losses_of(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without weights: a step of Adam is of the size of the learning rate also where a gradient is rounding."""
    return {name: value for name, value in values.items() if name.startswith("loss ")}
