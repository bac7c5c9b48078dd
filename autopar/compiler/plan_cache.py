"""Caches plans: the same request gets the same plan, in this process, in the next run and on other ranks.

A plan is cached under a hash of everything it depends on (:func:`plan_key`): the graph, the mesh, the cluster, the
options, the rules found for operations that autopar has no rule for, and the code that makes plans. A cached plan
equals the one that was written, including ``solve_seconds``, the time that solving took then; ``timings`` are those of
this process, with the phase ``cache`` alone.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import torch

from autopar.content.cache_folder import caching_enabled
from autopar.content.disk_cache import key_of, read, write
from autopar.content.source_hash import code_version
from autopar.content.tensor_digest import tensor_digest
from autopar.errors import AutoparError, OperatorError
from autopar.passes.annotate.annotate import needs_finding, rule_findings
from autopar.planner.request import PlanRequest, is_compiled, mesh_candidates
from autopar.planner.step_graphs import step_graph
from autopar.planner.timings import Timings
from autopar.plans.from_data import fields_from_dict
from autopar.plans.json import data_from_json
from autopar.plans.plan import Plan
from autopar.rare_collections import collecting_rarely
from autopar.search.attempts import proposes

from .late_search import best_plan

KIND = "plans"
# The plans of this process.
_plans: OrderedDict[str, Plan] = OrderedDict()
# Chosen: as many as programs of a model are kept (runtime/calls/programs.py).
_PLANS_LIMIT = 64
# Options that no plan depends on.
_NOT_PLANNED = ("check_inputs", "timeout", "compile", "check_every", "nonfinite", "pad_to", "sync", "given")
_log = logging.getLogger(__name__)


@collecting_rarely()
def cached_plan(request: PlanRequest, timings: Timings) -> Plan:
    """What :func:`autopar.search.best_plan.best_plan` returns, from the cache if it is there. Raises its errors, which
    are not cached."""
    if not caching_enabled():
        return best_plan(request, timings)
    lookup = Timings()
    with lookup.phase("cache"):
        try:
            key = plan_key(request)
        except OperatorError:  # From an operation's rule: planning says where the operation is called.
            return best_plan(request, timings)
        cached = _cached(key)
    if cached is not None:
        return replace(cached, timings=dict(lookup.seconds))
    plan = best_plan(request, timings)
    if _is_cacheable(request, plan, timings):
        _remember(key, plan)
        write(KIND, key, plan.to_json())
    return plan


def forget() -> None:
    """Forgets the plans of this process; those on disk stay."""
    _plans.clear()


def _cached(key: str) -> Plan | None:
    if key in _plans:
        _plans.move_to_end(key)
        return _plans[key]
    text = read(KIND, key)
    if text is None:
        return None
    try:
        # Not validated: its hash says that it is what this code wrote.
        plan = Plan(**fields_from_dict(data_from_json(text)))
    except (AutoparError, TypeError) as error:
        _log.debug("plan %s is not used: %s", key, error)
        return None
    _remember(key, plan)
    return plan


def _remember(key: str, plan: Plan) -> None:
    _plans[key] = plan
    while len(_plans) > _PLANS_LIMIT:
        _plans.popitem(last=False)


def _is_cacheable(request: PlanRequest, plan: Plan, timings: Timings) -> bool:
    """False if a time limit stopped the search: the next one may do better. (A gap that is wide for lack of memory,
    not of time, stays, and so does what counted work found.) False if rules were found for a microbatch, whose sizes
    are not part of the key, or placements for another limit of memory: without those, the search may find others."""
    is_limited = not timings.counts(request.options)
    if timings.reuses or (is_limited and timings.is_spent(request.options)):
        return False
    if is_limited and plan.status != "optimal" and plan.gap > request.options.gap and timings.cut_off:
        return False
    return plan.pipeline is None or not needs_finding(request.graph)


def plan_key(request: PlanRequest) -> str:
    """A hash of everything that a plan depends on."""
    return key_of(_ingredients(request))


def _ingredients(request: PlanRequest) -> Iterator[str]:
    yield code_version()
    for field in fields(request):
        if field.name == "propose":
            yield f"proposes={proposes(request)}"
        elif field.name not in ("graph", "cluster", "options", "shared", "asked"):  # The last is for errors alone.
            yield f"{field.name}={getattr(request, field.name)!r}"
    for field in fields(request.options):
        if field.name in _NOT_PLANNED:
            continue
        yield f"options.{field.name}={_plain(getattr(request.options, field.name))!r}"
    yield f"compiled={_compiled(request)!r}"
    yield request.cluster.to_toml()
    yield request.graph.to_text()
    for name, constant in request.graph.constants.items():
        yield f"{name}={_digest(constant)}"
    if needs_finding(request.graph):
        graph = step_graph(request.graph, request.loss, request.batch)
        sizes = sorted({size for size in _axis_sizes(request) if size > 1})
        yield from (repr(finding) for size in sizes for finding in rule_findings(graph, size))


def _compiled(request: PlanRequest) -> tuple[bool, ...]:
    """Whether pieces are compiled: on the devices of each group, for stages of one kind, and on all of them in step."""
    cluster = request.cluster
    alone = (replace(cluster, device=group.device, groups=()) for group in cluster.groups)
    return tuple(map(is_compiled, (request, *(replace(request, cluster=kind) for kind in alone))))


def _axis_sizes(request: PlanRequest) -> Iterator[int]:
    """The sizes that axes of a plan may have. Those of a layout divide the number of devices."""
    devices = math.prod(request.mesh)
    if request.options.layout is not None:
        yield from (size for size in range(1, devices + 1) if devices % size == 0)
    for mesh in mesh_candidates(request):
        yield from mesh


def _plain(value: Any) -> Any:
    return list(value.items()) if isinstance(value, dict) else value


def _digest(constant: torch.Tensor) -> str:
    return tensor_digest(constant) or f"a tensor of {constant.dtype} {tuple(constant.shape)} on {constant.device}"
