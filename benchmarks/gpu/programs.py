"""The part ``programs``: the programs of all ranks of multi-rank plans, in one process on one device, against eager.

Each model of the zoo below is planned on a mesh (2, 2), as it is cheapest and so that everything is sharded. The ranks'
programs run in lockstep, with collectives done by hand (:class:`tests.helpers.simulate.World`): every local operation
runs as a rank of a cluster would run it, on shards of the same shapes and strides. Loss and every gradient are compared
with eager execution on the same device, in float32 and under bf16.

An error is max|a - b|, relative to the largest element of the gradient or, if that is more, to a hundredth of the
largest of all gradients. It may be 1e-4 in float32 and 4e-2 under bf16, or four times eager's own error under bf16,
which is known from eager execution in float32.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from autopar.arguments import split_batch
from autopar.errors import AutoparError
from autopar.ir.graph import Graph
from autopar.passes.annotate.annotate import annotate
from autopar.placement.prices import Prices
from autopar.planner.prepare import Prepared, prepare
from autopar.planner.step_graphs import step_graph
from autopar.precision import Precision
from autopar.torch_internals.trees import tree_leaves, tree_map
from benchmarks.zoo import configurations, solved
from tests.helpers.eager_draws import STATE
from tests.helpers.simulate import World
from tests.zoo.check import programs, tangents
from tests.zoo.models import ZOO

from .setting import Row, Setting

MESH = (2, 2)
MODELS = (
    "gpt2", "llama", "bert", "vit", "resnet", "mixtral", "t5", "gemma2", "mamba", "swin", "convnext", "qwen2_moe",
    "whisper", "unet",
)  # fmt: skip
TINY_MODELS = ("gpt2",)
# What an error may be, see above. Chosen: a thousand units of float32's rounding (1.2e-7), since kernels for GPUs add
# in other orders and by atomics; for bf16 ten units (3.9e-3).
TOLERANCES: Mapping[Precision, float] = {"fp32": 1e-4, "bf16": 4e-2}
# Both sides have an error (autopar/verification/tolerance.py, APART).
_APART = 4.0
# The part of the largest gradient below which a gradient's size does not count: those that are zero but for rounding.
# Chosen: two digits.
_FLOOR = 1e-2
Values = dict[str, Tensor]


def cases(setting: Setting) -> list[str]:
    return [f"{name} {p}" for name in (TINY_MODELS if setting.tiny else MODELS) for p in TOLERANCES]


def run(case: str, setting: Setting) -> list[Row]:
    """A row for each plan of one model under one precision."""
    name, precision = case.split(" ")
    model, batch = ZOO[name]()
    model = model.train()
    args, kwargs = split_batch(batch)
    policy: Precision = "bf16" if precision == "bf16" else "fp32"
    base = prepare(model, args, kwargs, device="cpu", loss_fn=None, training=True, precision=policy)
    expected, own = references(model, args, kwargs, policy, setting.device)
    values = placeholders(base, model, args, kwargs)
    rows = []
    for kind, graph, world in worlds(base, policy, setting.device):
        row: Row = {"case": f"{case} {kind}"}
        try:
            results, gradients = world.step(values, tangents(graph))
            found = {"loss": results[str(base.loss)], **gradients}
            row |= compare(found, expected, own, TOLERANCES[policy])
        except (AutoparError, AssertionError, RuntimeError) as error:
            row["error"] = f"{type(error).__name__}: {str(error)[:500]}"
            if poisoned(error):
                raise
        rows.append(row)
    return rows


def poisoned(error: BaseException) -> bool:
    """Whether the device can do nothing more for this process."""
    return "CUDA error" in str(error) or "device-side assert" in str(error)


def worlds(base: Prepared, precision: Precision, device: torch.device) -> Iterator[tuple[str, Graph, World]]:
    """The plans of a trace, and their ranks."""
    annotated = annotate(step_graph(base.graph, base.loss, base.batch), MESH)
    apart = (TOLERANCES[precision], TOLERANCES[precision])
    for kind, (cluster, options) in configurations().items():
        prices = Prices.of(cluster, MESH, annotated)
        assignment = solved(annotated, prices, options)
        yield kind, annotated, World(programs(annotated, assignment, prices), device, apart)


def placeholders(base: Prepared, model: nn.Module, args: Any, kwargs: Any) -> Values:
    """The values of the step's placeholders, by name."""
    names = zip(base.traced.signature.input_names, tree_leaves((args, kwargs)), strict=True)
    values = {n: v.detach().clone() for n, v in (*_named_parameters(model), *model.named_buffers())}
    return {**values, **{name: value for name, value in names if name is not None}, "random": STATE}


def _named_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)


def references(
    model: nn.Module, args: Any, kwargs: Any, precision: Precision, device: torch.device
) -> tuple[Values, Values]:
    """Eager execution on the device under ``precision``, and in float32: the loss and gradients by name."""
    exact = eager(model, args, kwargs, "fp32", device)
    return (exact if precision == "fp32" else eager(model, args, kwargs, precision, device)), exact


def eager(model: nn.Module, args: Any, kwargs: Any, precision: Precision, device: torch.device) -> Values:
    own = copy.deepcopy(model).to(device)
    args, kwargs = tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, (args, kwargs))
    with torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext():
        output = own(*args, **kwargs)
    loss = loss_of(output)
    loss.backward()
    gradients = {n: p.grad.detach().cpu() for n, p in own.named_parameters() if p.grad is not None}
    return {"loss": loss.detach().cpu(), **gradients}


def loss_of(output: Any) -> Tensor:
    """The loss that a model returns, under its name or as the only number with a gradient."""
    loss = getattr(output, "loss", None)
    numbers = (x for x in tree_leaves(output) if isinstance(x, Tensor) and x.ndim == 0 and x.requires_grad)
    found: Tensor = next(numbers) if loss is None else loss
    return found


def compare(found: Mapping[str, Tensor], expected: Values, exact: Values, tolerance: float) -> Row:
    """The largest error, where it is, and what it may be there; of several, the one that is most beyond."""
    largest = max((float(g.abs().max()) for n, g in expected.items() if n != "loss" and g.numel()), default=0.0)
    worst: Row = {"error_found": 0.0, "allowed": tolerance, "at": "", "compared": 0}
    for name, value in expected.items():
        if name not in found:
            raise AssertionError(f"the program computes no gradient of {name}")
        size = float(value.abs().max()) if value.numel() else 0.0
        size = max(size, 0.0 if name == "loss" else _FLOOR * largest) or 1.0
        error = _distance(found[name], value) / size
        allowed = max(tolerance, _APART * _distance(value, exact[name]) / size)
        worst["compared"] += 1
        if not error / allowed <= worst["error_found"] / worst["allowed"]:
            worst |= {"error_found": error, "allowed": allowed, "at": name}
    return {**worst, "equal": worst["error_found"] <= worst["allowed"]}


def _distance(left: Tensor, right: Tensor) -> float:
    """max|a - b|; infinite where only one is a number."""
    apart = (left.double().cpu() - right.double().cpu()).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    return float(apart.max()) if left.numel() else 0.0
