"""Checks a plan by running it: executes it on local processes and compares the loss and every gradient with one
process."""

from __future__ import annotations

import copy
import math
import time
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autopar.api import LossFunction, Mesh, mesh_shape
from autopar.arguments import Batch, check_model
from autopar.cluster.description import Cluster
from autopar.errors import OptionsError
from autopar.keywords import suggests
from autopar.options import Options
from autopar.planner.options_of_plan import options_under
from autopar.plans.plan import Plan
from autopar.runtime.launch import run_local

from .report import Report, judge
from .steps import Task, is_double, one_process, parallel_step
from .tolerance import Closeness


@suggests
def verify(
    model: nn.Module,
    mesh: Mesh,
    batch: Batch,
    *,
    options: Options | None = None,
    cluster: str | Cluster | None = None,
    loss_fn: LossFunction | None = None,
    plan: Plan | None = None,
    steps: int = 1,
    timeout: float = 300.0,
    tolerance: float | None = None,
    targets: Any = None,
) -> Report:
    """Runs training steps of ``model`` on prod(mesh) local processes and on one, and compares them.

    The model is not changed. A meta model is run with small random weights; meta inputs raise.

    Args:
        targets: what ``loss_fn(output, targets)`` compares with, as for :func:`autopar.plan`.
        plan: the plan to check; default the one for these arguments, priced on ``cluster``, whatever this machine is.
        steps: of training, by SGD with momentum. The first loss, its gradients and the buffers after it are always
            compared; with several steps also each loss, the parameters and buffers after the last, and the outputs of
            an evaluation.
        timeout: seconds after which a rank that hangs ends the run.
        tolerance: default 1e-5 in fp32; in bf16 and fp16, where one process runs under the same policy, four units of
            rounding (3.1e-2 and 3.9e-3).

    Raises:
        WorkerError: a rank died or did not finish in time; carries its traceback.
        TraceError: the model returns no loss and no ``loss_fn`` is given.
        AutoparError: whatever :func:`autopar.plan` raises.
    """
    check_model(model)
    start = time.perf_counter()
    settings = replace(options or Options(), seed=(options.seed if options else None) or 0)
    settings = settings if plan is None else options_under(settings, plan)
    ready = materialised(model)
    task = Task(
        model=ready,
        mesh=mesh_shape(mesh),
        batch=batch,
        targets=targets,
        options=settings,
        cluster=Cluster.get(cluster or "local"),
        loss_fn=loss_fn,
        plan=plan,
        steps=_checked(steps),
    )
    expected = one_process(task, timeout)
    actual = run_local(parallel_step, math.prod(task.mesh), timeout=timeout, args=(task,))[0]
    if actual.draws:
        expected = one_process(task, timeout, actual.draws)
    closeness = Closeness.of(settings.precision, is_double(ready))
    closeness = closeness if tolerance is None else replace(closeness, tolerance=tolerance)
    return judge(actual, expected, closeness, time.perf_counter() - start, task.mesh)


def _checked(steps: int) -> int:
    if type(steps) is not int or steps < 1:
        raise OptionsError(f"steps={steps!r} is not a positive whole number")
    return steps


def materialised(model: nn.Module) -> nn.Module:
    """``model``; if parts of it are on the meta device, a copy with small random values there, the same every time."""
    tensors = [*model.parameters(), *model.buffers()]
    if not any(t.is_meta for t in tensors):
        return model
    generator = torch.Generator().manual_seed(0)
    real = copy.deepcopy(model).to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*real.parameters(), *real.buffers()):
            if tensor.is_floating_point():
                # Chosen: about what layers of usual width are initialised with (GPT-2 0.02).
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.05)
            else:
                tensor.zero_()
    return real
