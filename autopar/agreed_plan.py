"""A plan that the ranks of a program bring along becomes one plan: that of the first rank."""

from __future__ import annotations

import hashlib
import json
import warnings

import torch.distributed as dist

from autopar.runtime.groups import AxisGroup

from .errors import PlanMismatchError
from .first_rank import on_first_rank
from .plan import Plan
from .plan_json import plan_to_dict

# What a plan is for, and what execution reads of it. The rest (prices, seconds of planning, warnings) is for people.
_SUBJECT = ("batch", "mesh", "stages", "microbatches", "precision", "graph_hash")
_CHOICE = ("parameters", "strategy_table", "strategies", "recomputed", "schedule")
_PIPELINE = ("cuts", "schedule", "wires")


def plan_identity(plan: Plan) -> str:
    """A hash of what ``plan`` is for and what it chooses: equal for plans that run alike, whatever they were priced at
    and however long they took to make."""
    data = plan_to_dict(plan)
    kept = {name: data[name] for name in (*_SUBJECT, *_CHOICE)}
    kept["pipeline"] = data["pipeline"] and {name: data["pipeline"][name] for name in _PIPELINE}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def agreed_plan(plan: Plan | None, ranks: AxisGroup) -> Plan | None:
    """The first rank's ``plan`` on every rank, or None if no rank has one. Collective.

    Other ranks may have none, or one that chooses otherwise, as where a time limit cut off their solvers: that is
    warned of.

    Raises:
        PlanMismatchError: plans for other graphs, meshes or batches, or none on the first rank; on every rank.
    """
    if ranks.size == 1:
        return plan
    own = plan and (tuple(str(getattr(plan, name)) for name in _SUBJECT), plan_identity(plan))
    everyone: list[tuple[tuple[str, ...], str] | None] = [None] * ranks.size
    dist.all_gather_object(everyone, own, group=ranks.group)
    if not any(everyone):
        return None
    _check(everyone)
    first = everyone[0]
    others = [rank for rank, found in enumerate(everyone) if found and first and found[1] != first[1]]
    if others and ranks.index == 0:
        warnings.warn(
            f"ranks {', '.join(map(str, others))} bring another plan than rank 0, as solvers do that a time limit cuts "
            "off: rank 0's is used on all ranks. With a longer Options(time_limit=...) plans are the same on every run",
            stacklevel=4,
        )
    return on_first_rank(ranks, lambda: plan)


def _check(everyone: list[tuple[tuple[str, ...], str] | None]) -> None:
    first = everyone[0]
    if first is None:
        given = [str(rank) for rank, found in enumerate(everyone) if found]
        raise PlanMismatchError(
            f"ranks {', '.join(given)} pass a plan to parallelize, but rank 0, whose plan all ranks follow, passes "
            "none: pass plan= on rank 0 (the others may leave it out), or on no rank"
        )
    for rank, found in enumerate(everyone):
        different = found and [n for n, a, b in zip(_SUBJECT, first[0], found[0], strict=True) if a != b]
        if found and different:
            where = _SUBJECT.index(different[0])
            raise PlanMismatchError(
                f"rank {rank} passes a plan with {different[0]} {found[0][where]}, rank 0 one with {first[0][where]}: "
                "plan the same model for the same mesh and batch on every rank, or pass plan= on rank 0 alone"
            )
