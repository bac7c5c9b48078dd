"""Makes the plans that the ranks of a program pass one plan: that of the first rank."""

from __future__ import annotations

import hashlib
import json
import warnings
from typing import Any

import torch.distributed as dist

from autopar.errors import PlanMismatchError
from autopar.ir.program import Program
from autopar.plans.json import plan_to_dict
from autopar.plans.plan import Plan
from autopar.runtime.comm.groups import AxisGroup

from .rank_zero import on_first_rank

# What a plan is for, and what execution reads of it. Everything else (prices, seconds of planning, warnings) is for
# people.
_SUBJECT = ("batch", "mesh", "stages", "microbatches", "precision", "graph_hash")
_CHOICE = ("parameters", "strategy_table", "strategies", "recomputed", "offloaded", "schedule")
_PIPELINE = ("cuts", "schedule", "wires", "own_statistics", "meshes", "borrowed")


def plan_identity(plan: Plan) -> str:
    """A hash of what ``plan`` is for and what it chooses: equal for plans that execute in the same way, whatever their
    prices and however long planning took."""
    data = plan_to_dict(plan)
    fields = {name: data.get(name) for name in (*_SUBJECT, *_CHOICE)}
    fields["pipeline"] = data["pipeline"] and {name: data["pipeline"].get(name) for name in _PIPELINE}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def agreed_plan(plan: Plan | None, ranks: AxisGroup) -> Plan | None:
    """The first rank's ``plan`` on every rank, or None if no rank has one. Collective.

    Other ranks may have none, or one with other choices, as when a time limit stopped their solvers: that gives a
    warning.

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
    others = [rank for rank, passed in enumerate(everyone) if passed and first and passed[1] != first[1]]
    if others and ranks.index == 0:
        warnings.warn(
            f"ranks {', '.join(map(str, others))} pass another plan than rank 0, as happens when a time limit stops "
            "the solver: all ranks use rank 0's. Without Options(time_limit=...) every run makes the same plan",
            stacklevel=4,
        )
    return on_first_rank(ranks, lambda: plan)


def _check(everyone: list[tuple[tuple[str, ...], str] | None]) -> None:
    first = everyone[0]
    if first is None:
        passing = [str(rank) for rank, passed in enumerate(everyone) if passed]
        raise PlanMismatchError(
            f"ranks {', '.join(passing)} pass a plan to parallelize, but rank 0, whose plan all ranks use, passes "
            "none: pass plan= on rank 0 (the others may leave it out), or on no rank"
        )
    for rank, passed in enumerate(everyone):
        different = passed and [n for n, a, b in zip(_SUBJECT, first[0], passed[0], strict=True) if a != b]
        if passed and different:
            where = _SUBJECT.index(different[0])
            raise PlanMismatchError(
                f"rank {rank} passes a plan with {different[0]} {passed[0][where]}, rank 0 one with {first[0][where]}: "
                "plan the same model for the same mesh and batch on every rank, or pass plan= on rank 0 alone"
            )


def messages_of(program: Program) -> list[tuple[str, Any]]:
    """The collectives of a program in order. All ranks must agree on it, or they wait for each other for ever."""
    sections = (program.refresh, program.forward, program.backward)
    everything = (instruction for section in sections for instruction in section.instructions)
    return [(i.op, dict(i.kwargs)["axes"]) for i in everything if "axes" in dict(i.kwargs)]
