"""Prices a layout chosen by hand: by the plan to which it restricts the search."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autopar.api import make_plan
from autopar.arguments import Batch, check_model, given_options
from autopar.cluster.description import Cluster
from autopar.cluster.groups import Group
from autopar.cost import reserve, usable_bytes
from autopar.errors import InfeasibleError, OptionsError
from autopar.keywords import suggests
from autopar.layout import Layout
from autopar.options import Options
from autopar.planner.request import UNLIMITED
from autopar.planner.shared_work import SharedWork
from autopar.plans.plan import Plan
from autopar.plans.question import question_of, remember
from autopar.restriction import SHARED, check_layout

from .figures import device_flops, notes_on
from .precision import planned_precision
from .priced import Priced

# What options must not say beside a layout: it says so by a field, or its devices and its batch would be others.
OF_LAYOUTS = {option: name for name, option in SHARED.items()} | {"microbatches": "microbatch"}


@suggests
def price(
    model: nn.Module,
    batch: Batch,
    cluster: str | Cluster,
    *,
    layout: Layout,
    options: Options | None = None,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    targets: Any = None,
) -> Priced:
    """Prices a step of ``model`` on global batches like ``batch`` under a layout chosen by hand, and says whether it
    fits: by the plan of ``Options(layout=layout)``, with every field of the layout given. What it leaves out has its
    default: degrees are 1, the schedule is ``"1f1b"`` (with several chunks ``"interleaved"``). No devices are needed.

    A layout that does not fit is planned once more without a limit of memory: ``fits`` is then False, and
    ``excess_bytes`` says by how much at most.

    Args:
        cluster: the hardware: a name, a file or a :class:`Cluster`.
        layout: a model in fp32 is planned in the layout's precision, ``"bf16"`` by default, as by
            ``Options(precision=...)``: products in 16 bits, parameters and optimizer state in fp32. A model that is in
            this precision, or in 16 bits where the layout gives none, is planned as it is.
        options: of the plan, except for fields of the layout: ``memory_limit``, ``optimizer``, ``compile``, pins of
            stages, ...
        loss_fn, targets: as for :func:`autopar.plan`.

    Raises:
        TraceError: the model cannot be captured.
        OptionsError: layers, batch, sequence, heads, experts or devices cannot be divided so, or options say what
            the layout does.
        InfeasibleError: there is no such plan, however much memory devices have.
    """
    return price_with(model, batch, cluster, layout, given_options(options), loss_fn, targets, SharedWork())


def price_with(
    model: nn.Module,
    batch: Batch,
    cluster: str | Cluster,
    layout: Layout,
    options: Options,
    loss_fn: Callable[..., torch.Tensor] | None,
    targets: Any,
    work: SharedWork,
) -> Priced:
    """:func:`price`. ``work``: what it has in common with plans of the same model for other arguments."""
    check_model(model)
    check_layout(layout)
    check_beside_layout(options)
    full, restriction = _completed(layout, model)
    hardware = Cluster.get(cluster)
    if hardware.size is not None and full.devices > hardware.size:
        raise OptionsError(f"{full} takes {full.devices} devices; {hardware.name} has {hardware.size}")
    restricted = replace(options, layout=restriction)

    def planned(options: Options, cluster: Cluster) -> Plan:
        arguments: dict[str, Any] = {"loss_fn": loss_fn, "targets": targets, "work": work, "advises": False}
        return make_plan(model, full.mesh, batch, options=options, cluster=cluster, **arguments)

    needed = None
    try:
        plan = planned(restricted, hardware)
        limit = plan.memory_limit
    except InfeasibleError as error:
        # Of a stage, errors know what the average one needs.
        needed = error.needed_bytes if full.pipeline == 1 and not hardware.groups else None
        usable = usable_bytes(hardware.among(full.devices))
        limit = int(min(options.memory_bytes or usable, usable) if hardware.groups else options.memory_bytes or usable)
        allowed = (options.memory_bytes or 0) + UNLIMITED if options.memory_bytes or not hardware.groups else None
        plan = planned(replace(restricted, memory_limit=allowed), _with_memory(hardware))
        plan = _within(plan, limit, options=restricted, cluster=hardware)
    rate, notes = device_flops(plan, hardware.among(full.devices)), notes_on(plan, hardware)
    return Priced(plan, full, limit, plan.predicted.mfu * rate, notes, needed)


def _within(plan: Plan, limit: int, **asked: Any) -> Plan:
    """A plan that was made with :data:`UNLIMITED` bytes more, as the plan that was ``asked`` for: with what devices may
    hold."""
    question = question_of(plan)
    question = replace(question, arguments={**question.arguments, **asked})
    pipeline = plan.pipeline
    if pipeline is not None:
        pipeline = replace(pipeline, limits=tuple(each - UNLIMITED for each in pipeline.limits))
    return remember(replace(plan, memory_limit=limit, pipeline=pipeline, device_peaks=(), device_limits=()), question)


def _with_memory(cluster: Cluster) -> Cluster:
    """The cluster whose devices, if they are of several kinds, may each hold :data:`UNLIMITED` bytes more."""

    def with_more(group: Group) -> Group:
        device, kept = group.device, reserve(replace(cluster, device=group.device, groups=()))
        more = device.memory_bytes + UNLIMITED
        return replace(group, device=replace(device, memory_bytes=more, reserve_bytes=kept, reserve_fraction=0.0))

    return cluster.with_groups(*map(with_more, cluster.groups)) if cluster.groups else cluster


def _completed(layout: Layout, model: nn.Module) -> tuple[Layout, Layout]:
    """The layout with every field given, and what of it restricts the plan: all but the precision of a model that is
    planned as it is. Raises :class:`OptionsError` if the fields contradict each other."""
    shown, option = planned_precision(model, layout.precision if "precision" in layout.given else None)
    schedule = layout.schedule_name if layout.pipeline > 1 else layout.schedule
    full = replace(layout, schedule=schedule, precision=shown).completed()
    values = {name: getattr(full, name) for name in full.given if name != "precision"}
    return full, Layout(**values) if option is None else full


def check_beside_layout(options: Options) -> None:
    """Raises :class:`OptionsError` for options that a layout says, or under which its devices or batch would be
    others."""
    defaults = Options()
    if options.layout is not None:
        raise OptionsError("options have a layout too: give one of them, price(layout=...)")
    for name in (*OF_LAYOUTS, "mode", "sync"):
        value, field = getattr(options, name), OF_LAYOUTS.get(name)
        if value == getattr(defaults, name):
            continue
        if field is not None:
            works = f"write layout=Layout({field}={'...' if field == 'microbatch' else repr(value)})"
            raise OptionsError(f"Options({name}={value!r}) is said by the layout: {works}")
        raise OptionsError(
            f"Options({name}={value!r}): prices are of training by all devices together; leave it out, or ask "
            "autopar.plan with Options(layout=...)"
        )
