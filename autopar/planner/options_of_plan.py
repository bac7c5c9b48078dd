"""Options beside a plan that was made before: they may not ask for another plan."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace

from autopar.errors import PlanMismatchError
from autopar.ir.placements import is_shard
from autopar.ir.plan_record import PlanRecord
from autopar.offload import IN_TIER, asked
from autopar.options import Options, under_policy
from autopar.restriction import words_of
from autopar.sync import EVERY_STEP

# Options that decide a plan's prices and none of its choices: others may be asked for beside it.
PRICED = ("optimizer", "compile", "imbalance")


def options_under(options: Options, plan: PlanRecord) -> Options:
    """``options`` with the precision that ``plan`` was made for, and with its optimizer, ``compile`` and ``imbalance``
    where they are not given. Raises :class:`PlanMismatchError` if they ask for what it is not, as far as that can
    be told from it: a plan does not say whether it was searched under ``recompute="full"``, and of ZeRO only what it
    shards."""
    for wanted, found in _contradictions(options, plan):
        raise PlanMismatchError(
            f"Options({wanted}) is asked for, but the plan that is given has {found}: leave the option out to run as "
            "planned, or make a plan with it"
        )
    return priced_as(options, plan)


def priced_as(options: Options, plan: PlanRecord) -> Options:
    """``options`` as ``plan`` was priced: with its precision and, where they are not given, its :data:`PRICED`
    options. Raises :class:`PlanMismatchError` if they fix another precision."""
    planned = {name: getattr(plan, name) for name in PRICED if name not in options.given}
    return replace(under_policy(options, plan.precision), **planned)


def _contradictions(options: Options, plan: PlanRecord) -> Iterator[tuple[str, str]]:
    """What is asked for, and what the plan has instead."""
    for name in ("stages", "microbatches", "schedule"):
        wanted, found = getattr(options, name), getattr(plan, name)
        if name == "stages" and isinstance(wanted, tuple):
            found = plan.stage_meshes.sizes
        if wanted not in (None, found):
            yield f"{name}={wanted!r}", f"{name}={found!r}"
    if options.sync == EVERY_STEP and plan.sync is not None:
        yield f"sync={options.sync!r}", f"{plan.sync.replicas} replicas that are kept together by {plan.sync.method}"
    if options.recompute == "none" and plan.recomputed:
        yield "recompute='none'", f"{len(plan.recomputed)} operations that are recomputed"
    yield from _contradicted_offload(options.offload, plan)
    yield from _contradicted_zero(options.zero, plan)
    if options.pins and dict(options.pins) != dict(plan.pinned):
        yield f"pins={dict(options.pins)}", f"pins={dict(plan.pinned)}"
    if options.layout is not None and options.layout.restriction != plan.layout:
        yield f"layout={words_of(options.layout)}", f"the layout {plan.layout!r}" if plan.layout else "no layout"
    if options.memory_bytes is not None and plan.predicted.peak_bytes > options.memory_bytes:
        yield f"memory_limit={options.memory_bytes}", f"a peak of {plan.predicted.peak_bytes} bytes"


def _contradicted_offload(offload: object, plan: PlanRecord) -> Iterator[tuple[str, str]]:
    """Tiers that are asked for, but not those of the plan. Of activations, what could be moved but stays is not
    known."""
    wishes, predicted = asked(offload), plan.predicted
    tiers = {place.offload for place in plan.parameters.values()}
    wanted = wishes["optimizer"]
    has_state = predicted.optimizer_bytes + predicted.host_bytes + predicted.nvme_bytes > 0
    differs = bool(tiers - {""}) if wanted == "device" else wanted not in tiers
    if wanted is not None and has_state and differs:
        where = " and ".join(IN_TIER[tier] if tier else "in the memory of devices" for tier in sorted(tiers))
        yield f"offload={offload!r}", f"optimizer state {where}"
    activations = [name for name in plan.offloaded if name in plan.strategies]
    weights = len(plan.offloaded) - len(activations)
    if wishes["activations"] == "device" and activations:
        yield f"offload={offload!r}", f"{len(activations)} saved activations in host memory"
    if wishes["weights"] == "device" and weights:
        yield f"offload={offload!r}", f"{weights} weights in host memory"
    if wishes["weights"] == "host" and not weights:
        yield f"offload={offload!r}", "all weights in the memory of devices"


def _contradicted_zero(zero: int | None, plan: PlanRecord) -> Iterator[tuple[str, str]]:
    """A stage of ZeRO that the plan is not, by what it shards."""
    places = plan.parameters.values()
    sharded = any(any(map(is_shard, place.optimizer)) for place in places)
    if zero == 0 and any(place.optimizer != place.weight for place in places):
        yield "zero=0", "optimizer state in more shards than weights"
    elif zero and not sharded and _can_be_sharded(plan):
        yield f"zero={zero}", "optimizer state on every device"
    elif zero == 3 and any(place.optimizer != place.weight for place in places):
        yield "zero=3", "weights in fewer shards than optimizer state"


def _can_be_sharded(plan: PlanRecord) -> bool:
    """Whether some parameter has a dim that all devices could share."""
    devices = math.prod(plan.mesh)
    types = (plan.nodes[name].type for name in plan.parameter_nodes.values())
    return devices > 1 and any(int(size) >= devices for kind in types for size in re.findall(r"\d+(?=[,\]])", kind))
