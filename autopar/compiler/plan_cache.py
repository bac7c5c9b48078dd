"""Caches plans: the same request gets the same plan, in this process, in the next run and on other ranks.

A plan is kept under a hash of everything it follows from (:func:`plan_key`): the graph, the mesh, the cluster, the
options, the rules of operations that autopar has no rule for, and the code that makes plans. What is read again equals
what was kept, ``solve_seconds`` included, which says what solving took then; ``timings`` are those of this process, and
name the phase ``cache`` alone.
"""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import torch

from autopar.content.cache_folder import keeps_work
from autopar.content.kept_work import read, write
from autopar.content.source_hash import code_version
from autopar.content.tensor_digest import tensor_digest
from autopar.errors import AutoparError, OperatorError
from autopar.passes.annotate.annotate import needs_finding, rule_findings
from autopar.planner.request import PlanRequest, mesh_candidates
from autopar.planner.step_graphs import step_graph
from autopar.planner.timings import Timings
from autopar.plans.plan import Plan
from autopar.search.best_plan import best_plan

KIND = "plans"
# Those of this process.
_known: OrderedDict[str, Plan] = OrderedDict()
# Chosen: as many as programs of a model are kept (runtime/calls/programs.py).
_KNOWN_LIMIT = 64
_log = logging.getLogger(__name__)


def cached_plan(request: PlanRequest, timings: Timings) -> Plan:
    """What :func:`autopar.search.best_plan.best_plan` says, made now or kept from before; its errors, which are not
    kept."""
    if not keeps_work():
        return best_plan(request, timings)
    lookup = Timings()
    with lookup.phase("cache"):
        try:
            key = plan_key(request)
        except OperatorError:  # Of an operation's rule: planning says where it is called.
            return best_plan(request, timings)
        found = _kept(key)
    if found is not None:
        return replace(found, timings=dict(lookup.seconds))
    made = best_plan(request, timings)
    if _may_be_kept(request, made):
        _remember(key, made)
        write(KIND, key, made.to_json())
    return made


def forget() -> None:
    """Forgets the plans of this process; those on disk stay."""
    _known.clear()


def _kept(key: str) -> Plan | None:
    if key in _known:
        _known.move_to_end(key)
        return _known[key]
    text = read(KIND, key)
    if text is None:
        return None
    try:
        found = Plan.from_json(text)
    except AutoparError as error:
        _log.debug("plan %s is not used: %s", key, error)
        return None
    _remember(key, found)
    return found


def _remember(key: str, plan: Plan) -> None:
    _known[key] = plan
    while len(_known) > _KNOWN_LIMIT:
        _known.popitem(last=False)


def _may_be_kept(request: PlanRequest, plan: Plan) -> bool:
    """Not if the time limit cut it off: the next search may do better. Not if rules were found for a microbatch, whose
    sizes the key does not look at."""
    if plan.status != "optimal" and plan.gap > request.options.gap:
        return False
    return plan.pipeline is None or not needs_finding(request.graph)


def plan_key(request: PlanRequest) -> str:
    """A hash of everything that an answer follows from."""
    digest = hashlib.sha256()
    for line in _ingredients(request):
        digest.update(f"{len(line)}:{line}\n".encode())
    return digest.hexdigest()


def _ingredients(request: PlanRequest) -> Iterator[str]:
    yield code_version()
    for field in fields(request):
        if field.name not in ("graph", "cluster", "options"):
            yield f"{field.name}={getattr(request, field.name)!r}"
    for field in fields(request.options):
        yield f"options.{field.name}={_plain(getattr(request.options, field.name))!r}"
    yield request.cluster.to_toml()
    yield request.graph.to_text()
    for name, constant in request.graph.constants.items():
        yield f"{name}={_digest(constant)}"
    if needs_finding(request.graph):
        graph = step_graph(request.graph, request.loss, request.batch)
        sizes = sorted({size for mesh in mesh_candidates(request) for size in mesh if size > 1})
        yield from (repr(found) for size in sizes for found in rule_findings(graph, size))


def _plain(value: Any) -> Any:
    return list(value.items()) if isinstance(value, dict) else value


def _digest(constant: torch.Tensor) -> str:
    return tensor_digest(constant) or f"a tensor of {constant.dtype} {tuple(constant.shape)} on {constant.device}"
