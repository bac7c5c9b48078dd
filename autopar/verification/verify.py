"""Checks a plan by running it: executes it on local processes and compares the loss and every gradient with one
process."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from textwrap import shorten
from typing import Any

import torch
from torch import nn

from autopar.api import LossFunction, Mesh, mesh_shape
from autopar.arguments import Batch, check_model, given_plan
from autopar.cluster.description import Cluster
from autopar.errors import AutoparError, OptionsError
from autopar.files import FileName
from autopar.keywords import suggests
from autopar.options import Options
from autopar.planner.options_of_plan import options_under
from autopar.plans.plan import Plan
from autopar.runtime.launch import run_local
from autopar.sync import EVERY_STEP

from .perturbation import moved_by_rounding
from .report import Report, compared, judge
from .steps import Task, one_process, parallel_step, parameter_dtypes
from .tolerance import Closeness

# Of why something was not measured, in characters. Chosen: two or three lines of a report.
_LONGEST = 200


@suggests
def verify(
    model: nn.Module,
    mesh: Mesh,
    batch: Batch,
    *,
    options: Options | None = None,
    cluster: str | Cluster | None = None,
    loss_fn: LossFunction | None = None,
    plan: Plan | FileName | None = None,
    steps: int = 1,
    timeout: float = 300.0,
    tolerance: float | None = None,
    targets: Any = None,
) -> Report:
    """Runs training steps of ``model`` on prod(mesh) local processes and on one, and compares them.

    The model is not changed. A meta model is run with small random weights; meta inputs raise.

    Args:
        targets: what ``loss_fn(output, targets)`` compares with, as for :func:`autopar.plan`.
        plan: the plan to check, or its path or URL; default the one for these arguments, priced on ``cluster``,
            whatever this machine is.
        steps: of training, by SGD with momentum. The first loss, its gradients and the buffers after it are always
            compared; with several steps also each loss, the parameters and buffers after the last, and the outputs of
            an evaluation.
        timeout: seconds after which a rank that hangs ends the run.
        tolerance: default 1e-5 in fp32; under a policy of bf16 or fp16, which one process then has too, four units of
            rounding (3.1e-2 and 3.9e-3), and twice as many for models with parameters in these.

    Raises:
        WorkerError: a rank died or did not finish in time; carries its traceback.
        TraceError: the model returns no loss and no ``loss_fn`` is given.
        AutoparError: whatever :func:`autopar.plan` raises.
    """
    check_model(model)
    plan = given_plan(plan)
    start = time.perf_counter()
    settings = replace(options or Options(), seed=(options.seed if options else None) or 0)
    _check_sync(settings)
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
    # The step on one process comes first, as it raises the clearer errors, unless it depends on the plan.
    before = None if _own_statistics(settings, plan) else one_process(task, timeout)
    actual = run_local(parallel_step, math.prod(task.mesh), timeout=timeout, args=(task,))[0]
    again = before is None or actual.draws
    expected = one_process(replace(task, pieces=actual.pieces), timeout, actual.draws) if again else before
    assert expected is not None
    closeness = Closeness.of(settings.precision, parameter_dtypes(ready))
    closeness = closeness if tolerance is None else replace(closeness, tolerance=tolerance)
    known = compared(actual, expected, closeness)
    moved, unmeasured = _moved(replace(task, plan=actual.plan), known.doubtful, closeness, timeout)
    known = compared(actual, expected, closeness, moved) if moved else known
    report = judge(actual, expected, closeness, time.perf_counter() - start, task.mesh, known)
    return replace(report, unmeasured=unmeasured)


def _moved(task: Task, names: Collection[str], closeness: Closeness, timeout: float) -> tuple[Mapping[str, float], str]:
    """How far rounding moves the gradients and buffers ``names`` under the plan of ``task``, and why that is not known
    of all."""
    if not names:
        return {}, ""
    arguments = (task, closeness.ulp, names)
    try:
        found = run_local(moved_by_rounding, math.prod(task.mesh), timeout=timeout, args=arguments)[0]
    except AutoparError as error:
        return {}, shorten(str(error), _LONGEST, placeholder=" ...")
    endless = [name for name in names if not math.isfinite(found.get(name, math.nan))]
    why = f"ranks disagree, values are not finite, or no state has them: {', '.join(endless)}" if endless else ""
    return found, shorten(why, _LONGEST, placeholder=" ...")


def _check_sync(settings: Options) -> None:
    if settings.sync != EVERY_STEP:
        raise OptionsError(
            f"verify compares with one device, and training with sync={settings.sync!r} is not to have its numbers: "
            "leave sync out, and verify the plan of one replica on the inner axes of the mesh, verify(model, mesh[1:], "
            "rows of one replica)"
        )


def _own_statistics(options: Options, plan: Plan | None) -> bool:
    """Whether microbatches may be batches of their own, so that one process has to compute them so too."""
    if plan is None:
        return options.batch_statistics == "microbatch"
    return plan.pipeline is not None and plan.pipeline.own_statistics


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
