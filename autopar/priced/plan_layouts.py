"""The plan for so many devices, beside the others that its search priced and layouts that the user names."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from autopar.api import make_plan
from autopar.arguments import Batch, check_model, given_options, split_batch
from autopar.cluster.description import Cluster
from autopar.errors import InfeasibleError, OptionsError
from autopar.keywords import suggests
from autopar.layout import Layout
from autopar.optimizers import OPTIMIZERS
from autopar.options import Options
from autopar.planner.prepare import batch_size
from autopar.planner.shared_work import SharedWork
from autopar.plans.plan import Plan
from autopar.plans.question import resized
from autopar.precision import Precision
from autopar.restriction import check_layout
from autopar.search.restricted.nearest import other_degrees
from autopar.search.segments import pinned_stage, stage_pins

from .figures import device_flops, notes_on
from .precision import planned_precision
from .price import OF_LAYOUTS, price_with
from .priced import Priced
from .report import LayoutReport

# Up to so many devices a mesh is one axis, which the search divides in every way.
# Chosen: Llama 3 8B on 64 A100 took 39 s of computing on one axis and 14 s on (8, 8), for steps that are equally quick.
ONE_AXIS = 32


@suggests
def plan_layouts(
    model: nn.Module,
    batch: Batch,
    cluster: str | Cluster,
    *,
    devices: int,
    global_batch: int | None = None,
    tokens: float | None = None,
    compare: Mapping[str, Layout] | None = None,
    options: Options | None = None,
    precision: Precision | None = None,
    memory_limit: int | str | None = None,
    zero: Literal[0, 1, 2, 3] | None = None,
    recompute: Literal["none", "selective", "full"] | None = None,
    offload: bool | str | Mapping[str, str | None] | None = None,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    targets: Any = None,
) -> LayoutReport:
    """The plan of ``model`` for so many ``devices``, as :func:`autopar.plan` makes it, beside the others that its
    search priced and the layouts to compare it with. The model may be on the meta device.

    Args:
        batch: sample inputs, as for :func:`autopar.plan`.
        global_batch: samples of a step; default: those of ``batch``, which is repeated or cut.
        tokens: how many tokens the whole training reads, to say how many days it takes; a sample has as many tokens as
            its first input has elements.
        compare: layouts for comparison, by name; each is priced as by :func:`autopar.price`, and restricts nothing.
        options: of the plan. Without a ``precision``, a model in fp32 is planned in ``"bf16"``, as layouts are.
        precision, memory_limit, zero, recompute, offload: these options, in place of those of ``options``.
        loss_fn, targets: as for :func:`autopar.plan`.

    Raises:
        TraceError: the model cannot be captured.
        InfeasibleError: nothing fits; says what would, in bytes.
        OptionsError: a layout for comparison takes another number of devices, or does not divide the model.
    """
    check_model(model)
    began, cpu_began, hardware = time.perf_counter(), time.process_time(), Cluster.get(cluster)
    own = _checked_options(
        options, precision=precision, memory_limit=memory_limit, zero=zero, recompute=recompute, offload=offload
    )
    inputs, samples, sample_tokens = _of_samples(batch, global_batch)
    _check(devices, tokens, compare or {}, samples, hardware)
    own = replace(own, precision=planned_precision(model, own.precision)[1])
    targets = resized(targets, batch_size(*split_batch(batch)), samples)
    asked = _Asked(model, inputs, hardware, own, {"loss_fn": loss_fn, "targets": targets, "work": SharedWork()})
    plan = asked.plan(devices)
    took = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu_began}
    named = {name: asked.beside(plan, layout) for name, layout in (compare or {}).items()}
    return asked.report(plan, devices, named=named, sample_tokens=sample_tokens, tokens=tokens, **took)


def mesh_for(cluster: Cluster, devices: int) -> tuple[int, ...]:
    """The mesh of so many devices: nodes outermost, if there are several and all are full."""
    node = cluster.links[0].size or devices
    is_one_axis = devices <= ONE_AXIS or node == 1 or devices % node != 0 or devices == node
    return (devices,) if is_one_axis else (devices // node, node)


@dataclass(frozen=True)
class _Asked:
    """What is planned and priced, checked. ``given``: the arguments that both have in common besides."""

    model: nn.Module
    inputs: Batch
    cluster: Cluster
    options: Options
    given: Mapping[str, Any]

    def plan(self, devices: int) -> Plan:
        mesh = mesh_for(self.cluster, devices)
        return make_plan(self.model, mesh, self.inputs, options=self.options, cluster=self.cluster, **self.given)

    def report(self, plan: Plan, devices: int, **others: Any) -> LayoutReport:
        """The report on ``plan``. ``others``: what it, the model and the cluster do not say."""
        parameters = list(self.model.parameters())
        return LayoutReport(
            plan=plan,
            model=type(self.model).__name__,
            parameters=sum(parameter.numel() for parameter in parameters),
            checkpoint_bytes=sum(_checkpointed(parameter, self.options.optimizer) for parameter in parameters),
            devices=devices,
            device_flops=device_flops(plan, self.cluster.among(devices)),
            notes=notes_on(plan, self.cluster),
            **others,
        )

    def beside(self, plan: Plan, layout: Layout) -> Priced:
        """The price of a layout under those options of ``plan`` that layouts do not say, with those of its pins that
        this does not contradict: it has the stage, or the axes, that they name. If there is no such plan either,
        without. Says which are left out."""
        said: dict[str, Any] = dict.fromkeys(OF_LAYOUTS)
        options = replace(self.options, layout=None, **said)
        price = partial(price_with, self.model, self.inputs, self.cluster, layout, **self.given)
        stages, placements = stage_pins(options.pins)
        kept = {path: text for path, text in stages.items() if pinned_stage(text) < layout.pipeline > 1}
        if replace(layout, pipeline=1).mesh == (tuple(n for n in plan.mesh if n > 1) or (1,)):
            kept |= placements
        try:
            found = price(options=replace(options, pins=kept))
        except (OptionsError, InfeasibleError):
            if not kept:
                raise
            kept, found = {}, price(options=replace(options, pins={}))
        left_out = [path for path in options.pins if path not in kept]
        if not left_out:
            return found
        note = f"pins that {layout} contradicts are left out: {', '.join(left_out)}"
        return replace(found, notes=(*found.notes, note))


def _checked_options(options: Options | None, **named: Any) -> Options:
    """The options, with those that are ``named`` by keywords of their own. Raises :class:`OptionsError`."""
    options = replace(given_options(options), **{name: value for name, value in named.items() if value is not None})
    if options.mode == "inference":
        raise OptionsError('Options(mode="inference"): days and checkpoints are of training; ask autopar.plan')
    if options.sync != Options().sync:
        raise OptionsError(f"Options(sync={options.sync!r}): plans of replicas need a mesh of them; ask autopar.plan")
    return options


def _of_samples(batch: Batch, samples: int | None) -> tuple[Batch, int, int | None]:
    """The batch with so many ``samples`` (None: its own), their number, and how many elements the first input has of
    each; None if there is no tensor."""
    args, kwargs = split_batch(batch)
    own = batch_size(args, kwargs)
    if samples is not None:
        _check_numbers(global_batch=samples)
    first = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
    each = None if first is None else first.numel() // max(1, own)
    return batch if samples in (None, own) else resized(batch, own, samples), samples or own, each


def _check(devices: int, tokens: object, compare: Mapping[str, Layout], samples: int, cluster: Cluster) -> None:
    """Raises :class:`OptionsError` for invalid arguments, before anything takes time."""
    _check_numbers(devices=devices)
    if tokens is not None and not (isinstance(tokens, (int, float)) and 0 < tokens < math.inf):
        raise OptionsError(f"tokens={tokens!r}: not a positive number")
    if cluster.size is not None and devices > cluster.size:
        raise OptionsError(f"devices={devices}: {cluster.name} has {cluster.size}")
    unchecked: object = compare
    if not isinstance(unchecked, Mapping) or not all(isinstance(layout, Layout) for layout in unchecked.values()):
        raise OptionsError(f"compare={compare!r}: give names and an autopar.Layout of each, {{'ours': Layout(data=8)}}")
    for name, layout in compare.items():
        if layout.devices != devices:
            advice = other_degrees(layout, devices)
            raise OptionsError(f"{name}: {layout} takes {layout.devices} devices, not {devices}{advice}")
        layout.microbatches(samples)
        check_layout(layout)


def _check_numbers(**named: object) -> None:
    for name, value in named.items():
        if type(value) is not int or value < 1:
            raise OptionsError(f"{name}={value!r}: not a positive whole number")


def _checkpointed(parameter: nn.Parameter, optimizer: str) -> int:
    """Bytes of a parameter and of its optimizer's state, if it is trained."""
    state = int(OPTIMIZERS[optimizer](tuple(parameter.shape))) if parameter.requires_grad else 0
    return (parameter.numel() + state) * parameter.element_size()
