"""The public functions :func:`plan` and :func:`parallelize`, and the arguments they share with ``verify``."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.calibration.default_cluster import default_cluster
from autopar.cluster.description import Cluster
from autopar.compiler.agreed_arguments import check_same_arguments
from autopar.compiler.agreed_plan import agreed_plan
from autopar.compiler.batch_indices import warn_of_indices
from autopar.compiler.calls import Compiler
from autopar.compiler.fixed_axes import with_fixed_axes
from autopar.compiler.late_search import proposed_layouts
from autopar.compiler.plan_cache import cached_plan
from autopar.compiler.rank_zero import gather_objects, on_first_rank
from autopar.compiler.replica_plan import finished_by
from autopar.planner.options_of_plan import options_under
from autopar.planner.plan_graph import compiled_as_planned
from autopar.planner.prepare import NO_LOSS, Prepared, batch_size, make_request, prepare
from autopar.planner.request import compiles
from autopar.planner.shared_work import SharedWork
from autopar.planner.timings import Timings
from autopar.plans.plan import Plan
from autopar.plans.question import Question, remember
from autopar.runtime.averaging.replica_module import ReplicaModule
from autopar.runtime.averaging.replicas import Replicas
from autopar.runtime.averaging.rows import own_rows
from autopar.runtime.checkpoint.hugging_face import load_weights
from autopar.runtime.checkpoint.stores import Folder
from autopar.runtime.comm.devices import Gpu, check_gpus, own_gpu, require_nccl
from autopar.runtime.comm.groups import AxisGroup, MeshGroups, mesh_groups, mesh_of_one
from autopar.runtime.execute.compiled_pieces import Compilation
from autopar.runtime.faults.meeting import join_world
from autopar.runtime.faults.watch import Watch, watch_over
from autopar.runtime.generation.inference_module import InferenceModule
from autopar.runtime.module.padded_batch import padded_batch
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.module.unwrapped import check_whole
from autopar.runtime.module.value_checks import ValueChecks
from autopar.trace.call import describe_call

from .arguments import PLAN_VARIABLE, Batch, check_model, given_options, given_plan, split_batch
from .errors import OptionsError
from .files import FileName
from .inference import Mode, check_no_loss, in_mode, planned_call, prepare_inference
from .keywords import suggests
from .options import Options
from .precision import scales_loss
from .rare_collections import collecting_rarely
from .sync import EVERY_STEP

Mesh = DeviceMesh | Sequence[int] | int
LossFunction = Callable[..., torch.Tensor]


def mesh_shape(mesh: Mesh) -> tuple[int, ...]:
    """The shape of a mesh, outermost (slowest) axis first. Raises :class:`OptionsError` for what is not a mesh."""
    if isinstance(mesh, DeviceMesh):
        return tuple(mesh.shape)
    shape: object = mesh
    sizes = (shape,) if isinstance(shape, int) else tuple(shape) if isinstance(shape, Sequence) else ()
    if not sizes or not all(isinstance(size, int) and size > 0 for size in sizes):
        by_name = "; verify and parallelize take a plan by name, plan=..." if isinstance(mesh, Plan) else ""
        raise OptionsError(
            f"{mesh!r} is not a mesh; give a DeviceMesh, or a shape such as (2, 4), the slowest links first{by_name}"
        )
    return sizes


def _check_parallelized(model: nn.Module, example_inputs: object, weights: Folder | None) -> None:
    """Raises :class:`OptionsError` as :func:`check_model`, for options in the place of inputs, and for a model of which
    a part alone has values."""
    check_model(model)
    if weights is None:
        check_whole(model)
    if isinstance(example_inputs, Options):
        raise OptionsError("the third argument is example_inputs, a batch: give options=autopar.Options(...) by name")


def _device(named: torch.device | str) -> torch.device:
    try:
        return torch.device(named)
    except (RuntimeError, TypeError) as error:
        raise OptionsError(f'device={named!r} is not a type of device, such as "cpu" or "cuda"') from error


def _axis_names(mesh: Mesh) -> tuple[str, ...]:
    return tuple(mesh.mesh_dim_names or ()) if isinstance(mesh, DeviceMesh) else ()


@suggests
def plan(
    model: nn.Module,
    mesh: Mesh,
    batch: Batch,
    *,
    options: Options | None = None,
    cluster: str | Cluster | None = None,
    loss_fn: LossFunction | None = None,
    targets: Any = None,
    device: torch.device | str | None = None,
    mode: Mode | None = None,
) -> Plan:
    """Plans training of ``model`` on ``mesh`` with global batches like ``batch``, or inference with
    ``mode="inference"``; needs no processes, no devices and, if model and batch are on the meta device or fake, no
    memory.

    Args:
        mesh: a DeviceMesh or a shape, outermost axis (slowest links) first.
        batch: a dict of keyword inputs, a tuple of positional ones, or the only input; global sizes.
        cluster: the hardware to price for: a name, a file or a :class:`Cluster`; default this machine (``"local"``).
        loss_fn: ``loss_fn(output)``, ``loss_fn(output, batch)`` or, with targets, ``loss_fn(output, targets)``, for a
            model that returns no loss; a module such as ``nn.CrossEntropyLoss()`` too.
        targets: an example of ``step(..., targets=)``: tensors that only ``loss_fn`` receives, in any tree.
        device: the type of device that the model is written for (``"cuda"``); default that of the mesh, or cpu. The
            plan is the same for all, and none needs to be there.
        mode: ``"training"`` or ``"inference"``, forward alone; default ``options.mode``. ``Options(cache_length=)``
            plans a step of generation with a key-value cache, ``Options(objective=)`` says what is best.

    Raises:
        TraceError: the model cannot be captured; names module and line.
        InfeasibleError: nothing fits into the memory limit; the message names a limit that suffices.
        OptionsError: an option or pin that cannot be honoured.
    """
    arguments = {"cluster": cluster, "loss_fn": loss_fn, "targets": targets, "device": device, "mode": mode}
    return make_plan(model, mesh, batch, options=given_options(options), **arguments)


@collecting_rarely()
def make_plan(
    model: nn.Module,
    mesh: Mesh,
    batch: Batch,
    *,
    options: Options,
    cluster: str | Cluster | None,
    loss_fn: LossFunction | None = None,
    targets: Any = None,
    device: torch.device | str | None = None,
    mode: Mode | None = None,
    work: SharedWork | None = None,
    advises: bool = True,
) -> Plan:
    """:func:`plan`. ``work``: what it has in common with plans of the same model for other arguments; ``advises``:
    whether the error for what does not fit says what would, which takes a search."""
    check_model(model)
    timings, work = Timings(advises=advises), SharedWork() if work is None else work
    (args, kwargs), settings = split_batch(batch, targets), in_mode(options, mode)
    where = _device(device or (mesh.device_type if isinstance(mesh, DeviceMesh) else "cpu"))
    if settings.pad_to is not None:
        args, kwargs = padded_batch(model, settings.pad_to, args, kwargs)
    shape, names, rows = mesh_shape(mesh), _axis_names(mesh), batch_size(args, kwargs)
    described = work.once("cluster", (cluster,), make=lambda: Cluster.get(cluster or "local"))
    hardware = _of_devices(described, math.prod(shape), settings)
    finish, replicas = finished_by(settings.sync, hardware, shape), 1
    if settings.sync != EVERY_STEP:
        replicas = shape[0]
        args, kwargs = own_rows(args, kwargs, 0, shape[0], plans=True)
        shape, names = shape[1:] or (1,), names[1:]
    base = work.once(
        "prepared",
        (batch, targets),
        *(settings.precision, settings.mode, settings.cache_length, settings.pad_to, replicas),
        compiles(settings, hardware),
        make=lambda: _prepared(model, args, kwargs, where, loss_fn, targets, settings, hardware, timings),
    )
    request = make_request(model, base, shape, hardware, replace(settings, sync=EVERY_STEP), names, proposed_layouts)
    notes = (NO_LOSS,) if base.loss is None and settings.mode == "training" else ()
    request = replace(request, shared=work, notes=(*request.notes, *notes))
    asked = {"cluster": cluster, "loss_fn": loss_fn, "targets": targets, "device": device, "mode": mode}
    question = Question(make_plan, model, mesh, mesh_shape(mesh), batch, rows, asked | {"options": options}, SharedWork)
    # A copy, since the cache keeps its own plan, and the question would keep the model with it.
    return remember(replace(finish(cached_plan(request, timings))), question)


def _prepared(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device,
    loss_fn: LossFunction | None,
    targets: Any,
    options: Options,
    cluster: Cluster,
    timings: Timings,
) -> Prepared:
    """The model traced for training, or for inference."""
    if options.mode == "inference":
        check_no_loss(loss_fn, targets)
        return prepare_inference(model, planned_call(model, args, kwargs, options), device, options, timings)
    precision = options.precision
    given: dict[str, Any] = {"device": device, "loss_fn": loss_fn, "precision": precision, "timings": timings}
    base = prepare(model, args, kwargs, training=True, **given)
    warn_of_indices(base.graph, describe_call(args, kwargs).tensors)
    return compiled_as_planned(base, None, options, cluster)


@suggests
def parallelize(
    model: nn.Module,
    mesh: Mesh,
    example_inputs: Batch | None = None,
    *,
    options: Options | None = None,
    cluster: str | Cluster | None = None,
    loss_fn: LossFunction | None = None,
    plan: Plan | FileName | None = None,
    targets: Any = None,
    weights: Folder | None = None,
    mode: Mode | None = None,
) -> ParallelModule:
    """Makes ``model`` train on all devices of ``mesh``, or infer with ``mode="inference"``: with the same inputs,
    outputs, parameter names and ``state_dict`` keys; its parameters become DTensors. Called by every rank
    (``torchrun``), or by the only process for a mesh of one.

    The model is traced and planned at its first batch, or now if ``example_inputs`` (and ``targets``, where ``loss_fn``
    takes them) are given. A real model keeps its weights (rank 0's); a meta model is materialised shard by shard, by
    its own initialisation or from ``weights``: a folder of safetensors (``save_pretrained``, the Hugging Face Hub) or
    of checkpoints, of which each rank reads its own parts. A ``plan`` (or its path or URL; by default the one of
    ``autopar run --plan``) may be given on every rank, or on rank 0 alone: rank 0's is used. What the model draws
    (dropout, noise) depends on ``options.seed`` (without one, on ``torch.initial_seed()`` of rank 0 now), on the step
    and on the model, and not on the plan; ``torch.manual_seed`` later changes nothing, ``set_random_state`` does.
    Without ``cluster``, CPUs are priced as calibrated (``"local"``), GPUs as calibrated or by their name
    (:mod:`autopar.calibration.default_cluster`). See
    :class:`~autopar.runtime.ParallelModule` for what it can do. With ``mode="inference"`` the module, in evaluation
    mode, has no gradients and no optimizer, and ``generate`` of models of transformers runs under the plan
    (:class:`~autopar.runtime.generation.inference_module.InferenceModule`).

    Raises:
        OptionsError: the number of processes is not that of the mesh, an option cannot be honoured, or the file of
            the plan cannot be read.
        PlanMismatchError: ``plan`` is for another model, mesh or batch, or ``options`` ask for another plan.
    """
    plan = given_plan(os.environ.get(PLAN_VARIABLE) or None if plan is None else plan)
    settings = in_mode(given_options(options), mode)
    _check_parallelized(model, example_inputs, weights)
    _join_processes(mesh, settings.timeout)
    watch = watch_over(_watched_ranks(mesh, settings), settings.timeout)
    with watch.call("autopar.parallelize()"):
        parallel = _parallel_module(model, device_mesh(mesh), mesh, settings, cluster, loss_fn, plan, watch)
        if weights is not None:
            load_weights(weights, parallel)
        if example_inputs is not None:
            args, kwargs = split_batch(example_inputs, targets)
            if settings.mode == "inference":
                args, kwargs = planned_call(model, args, kwargs, settings)
            parallel.prepare(args, kwargs, "loss")
    return parallel


def _parallel_module(
    model: nn.Module,
    devices: DeviceMesh,
    mesh: Mesh,
    settings: Options,
    cluster: str | Cluster | None,
    loss_fn: LossFunction | None,
    plan: Plan | None,
    watch: Watch,
) -> ParallelModule:
    if settings.mode == "inference":
        check_no_loss(loss_fn, None)
        model.eval()
    groups = mesh_groups(devices)
    ranks = groups.over(groups.axes)
    check_same_arguments(model, settings, groups.mesh.mesh.flatten().tolist(), ranks)
    plan = agreed_plan(plan, ranks)
    settings = _settled(settings, plan, devices, groups)
    hardware = _of_devices(_cluster(cluster, devices, ranks), ranks.size, settings)
    replicas = None if settings.sync == EVERY_STEP else Replicas.of(groups)
    own = groups if replicas is None else replicas.own
    compiler = Compiler(
        model=model,
        mesh=own.shape,
        axis_names=_axis_names(mesh) if replicas is None else _axis_names(mesh)[1:],
        cluster=hardware,
        options=replace(settings, sync=EVERY_STEP),
        device=groups.device,
        ranks=own.over(own.axes),
        loss_fn=loss_fn,
        plan=plan,
        planners=None if replicas is None else ranks,
        finish=finished_by(settings.sync, hardware, groups.shape),
    )
    kind = InferenceModule if settings.mode == "inference" else ParallelModule
    make: Callable[..., ParallelModule] = partial(kind, model, devices, compiler)
    if replicas is not None and settings.sync != EVERY_STEP:
        make = partial(ReplicaModule, model, replicas, compiler, settings.sync)
    return make(
        seed=settings.seed,
        scaled=scales_loss(settings.precision),
        check_inputs=settings.check_inputs,
        watch=watch,
        compilation=_compilation(settings, groups.device, watch),
        values=ValueChecks(settings.check_every, settings.nonfinite),
        pad_to=settings.pad_to,
    )


def _settled(settings: Options, plan: Plan | None, devices: DeviceMesh, groups: MeshGroups) -> Options:
    """The options for these devices, and under ``plan`` if there is one. Raises :class:`OptionsError` or
    :class:`PlanMismatchError` for what they cannot be on."""
    settings = settings if plan is None else options_under(settings, plan)
    if devices.device_type == "cuda":
        peak = None if plan is None else plan.predicted.peak_bytes
        gpus = gather_objects(groups.over(groups.axes), Gpu.of(groups.device))
        check_gpus(gpus, groups.mesh.mesh.flatten().tolist(), settings.precision, peak)
    return with_fixed_axes(settings, plan, groups)


def _compilation(options: Options, device: torch.device, watch: Watch) -> Compilation | None:
    """Given if pieces of programs are compiled on ``device``."""
    wanted = device.type == "cuda" if options.compile == "auto" else options.compile
    return Compilation.on(device, watch.planning) if wanted else None


def _cluster(named: str | Cluster | None, devices: DeviceMesh, ranks: AxisGroup) -> Cluster:
    """The hardware to price for, the same on all ranks."""
    if named is None and devices.device_type != "cpu":
        # GPUs are queried, or even measured, and ranks may get different results.
        named = on_first_rank(ranks, lambda: default_cluster(devices.device_type, devices.size()))
    return Cluster.get(named or "local")


def _of_devices(cluster: Cluster, devices: int, options: Options) -> Cluster:
    """``cluster`` as far as ``devices`` devices make it up. Raises :class:`OptionsError` for replicas on several kinds
    of device, which one plan would have to fit."""
    if cluster.groups and options.sync != EVERY_STEP:
        raise OptionsError(
            f"sync={options.sync}: replicas run one plan, but cluster {cluster.name!r} has groups of different "
            "devices; leave sync out, or plan for what all can do: cluster.at(0, cluster.size)"
        )
    return cluster.among(devices)


def device_mesh(mesh: Mesh) -> DeviceMesh:
    """A DeviceMesh for ``mesh``; initialises torch.distributed if it is not. Raises :class:`OptionsError` if the mesh
    has another number of devices than there are processes."""
    if isinstance(mesh, DeviceMesh):
        return mesh
    shape = mesh_shape(mesh)
    needed = math.prod(shape)
    _join_processes(mesh)
    if not dist.is_initialized():
        if torch.cuda.is_available():
            require_nccl()
        return mesh_of_one("cuda" if torch.cuda.is_available() else "cpu", len(shape))
    kind = "cuda" if torch.cuda.is_available() and "nccl" in str(dist.get_backend_config()) else "cpu"
    return DeviceMesh(kind, torch.arange(needed, device="cpu").reshape(shape))


def _watched_ranks(mesh: Mesh, options: Options) -> tuple[int, ...]:
    """The ranks that step together, row-major: those of the mesh, or of this rank's replica."""
    shape = mesh_shape(mesh)
    ranks = mesh.mesh.flatten().tolist() if isinstance(mesh, DeviceMesh) else list(range(math.prod(shape)))
    if options.sync == EVERY_STEP or len(ranks) == 1:
        return tuple(ranks)
    inside = len(ranks) // shape[0]
    first = ranks.index(dist.get_rank()) // inside * inside
    return tuple(ranks[first : first + inside])


def _join_processes(mesh: Mesh, timeout: float = 0.0) -> None:
    """Initialises torch.distributed if it is not, for a shape with the variables of torchrun. Raises
    :class:`OptionsError` if the shape has another number of devices than there are processes."""
    if isinstance(mesh, DeviceMesh):
        return
    shape = mesh_shape(mesh)
    needed = math.prod(shape)
    if not dist.is_initialized() and dist.is_torchelastic_launched():
        if torch.cuda.is_available():
            require_nccl()
            torch.cuda.init()  # Otherwise DeviceMesh chooses again, by the local rank.
            torch.cuda.set_device(own_gpu())
        join_world("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout)
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world != needed:
        raise OptionsError(
            f"the mesh {shape} has {needed} devices, but {world} process{'es are' if world > 1 else ' is'} running; "
            f"start {needed} "
            f"(torchrun --nproc-per-node {needed} train.py), or give a mesh of {world}"
        )
