"""Checks a plan the only way that counts: runs it on local processes and compares loss and every gradient with one
process."""

from __future__ import annotations

import copy
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from autopar.passes.conformance import collectives_of, collectives_of_stage, difference
from autopar.runtime.launch import run_local
from autopar.runtime.loss_scale import BACKOFF, FIRST

from .api import Batch, LossFunction, Mesh, mesh_shape, parallelize, split_batch
from .cluster import Cluster
from .equality import Closeness, distance, rounding
from .errors import TraceError
from .options import Options, under_policy
from .pipeline import PipelineProgram
from .plan import Plan
from .precision import autocast_dtype, scales_loss
from .program import Program
from .reshard import Collective
from .trace_call import call_loss


@dataclass(frozen=True)
class Report:
    """The outcome of :func:`verify`; ``str(report)`` is a table.

    Attributes:
        loss_error, gradient_errors: relative errors, of the loss and by parameter path: max|a - b| / max|b|, where b is
            the value of one process. Under a 16-bit precision policy one process runs under it too, and a difference
            counts against the error of b itself, over a unit of rounding, wherever that is more than max|b|
            (:mod:`autopar.equality`).
        noisy: gradients that are zero but for rounding (the bias of keys in attention), which have no relative error:
            those where max|b| is no more than ten times the error of b in float32 (against float64 on one process).
            Their differences count against a million times that error instead.
        seconds: wall-clock time of the whole comparison.
        step_seconds: wall-clock time of one step under the plan, after a first one.
        unpriced: the collectives in which the program that ran and the plan's prices differ. If there are any, the
            plan's predictions are not to be trusted.
        draws: whether the model draws random numbers, so that it was compared with one process under autopar with the
            same seed, not with the model alone.
        unset: gradients that one process leaves at None and the plan has as zeros (an expert in a list that no token
            chose); they count as equal.
        rounding: under a 16-bit policy, the relative distance of one process from float64.
    """

    plan: Plan
    tolerance: float
    loss: float
    loss_error: float
    gradient_errors: Mapping[str, float]
    noisy: tuple[str, ...]
    seconds: float
    step_seconds: float
    unpriced: tuple[str, ...] = ()
    draws: bool = False
    unset: tuple[str, ...] = ()
    rounding: float | None = None

    @property
    def max_error(self) -> float:
        return max([self.loss_error, *self.gradient_errors.values()])

    @property
    def ok(self) -> bool:
        """Whether the loss and every gradient are within ``tolerance``; a NaN is not."""
        return all(error <= self.tolerance for error in (self.loss_error, *self.gradient_errors.values()))

    @property
    def _how(self) -> str:
        return " under autopar with the same seed (the model draws random numbers)" if self.draws else ""

    def __str__(self) -> str:
        worst = sorted(self.gradient_errors.items(), key=lambda item: -item[1])[:8]
        lines = [
            f"{'equal' if self.ok else 'NOT EQUAL'} to one process{self._how} within {self.tolerance:g}: "
            f"{self.plan.model} on mesh {self.plan.mesh}",
            f"{'loss':<60} {self.loss_error:10.2e}",
            *(f"{'gradient of ' + name:<60} {error:10.2e}" for name, error in worst),
        ]
        if len(self.gradient_errors) > len(worst):
            lines.append(f"{len(self.gradient_errors) - len(worst)} more gradients, none worse")
        if self.noisy:
            lines.append(f"zero but for rounding, on one process too: {_some(self.noisy)}")
        if self.unset:
            lines.append(f"zeros, where one process leaves None: {_some(self.unset)}")
        if self.rounding is not None:
            lines.append(f"one process under {self.plan.precision} is within {self.rounding:.2g} of float64")
        lines += [f"the program is not what was priced: {line}" for line in self.unpriced]
        return "\n".join([*lines, f"{self.seconds:.1f} s in all, {self.step_seconds * 1e3:.1f} ms a step"])


def _some(names: tuple[str, ...]) -> str:
    """The first few of them."""
    return f"{', '.join(names[:4])}{', ...' * (len(names) > 4)}"


@dataclass(frozen=True)
class Task:
    """What every rank is told."""

    model: nn.Module
    mesh: tuple[int, ...]
    batch: Batch
    options: Options
    cluster: Cluster
    loss_fn: LossFunction | None
    plan: Plan | None


@dataclass(frozen=True)
class OneStep:
    """Loss and gradients of one step, as whole float tensors on the CPU."""

    loss: torch.Tensor
    gradients: Mapping[str, torch.Tensor]
    seconds: float = 0.0
    plan: Plan | None = None
    unpriced: tuple[str, ...] = ()
    draws: bool = False


def verify(
    model: nn.Module,
    mesh: Mesh,
    batch: Batch,
    options: Options | None = None,
    cluster: str | Cluster | None = None,
    loss_fn: LossFunction | None = None,
    plan: Plan | None = None,
    timeout: float = 300.0,
    tolerance: float | None = None,
) -> Report:
    """Runs one training step of ``model`` on prod(mesh) local processes and on one, and compares.

    The model is not changed. Neither meta models nor meta inputs can be verified as they are: a meta model gets small
    random weights, meta inputs raise.

    Args:
        plan: the plan to check; default the one for these arguments, priced on ``cluster`` whatever runs here.
        timeout: seconds after which a rank that hangs ends the run.
        tolerance: default 1e-5 in fp32; in bf16 and fp16, where one process runs under the same policy, four units of
            rounding (3.1e-2 and 3.9e-3).

    Raises:
        WorkerError: a rank died or did not finish in time; carries its traceback.
        TraceError: the model returns no loss and no ``loss_fn`` is given.
        Whatever :func:`autopar.plan` raises.
    """
    start = time.perf_counter()
    settings = replace(options or Options(), seed=(options.seed if options else None) or 0)
    settings = settings if plan is None else under_policy(settings, plan.precision)
    ready = materialised(model)
    task = Task(ready, mesh_shape(mesh), batch, settings, Cluster.get(cluster or "local"), loss_fn, plan)
    expected = one_process(task, timeout)
    found = run_local(parallel_step, math.prod(task.mesh), timeout=timeout, args=(task,))[0]
    if found.draws:
        expected = one_process(task, timeout, found.draws)
    asked = Closeness.of(settings.precision)
    asked = asked if tolerance is None else replace(asked, tolerance=tolerance)
    return judge(found, expected, asked, time.perf_counter() - start)


def one_process(task: Task, timeout: float, draws: bool = False) -> tuple[OneStep, OneStep | None]:
    """The step on one process, and if the model runs in it in float64, to know how far float32 itself is off: of the
    model alone, or if it draws random numbers of autopar, which draws what a plan draws."""
    run = _alone if draws else _plain
    return run(task, False, timeout), _exact(task, timeout, run)


def judge(found: OneStep, expected: tuple[OneStep, OneStep | None], asked: Closeness, seconds: float) -> Report:
    """What a step under a plan is, compared with that of one process (see :func:`one_process`)."""
    errors, noisy, unset = _compare(found, *expected, asked)
    alone, exact = expected
    off = distance(alone.loss, exact.loss if exact and asked.always else None)
    loss_error = asked.error(found.loss, alone.loss, off)[0]
    assert found.plan is not None
    return Report(
        found.plan,
        asked.tolerance,
        float(alone.loss),
        loss_error,
        errors,
        noisy,
        seconds,
        found.seconds,
        found.unpriced,
        found.draws,
        unset,
        rounding(alone.gradients, exact.gradients) if exact and asked.always else None,
    )


def materialised(model: nn.Module) -> nn.Module:
    """``model``, or if parts of it are on the meta device a copy with small random values there, the same every
    time."""
    tensors = [*model.parameters(), *model.buffers()]
    if not any(t.is_meta for t in tensors):
        return model
    generator = torch.Generator().manual_seed(0)
    real = copy.deepcopy(model).to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*real.parameters(), *real.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.05)
            else:
                tensor.zero_()
    return real


def in_training(model: nn.Module) -> nn.Module:
    """``model`` in training mode; parts that are in another mode on purpose stay so if the model itself is training."""
    return model if model.training else model.train()


def _reference(rank: int, world: int, task: Task, double: bool) -> OneStep:
    """One plain step of the unmodified model, by torch's own means of mixed precision."""
    given = _doubled(task.model, task.batch) if double else (copy.deepcopy(task.model), task.batch)
    model, batch = in_training(given[0]), given[1]
    args, kwargs = split_batch(batch)
    policy = None if double else task.options.precision
    half, scale = autocast_dtype(policy), FIRST if scales_loss(policy) else 1.0
    while True:
        torch.manual_seed(0)
        with torch.autocast("cpu", half) if half else nullcontext():
            loss = _loss_of(model(*args, **kwargs), task.loss_fn, args, kwargs)
        (loss * scale).backward()
        gradients = {name: p.grad.detach() / scale for name, p in model.named_parameters() if p.grad is not None}
        if scale <= 1.0 or all(bool(gradient.isfinite().all()) for gradient in gradients.values()):
            return OneStep(loss.detach(), gradients)
        scale *= BACKOFF
        model.zero_grad()


def _is_float(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


def _loss_of(
    output: Any, loss_fn: LossFunction | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> torch.Tensor:
    if loss_fn is not None:
        return call_loss(loss_fn, output, args, kwargs)
    found = getattr(output, "loss", None)
    if found is None and isinstance(output, Mapping):
        found = output.get("loss")
    if found is None:
        scalars = [t for t in pytree.tree_leaves(output) if _is_float(t) and t.ndim == 0 and t.requires_grad]
        found = scalars[0] if len(scalars) == 1 else None
    if found is None:
        raise TraceError(
            "the model returns no loss: no output is called loss, and not just one is a differentiable scalar; pass "
            "loss_fn=lambda output, batch: ... that computes one"
        )
    assert isinstance(found, torch.Tensor)
    return found


def _plain(task: Task, double: bool, timeout: float) -> OneStep:
    return run_local(_reference, 1, timeout=timeout, args=(task, double))[0]


def _alone(task: Task, double: bool, timeout: float) -> OneStep:
    """The step on one process under autopar, which draws what the plan draws; in float64 if ``double``."""
    model, batch = (_doubled(task.model, task.batch)) if double else (task.model, task.batch)
    options = Options(seed=task.options.seed, precision=None if double else task.options.precision)
    single = replace(task, model=model, batch=batch, mesh=(1,), options=options, plan=None)
    return run_local(parallel_step, 1, timeout=timeout, args=(single,))[0]


def _doubled(model: nn.Module, batch: Any) -> tuple[nn.Module, Any]:
    return copy.deepcopy(model).double(), pytree.tree_map(lambda t: t.double() if _is_float(t) else t, batch)


def _exact(task: Task, timeout: float, run: Callable[[Task, bool, float], OneStep]) -> OneStep | None:
    """The step in float64, to know how far float32 itself is off; None if the model does not run in float64."""
    try:
        return run(task, True, timeout)
    except Exception:
        return None


def parallel_step(rank: int, world: int, task: Task) -> OneStep:
    """The same step under the plan, on this rank; whole gradients on rank 0."""
    model = in_training(copy.deepcopy(task.model))
    parallel = parallelize(
        model, task.mesh, options=task.options, plan=task.plan, cluster=task.cluster, loss_fn=task.loss_fn
    )
    args, kwargs = split_batch(task.batch)
    call = parallel.prepare(args, kwargs, "loss")
    torch.manual_seed(rank)  # Rank 0's is the one of the single process, and the one that counts.
    draws = parallel.random_state()
    loss = parallel.step(*args, **kwargs)
    while parallel.overflowed and parallel.loss_scale_state()["scale"] >= 1.0:
        parallel.set_random_state(draws)
        parallel.zero_grad()
        loss = parallel.step(*args, **kwargs)
    gradients: dict[str, torch.Tensor] = {}
    for name, parameter in parallel.named_parameters():
        if parameter.grad is not None:
            whole = parallel.full_tensor(parameter.grad)
            gradients[name] = _whatever_differs(whole.detach().cpu().double(), world)
    parallel.zero_grad()
    if world > 1:
        dist.barrier()
    begin = time.perf_counter()
    parallel.step(*args, **kwargs)
    seconds = time.perf_counter() - begin
    unpriced = _unpriced(call.program, parallel.plan)
    return OneStep(loss.detach().cpu(), gradients, seconds, parallel.plan, unpriced, call.program.draws)


def _unpriced(program: Program | PipelineProgram, plan: Plan) -> tuple[str, ...]:
    """Where the collectives of the first rank's program are not those of its plan; with stages, of the first rank of
    each."""
    if isinstance(program, Program):
        return () if any(program.coordinate) else difference(collectives_of(program), _priced(plan, 0))
    found: list[tuple[str, ...]] = [()] * dist.get_world_size()
    here: tuple[str, ...] = ()
    if not any(program.coordinate[1:]):
        lines = difference(collectives_of_stage(program), _priced(plan, program.stage))
        here = tuple(f"stage {program.stage}: {line}" for line in lines)
    dist.all_gather_object(found, here)
    return tuple(line for lines in found for line in lines)


def _priced(plan: Plan, stage: int) -> Counter[Collective]:
    """What the devices of a stage are to say in a step."""
    found: Counter[Collective] = Counter()
    for line in plan.lines:
        for step in line.steps:
            if line.stage == stage and step.communicates:
                found[Collective(step.kind, step.axes, step.bytes)] += line.times  # type: ignore[arg-type]
    return found


def _whatever_differs(value: torch.Tensor, world: int) -> torch.Tensor:
    """``value``, which every rank has, or infinity where ranks disagree beyond rounding: a wrong copy on one rank is an
    error too."""
    lowest, highest = value.clone(), value.clone()
    if world > 1 and value.numel():
        dist.all_reduce(lowest, dist.ReduceOp.MIN)
        dist.all_reduce(highest, dist.ReduceOp.MAX)
    size = max(float(highest.abs().max()), float(lowest.abs().max())) if value.numel() else 0.0
    return value.masked_fill(highest - lowest > 1e-6 * size, math.inf)


def _compare(
    found: OneStep, expected: OneStep, exact: OneStep | None, asked: Closeness
) -> tuple[dict[str, float], tuple[str, ...], tuple[str, ...]]:
    """The error of every gradient, the names of those that are zero but for rounding, and of those that are zeros and
    that one process leaves at None."""
    errors: dict[str, float] = {}
    noisy, unset = [], []
    for name in sorted({*found.gradients, *expected.gradients}):
        one, other = found.gradients.get(name), expected.gradients.get(name)
        if one is not None and other is None and not one.any():
            errors[name] = 0.0
            unset.append(name)
        elif one is None or other is None or one.shape != other.shape:
            errors[name] = math.inf
        else:
            off = distance(other, exact.gradients.get(name) if exact else None)
            errors[name], is_noise = asked.error(one, other, off)
            noisy += [name] if is_noise else []
    return errors, tuple(noisy), tuple(unset)
