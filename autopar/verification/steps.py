"""The steps that :func:`autopar.verify` compares: the unmodified model on one process, and a plan on several."""

from __future__ import annotations

import copy
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.api import LossFunction, parallelize
from autopar.arguments import Batch, split_batch
from autopar.cluster.description import Cluster
from autopar.errors import TraceError
from autopar.ir.pipeline_program import PipelineProgram
from autopar.ir.placements import fullest_coordinate
from autopar.ir.program import Program
from autopar.ir.reshard import Collective
from autopar.options import Options
from autopar.passes.lower.collectives_read_back import collectives_of, collectives_of_stage, difference
from autopar.plans.plan import Plan
from autopar.precision import Precision, autocast_dtype, scales_loss
from autopar.runtime.launch import run_local
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.state.loss_scale import BACKOFF, FIRST
from autopar.torch_internals.hugging_face import records_outputs
from autopar.torch_internals.replacements import convert_module
from autopar.torch_internals.trees import tree_leaves, tree_map
from autopar.trace.loss import TARGETS, run_with_loss
from autopar.trace.moe_blocks import experts_as_operations

from .later_steps import MOMENTUM, RATE, LaterSteps, train
from .pieces import Pieces
from .report import OneStep
from .widths import converted, insisting


@dataclass(frozen=True)
class Task:
    """What every rank is given to run. ``pieces``: the microbatches of which each is a batch of its own, if they are,
    for the step on one process."""

    model: nn.Module
    mesh: tuple[int, ...]
    batch: Batch
    targets: Any
    options: Options
    cluster: Cluster
    loss_fn: LossFunction | None
    plan: Plan | None
    steps: int = 1
    pieces: Pieces | None = None

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)
        records_outputs(self.model)  # In the process of a rank, which has constructed no model.


def one_process(task: Task, timeout: float, draws: bool = False) -> tuple[OneStep, OneStep | None]:
    """The step on one process, and the same in float64 if the model runs in it, which tells the rounding error of
    float32. A model that draws random numbers runs under autopar, so that it draws what a plan draws."""
    run = _alone if draws else _plain
    return run(task, False, timeout), _exact(task, timeout, run)


def _plain(task: Task, double: bool, timeout: float) -> OneStep:
    return run_local(_reference, 1, timeout=timeout, args=(task, double))[0]


def _alone(task: Task, double: bool, timeout: float) -> OneStep:
    """The step on one process under autopar, which draws what the plan draws; in float64 if ``double``. Models that
    insist on another width do not run in float64 so: their trace would be kept as that of the model as it is."""
    original = task.model, (task.batch, task.targets)
    model, (batch, targets) = _doubled(*original) if double else original
    options = Options(seed=task.options.seed, precision=None if double else task.options.precision)
    if task.pieces is not None:
        options = replace(options, microbatches=task.pieces.count, batch_statistics="microbatch")
    single = replace(task, model=model, batch=batch, targets=targets, mesh=(1,), options=options, plan=None)
    return run_local(parallel_step, 1, timeout=timeout, args=(single,))[0]


def _exact(task: Task, timeout: float, run: Callable[[Task, bool, float], OneStep]) -> OneStep | None:
    """The step in float64 (of a model in float64, in float32), which tells the rounding error of float32; None if the
    model does not run in it."""
    try:
        return run(task, True, timeout)
    except Exception:
        return None


def parameter_dtypes(model: nn.Module) -> set[torch.dtype]:
    """The dtypes of the floating-point parameters."""
    return {p.dtype for p in model.parameters() if p.is_floating_point()}


def _doubled(model: nn.Module, batch: Any) -> tuple[nn.Module, Any]:
    """A copy of both in float64; for a model in float64, in float32."""
    convert = partial(converted, double=_is_narrow(model))
    other = copy.deepcopy(model)
    convert_module(other, convert)
    return other, tree_map(convert, batch)


def _is_narrow(model: nn.Module) -> bool:
    """Whether the other width of a model is float64; of a model in float64 it is float32."""
    return parameter_dtypes(model) != {torch.float64}


def in_training(model: nn.Module) -> nn.Module:
    """``model`` in training mode; parts that are in another mode on purpose stay so if the model itself is training."""
    return model if model.training else model.train()


def _reference(rank: int, world: int, task: Task, double: bool) -> OneStep:
    """Plain steps of the unmodified model, with torch's own mixed precision; if ``double``, in the other width. Models
    that do not run in it as they are get it wherever they insist on one, and so do those that compute no numbers: a
    mask of float64's least number is infinite once it is converted to float32."""
    if not double:
        model = in_training(copy.deepcopy(task.model))
        return _plain_steps(model, task, *split_batch(task.batch, task.targets), task.options.precision)
    with suppress(Exception):
        step = _in_other_width(task)
        if all(bool(value.isfinite().all()) for value in (step.loss, *step.gradients.values())):
            return step
    with insisting(_is_narrow(task.model)):
        return _in_other_width(task)


def _in_other_width(task: Task) -> OneStep:
    """Blocks of experts run as our operation: grouped products of torch are of 32 bits at most."""
    copied, (batch, targets) = _doubled(task.model, (task.batch, task.targets))
    model = in_training(copied)
    with experts_as_operations(model):
        return _plain_steps(model, task, *split_batch(batch, targets), None)


def _plain_steps(model: nn.Module, task: Task, args: Any, kwargs: Any, policy: Precision | None) -> OneStep:
    before, scale = _copies(model.named_parameters()), FIRST if scales_loss(policy) else 1.0
    loss, gradients, scale = _plain_step(model, task, args, kwargs, scale, policy)
    later = LaterSteps((), _copies(model.named_buffers()) if _compares_buffers(policy) else {})
    if task.steps > 1:
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
        losses = train(loss, optimizer, lambda: _plain_step(model, task, args, kwargs, scale, policy)[0], task.steps)
        after = _copies(model.named_parameters())
        buffers = _copies(model.named_buffers()) if _compares_buffers(policy) else {}
        later = LaterSteps(losses, buffers, before, after, _evaluated(model, task, args, kwargs, policy))
    return OneStep(loss.detach(), gradients, later=later)


def _plain_step(
    model: nn.Module,
    task: Task,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    scale: float,
    policy: Precision | None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor], float]:
    """The loss, copies of the gradients, which also stay on the parameters, and the scale that did not overflow. Of
    microbatches that are batches of their own, the mean loss and its gradients, accumulated one after the other."""
    half, pieces = autocast_dtype(policy), task.pieces
    while True:
        torch.manual_seed(0)
        losses = []
        for piece_args, piece_kwargs in [(args, kwargs)] if pieces is None else pieces.divide(args, kwargs):
            with torch.autocast("cpu", half) if half else nullcontext():
                output, loss = run_with_loss(model, task.loss_fn, piece_args, piece_kwargs)
                loss = _loss_of(output) if loss is None else loss
            losses.append(loss if pieces is None else loss / pieces.count)
            (losses[-1] * scale).backward()
        loss = losses[0] if pieces is None else torch.stack([each.detach() for each in losses]).sum()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad / scale
        gradients = {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}
        if scale <= 1.0 or all(bool(gradient.isfinite().all()) for gradient in gradients.values()):
            return loss, gradients, scale
        scale *= BACKOFF
        model.zero_grad()


def _copies(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Copies on the CPU of all tensors."""
    return {name: tensor.detach().cpu().clone() for name, tensor in named}


def _compares_buffers(policy: Precision | None) -> bool:
    """Not where a step that overflowed may have run twice and updated them twice."""
    return not scales_loss(policy)


def _evaluated(
    model: nn.Module, task: Task, args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Precision | None = None
) -> dict[str, torch.Tensor]:
    """Every output in evaluation mode, without gradients and loss function, by its position."""
    kwargs = {name: value for name, value in kwargs.items() if name != TARGETS or task.loss_fn is None}
    half = autocast_dtype(policy)
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", half) if half else nullcontext():
        leaves = [leaf for leaf in tree_leaves(model(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
    tensors = (leaf.full_tensor() if isinstance(leaf, DTensor) else leaf for leaf in leaves)
    return {str(number): leaf.detach().cpu() for number, leaf in enumerate(tensors)}


def _is_float(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


def _loss_of(output: Any) -> torch.Tensor:
    """The loss that a model returns."""
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, Mapping):
        loss = output.get("loss")
    if loss is None:
        scalars = [t for t in tree_leaves(output) if _is_float(t) and t.ndim == 0 and t.requires_grad]
        loss = scalars[0] if len(scalars) == 1 else None
    if loss is None:
        raise TraceError(
            "the model returns no loss: no output is called loss, nor is exactly one a differentiable scalar; pass "
            "loss_fn=lambda output, batch: ... that computes one, or loss_fn and targets"
        )
    assert isinstance(loss, torch.Tensor)
    return loss


def parallelized(task: Task) -> tuple[ParallelModule, tuple[Any, ...], dict[str, Any]]:
    """The model of ``task`` under its plan on this rank, and the inputs of its step. Collective."""
    parallel = parallelize(
        in_training(copy.deepcopy(task.model)),
        task.mesh,
        options=task.options,
        plan=task.plan,
        cluster=task.cluster,
        loss_fn=task.loss_fn,
    )
    args, kwargs = split_batch(task.batch, task.targets)
    return parallel, tuple(args), dict(kwargs)


def step_from(
    parallel: ParallelModule, draws: Mapping[str, int], rank: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> torch.Tensor:
    """The loss of a step that draws from the random state ``draws``, again with a lower scale while it overflows."""
    torch.manual_seed(rank)  # Rank 0's seed is that of the single process; autopar draws with rank 0's.
    loss = parallel.step(*args, **kwargs)
    while parallel.overflowed and parallel.loss_scale_state()["scale"] >= 1.0:
        parallel.set_random_state(draws)
        parallel.zero_grad()
        loss = parallel.step(*args, **kwargs)
    return loss


def whole_gradients(
    parallel: ParallelModule, world: int, names: Collection[str] | None = None
) -> dict[str, torch.Tensor]:
    """The gradients, of ``names`` alone if given, in float64 on the CPU, with infinity where ranks disagree beyond
    rounding. Collective."""
    return {
        name: _infinite_where_ranks_differ(parallel.full_tensor(parameter.grad).detach().cpu().double(), world)
        for name, parameter in parallel.named_parameters()
        if parameter.grad is not None and (names is None or name in names)
    }


def whole_buffers(
    parallel: ParallelModule, world: int, names: Collection[str] | None = None
) -> dict[str, torch.Tensor]:
    """The buffers, of ``names`` alone if given, on the CPU, with infinity where ranks disagree beyond rounding.
    Collective."""
    return {
        name: _whole_tensor(parallel, buffer, world)
        for name, buffer in parallel.named_buffers()
        if names is None or name in names
    }


def _whole_tensor(parallel: ParallelModule, tensor: torch.Tensor, world: int) -> torch.Tensor:
    full = parallel.full_tensor(tensor).detach().cpu().clone()
    return _infinite_where_ranks_differ(full, world) if full.is_floating_point() else full


def parallel_step(rank: int, world: int, task: Task) -> OneStep:
    """The same step under the plan, on this rank; whole gradients on rank 0."""
    parallel, args, kwargs = parallelized(task)
    call = parallel.prepare(args, kwargs, "loss")
    loss = step_from(parallel, parallel.random_state(), rank, args, kwargs)
    gradients = whole_gradients(parallel, world)
    later = _later(parallel, task, args, kwargs, loss, world)
    parallel.zero_grad()
    if world > 1:
        dist.barrier()
    begin = time.perf_counter()
    parallel.step(*args, **kwargs)
    seconds = time.perf_counter() - begin
    program, unpriced, pipeline = call.program, _unpriced(call.program, parallel.plan), parallel.plan.pipeline
    own_statistics = pipeline is not None and pipeline.own_statistics
    pieces = Pieces.of(call, program) if own_statistics and isinstance(program, PipelineProgram) else None
    return OneStep(loss.detach().cpu(), gradients, seconds, parallel.plan, unpriced, program.draws, later, pieces)


def _later(
    parallel: ParallelModule,
    task: Task,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    loss: torch.Tensor,
    world: int,
) -> LaterSteps:
    """The state after ``task.steps`` under the plan."""
    compares = _compares_buffers(parallel.plan.precision)
    if task.steps == 1:
        return LaterSteps((), whole_buffers(parallel, world) if compares else {})
    optimizer = parallel.optimizer(torch.optim.SGD, lr=RATE, momentum=MOMENTUM)
    before = {name: _whole_tensor(parallel, value, world) for name, value in parallel.named_parameters()}
    losses = train(loss, optimizer, lambda: parallel.step(*args, **kwargs), task.steps)
    after = {name: _whole_tensor(parallel, value, world) for name, value in parallel.named_parameters()}
    buffers = whole_buffers(parallel, world) if compares else {}
    later = LaterSteps(losses, buffers, before, after, _evaluated(parallel, task, args, kwargs))
    parallel.train()
    return later


def _unpriced(program: Program | PipelineProgram, plan: Plan) -> tuple[str, ...]:
    """Where the collectives of the program of a rank with the largest shards differ from those of its plan; with
    stages, those of such a rank of each stage."""
    lines_of_ranks: list[tuple[str, ...]] = [()] * dist.get_world_size()
    own_lines: tuple[str, ...] = ()
    fullest = fullest_coordinate(plan.mesh, plan.shares)
    if isinstance(program, Program):
        own_lines = difference(collectives_of(program), _priced(plan, 0)) if program.coordinate == fullest else ()
    elif program.coordinate[1:] == fullest:
        lines = difference(collectives_of_stage(program), _priced(plan, program.stage))
        own_lines = tuple(f"stage {program.stage}: {line}" for line in lines)
    dist.all_gather_object(lines_of_ranks, own_lines)
    return tuple(line for lines in lines_of_ranks for line in lines)


def _priced(plan: Plan, stage: int) -> Counter[Collective]:
    """The collectives that the devices of a stage run in a step, according to the plan."""
    counts: Counter[Collective] = Counter()
    for line in plan.lines:
        for step in line.steps:
            if line.stage == stage and step.communicates:
                counts[Collective(step.kind, step.axes, step.bytes)] += line.times  # type: ignore[arg-type]
    return counts


def _infinite_where_ranks_differ(value: torch.Tensor, world: int) -> torch.Tensor:
    """``value``, which every rank has, with infinity where ranks disagree beyond rounding: a wrong copy on one rank is
    an error too."""
    lowest, highest = value.clone(), value.clone()
    if world > 1 and value.numel():
        dist.all_reduce(lowest, dist.ReduceOp.MIN)
        dist.all_reduce(highest, dist.ReduceOp.MAX)
    size = max(float(highest.abs().max()), float(lowest.abs().max())) if value.numel() else 0.0
    # As NOISE of tolerance.py.
    return value.masked_fill(highest - lowest > 1e-6 * size, math.inf)
