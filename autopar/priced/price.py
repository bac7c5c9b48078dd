"""Prices a layout chosen by hand: by the plan to which it restricts the search."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
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
    given = {"loss_fn": loss_fn, "targets": targets, "work": SharedWork()}
    return price_with(model, batch, Cluster.get(cluster), layout, given_options(options), **given)


def price_with(
    model: nn.Module, batch: Batch, cluster: Cluster, layout: Layout, options: Options, **given: Any
) -> Priced:
    """:func:`price`. ``given``: what else :func:`autopar.api.make_plan` takes, such as the ``work`` that plans of the
    same model for other arguments have in common with this."""
    check_model(model)
    check_layout(layout)
    check_beside_layout(options)
    full, restriction = _completed(layout, model)
    if cluster.size is not None and full.devices > cluster.size:
        raise OptionsError(f"{full} takes {full.devices} devices; {cluster.name} has {cluster.size}")
    options = replace(options, layout=restriction)
    planned, needed = partial(make_plan, model, full.mesh, batch, advises=False, **given), None
    try:
        plan = planned(options=options, cluster=cluster)
    except InfeasibleError as error:
        plan = _without_limit(planned, options, cluster, usable_bytes(cluster.among(full.devices)))
        # Of a stage, errors know what the average one needs. In as much as there is, nothing was found.
        if full.pipeline == 1 and not cluster.groups and (error.needed_bytes or 0) > plan.memory_limit:
            needed = error.needed_bytes
    rate, notes = device_flops(plan, cluster.among(full.devices)), notes_on(plan, cluster)
    return Priced(plan, full, plan.memory_limit, plan.predicted.mfu * rate, notes, needed)


def _without_limit(planned: Callable[..., Plan], options: Options, cluster: Cluster, usable: float) -> Plan:
    """The plan of ``options`` with :data:`UNLIMITED` bytes more, as the one that was asked for: with what devices may
    hold. ``usable``: bytes of the smallest."""
    asked, differs = options.memory_bytes, bool(cluster.groups)
    limit = int(min(asked or usable, usable) if differs else asked or usable)
    allowed = (asked or 0) + UNLIMITED if asked or not differs else None
    plan = planned(options=replace(options, memory_limit=allowed), cluster=_with_memory(cluster))
    question, pipeline = question_of(plan), plan.pipeline
    question = replace(question, arguments={**question.arguments, "options": options, "cluster": cluster})
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
