"""Solves the placement program within its memory limit. Adds recomputation and offload only where they are needed.

Both cost time and save only memory. So the program without them is solved first, without a memory limit. If that
solution fits, it is the best one. Otherwise the larger program is solved, in which every saved value is kept or
recomputed and both activations and optimizer states rest on the device or in another tier
(:mod:`autopar.placement.formulation`). The limit of host memory is another row of that program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.cluster.description import Cluster
from autopar.cost import usable_nvme_bytes
from autopar.errors import InfeasibleError, OptionsError
from autopar.ir.assignment import Offloaded, ParameterPlacement, Recomputed, WeightInHost
from autopar.ir.node import SAVED_ACTIVATION, Node
from autopar.offload import TIERS, Destination, allowed, required
from autopar.optimizers import ELEMENTWISE
from autopar.options import Options
from autopar.passes.recompute.recomputable import recomputable
from autopar.placement.choices import Choice, offloaded_strategy
from autopar.placement.constraints import with_choices
from autopar.placement.formulation import Instance, build_instance
from autopar.placement.parameter_choices import with_weight_in_host
from autopar.plans.views.quantities import duration
from autopar.solver.problem import Ints, Solution, evaluate, is_within, memory_of

Solve = Callable[[Instance, Sequence[Ints]], Solution]
# The backends of devices whose weights can rest in host memory. A GPU's optimizer would have to visit it for updates,
# and gradients to go there, which is not written.
HOST_WEIGHTS = ("gloo",)
# How often a program is solved again with less memory. Chosen: each round costs a solve.
ROUNDS = 4


class TooSlowError(InfeasibleError):
    """No placement of a step takes less than ``seconds``, which is more than it may: proven by the program, whose equal
    layers choose alike, unless ``is_proven`` says that the seconds are an estimate from the program's."""

    def __init__(self, what: str, seconds: float, is_proven: bool = True) -> None:
        super().__init__(f"{what} take {'at least' if is_proven else 'about'} {duration(seconds)}")
        self.seconds = seconds
        self.is_proven = is_proven


def fits(instance: Instance, solution: Solution) -> bool:
    """Whether a solution of a restricted instance is one of ``instance``."""
    return (
        solution.status != "infeasible"
        and is_within(instance.problem, solution.choices)
        and math.isfinite(evaluate(instance.problem, solution.choices))
    )


def without_limit(instance: Instance) -> Instance:
    return replace(instance, problem=replace(instance.problem, memory_limit=math.inf))


@dataclass(frozen=True, eq=False)
class Solved:
    """A solution, and the instance that had to be solved for it. ``unlimited``: a lower bound in seconds for any memory
    limit, if one is known."""

    instance: Instance
    solution: Solution
    unlimited: float = -math.inf


def solve_within(
    options: Options, plain: Instance, widen: Callable[[], Instance], solve: Solve, incumbents: Sequence[Ints]
) -> Solved:
    """Solves ``plain`` if that suffices, otherwise the instance that ``widen`` returns. ``incumbents`` are choices of
    ``plain``; they mean the same in both. Raises :class:`OptionsError` if ``options`` ask for offload where it is
    impossible."""
    check_offload(options, plain.prices.cluster)
    if not may_widen(options, plain):
        return Solved(plain, solve(plain, [c for c in incumbents if _within(plain, c)]))
    unlimited = -math.inf
    if options.recompute in (None, "none") and not required(options.offload):
        free = solve(without_limit(plain), incumbents)
        if fits(plain, free):
            return Solved(plain, free, free.bound)
        unlimited = free.bound
        incumbents = [free.choices, *incumbents] if free.status != "infeasible" else incumbents
    wide = widen()
    return Solved(wide, solve_wide(wide, solve, incumbents), unlimited)


def solve_wide(wide: Instance, solve: Solve, incumbents: Sequence[Ints]) -> Solution:
    """Solves a widened instance. ``incumbents`` are choices of the instance before it was widened."""
    recomputing = list(_recomputing(wide, incumbents))
    starts = [*incumbents, *recomputing]
    if not wide.offload:
        return solve(wide, starts)
    return solve(wide, [*starts, *(_with_offload(wide, choices) for choices in [*incumbents[:1], *recomputing])])


def _within(instance: Instance, choices: Ints) -> bool:
    return is_within(instance.problem, choices)


def may_widen(options: Options, plain: Instance) -> bool:
    """Whether ``options`` allow anything that :func:`widened` adds to ``plain``."""
    return not plain.is_wide and (options.recompute != "none" or bool(destinations(options, plain)))


def destinations(options: Options, plain: Instance) -> frozenset[Destination]:
    """What may rest where: as ``options`` and the hardware allow."""
    device = plain.prices.cluster.device
    tiers = [tier for tier, exists in (("host", device.has_host), ("nvme", device.has_nvme)) if exists]
    kinds = {"activations"} | ({"optimizer"} if plain.optimizer in ELEMENTWISE else set())
    kinds |= {"weights"} if plain.prices.cluster.backend in HOST_WEIGHTS else set()
    return frozenset((kind, tier) for kind, tier in allowed(options.offload) if tier in tiers and kind in kinds)


def widened(plain: Instance, options: Options) -> Instance:
    """The instance in which values may be recomputed and tensors may rest in other tiers of memory, as far as
    ``options`` allow. If they require one of these, only choices with it remain."""
    possible = None if options.recompute == "none" else recomputable(plain.graph)
    wide = build_instance(
        plain.graph,
        plain.prices,
        optimizer=plain.optimizer,
        memory_limit=plain.problem.memory_limit,
        host_limit=plain.problem.host_limit,
        repeats=plain.repeats,
        recomputable=possible,
        offload=destinations(options, plain),
    )
    if ("optimizer", "nvme") in required(options.offload):
        _check_disk(wide)
    wide = with_choices(wide, _rests(wide, required(options.offload)))
    if possible is None or options.recompute is None:
        return wide
    dropped = possible.full if options.recompute == "full" else possible.selective
    return with_choices(wide, _follows(wide, dropped))


def check_offload(options: Options, cluster: Cluster) -> None:
    """Raises :class:`OptionsError` if ``options`` ask for offload, but the device has no such tier or the optimizer
    cannot be offloaded."""
    needed = required(options.offload)
    if {"optimizer"} & {kind for kind, _ in needed} and options.optimizer not in ELEMENTWISE:
        raise OptionsError(
            f"offload={options.offload!r}: {options.optimizer} does not treat every element by itself, and its state "
            f"must stay on the device; leave offload out, or use one of {', '.join(sorted(ELEMENTWISE))}"
        )
    if ("weights", "host") in needed and cluster.backend not in HOST_WEIGHTS:
        raise OptionsError(
            f"offload={options.offload!r}: weights in host memory are for processes without accelerators so far, and "
            f"cluster {cluster.name!r} is of {cluster.device.name}; leave 'weights' out, or shard them (zero=3)"
        )
    tiers = {tier for _, tier in needed}
    if "host" in tiers and not cluster.device.has_host:
        raise OptionsError(
            f"offload={options.offload!r}: the devices of cluster {cluster.name!r} have no host memory; leave offload "
            "out, or give host_bandwidth and host_memory_bytes in the [device] table of the cluster"
        )
    if "nvme" in tiers and not cluster.device.has_nvme:
        raise OptionsError(
            f"offload={options.offload!r}: cluster {cluster.name!r} describes no local disk; leave offload "
            "out, or give nvme_read_bandwidth, nvme_write_bandwidth and nvme_bytes in the [device] table of the cluster"
        )


def _check_disk(wide: Instance) -> None:
    """Raises :class:`InfeasibleError` if the disk has no room for the state of a parameter, however it is sharded."""
    for (name, choices), group in zip(_groups(wide), wide.problem.groups, strict=True):
        on_disk = [
            k for k, choice in enumerate(choices) if isinstance(choice, ParameterPlacement) and choice.offload == "nvme"
        ]
        if on_disk and not np.isfinite(group.cost[on_disk]).any():
            cluster, path = wide.prices.cluster, wide.graph[name].target
            raise InfeasibleError(
                f"offload asks for all optimizer state on a local disk, but cluster {cluster.name!r} has only "
                f"{usable_nvme_bytes(cluster)} bytes of it for each device: with its share of the rest, the state of "
                f"{path} does not fit. What would lower it: offload=None, so that only some of it goes there; more "
                "devices to shard it over; an optimizer with less state; or a larger nvme_bytes, if the disk has it"
            )


def _rests(wide: Instance, needed: frozenset[Destination]) -> Callable[[Node, Choice], bool]:
    """Allows the choices in which everything that is to rest elsewhere does, unless nothing of it can: a parameter
    without state, an activation that is recomputed."""
    tiers: dict[str, str] = dict(needed)

    def allowed(node: Node, choice: Choice) -> bool:
        if isinstance(choice, ParameterPlacement):
            group = wide.choices[wide.group_of(node.name)]
            can = any(isinstance(other, ParameterPlacement) and other.offload for other in group)
            is_there = "weights" not in tiers or isinstance(choice, WeightInHost)
            return is_there and ("optimizer" not in tiers or not can or choice.offload == tiers["optimizer"])
        return "activations" not in tiers or node.op != SAVED_ACTIVATION or isinstance(choice, (Offloaded, Recomputed))

    return allowed


def _follows(wide: Instance, dropped: frozenset[str]) -> Callable[[Node, Choice], bool]:
    def allowed(node: Node, choice: Choice) -> bool:
        return node.op != SAVED_ACTIVATION or isinstance(choice, Recomputed) == (node.name in dropped)

    return allowed


def _recomputing(wide: Instance, incumbents: Sequence[Ints]) -> Iterator[Ints]:
    """Starting points: the first of ``incumbents``, with more and more of its activations recomputed."""
    if wide.recomputable is None:
        return
    saved = frozenset(name for name in wide.recomputable.nodes if wide.graph[name].op == SAVED_ACTIVATION)
    for choices in incumbents[:1]:
        for dropped in (wide.recomputable.selective, wide.recomputable.cheap, wide.recomputable.full, saved):
            yield _with_recomputed(wide, choices, wide.recomputable.chain(dropped))


def _with_recomputed(wide: Instance, choices: Ints, names: frozenset[str]) -> Ints:
    """``choices`` of an instance without recomputation, with all of ``names`` recomputed. In the list of a group, the
    choices that recompute follow the others, in the same order."""
    shift = [_first(c, Recomputed) if name in names else 0 for name, c in _groups(wide)]
    return choices + np.array(shift, dtype=np.int64)


def _first(choices: tuple[Choice, ...], kind: type) -> int:
    """The position of the first of ``choices`` of a kind, which is how far each is behind its plain form; 0 if there is
    none."""
    return next((i for i, choice in enumerate(choices) if isinstance(choice, kind)), 0)


def _with_offload(wide: Instance, choices: Ints) -> Ints:
    """``choices`` with as much optimizer state, then activations, in host memory as fits there, and other state on
    disk."""
    offloaded, remaining = choices.copy(), wide.problem.host_limit
    for index, (offered, group) in enumerate(zip(wide.choices, wide.problem.groups, strict=True)):
        for away in _away(offered[int(choices[index])]):
            position = offered.index(away) if away in offered else None
            if position is not None and group.host[position] <= remaining and np.isfinite(group.cost[position]):
                offloaded[index] = position
                remaining -= float(group.host[position])
                break
    return offloaded


def _away(choice: Choice) -> tuple[Choice, ...]:
    """What a choice becomes if its tensor rests elsewhere, the quickest tier first."""
    if isinstance(choice, ParameterPlacement):
        states = tuple(replace(choice, offload=tier) for tier in TIERS["optimizer"])
        return (*states, *with_weight_in_host((choice, *states)))
    return () if isinstance(choice, Recomputed) else (offloaded_strategy(choice),)


def _groups(instance: Instance) -> Iterator[tuple[str, tuple[Choice, ...]]]:
    return zip(instance.names, instance.choices, strict=True)


def tightened(instance: Instance, choices: Ints, peak: int, limit: float) -> Instance | None:
    """The instance with a lower memory limit, which excludes ``choices``. None if ``peak``, their measured memory,
    is within ``limit``."""
    if peak <= limit:
        return None
    problem = instance.problem
    # 2% more than what is too much: chosen, so that few rounds are needed.
    less = min(problem.memory_limit - 1.02 * (peak - limit), memory_of(problem, choices) - 1.0)
    return replace(instance, problem=replace(problem, memory_limit=less))
