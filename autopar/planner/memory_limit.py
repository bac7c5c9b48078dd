"""Solves the placement program within its memory limit. Adds recomputation and offload only where they are needed.

Both cost time and save only memory. So the program without them is solved first, without a memory limit. If that
solution fits, it is the best one. Otherwise the larger program is solved, in which every saved value is kept or
recomputed and both activations and optimizer states rest on the device or in another tier
(:mod:`autopar.placement.formulation`). The limit of host memory is another row of that program.

The program mostly counts more than a step holds: all gradients beside all activations, and the largest operation on
top. A step of one pass needs less, as its rehearsal tells (:mod:`autopar.planner.steps.exact_memory`), and how much
less depends on the choices. So the program's limit is not that of the device, but is sought (:func:`next_limit`): as
high as the solutions that it leads to fit.
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
from autopar.solver.problem import Ints, Solution, evaluate, memory_of

Solve = Callable[[Instance, Sequence[Ints]], Solution]
# The backends of devices whose weights can rest in host memory. A GPU's optimizer would have to visit it for updates,
# and gradients to go there, which is not written.
HOST_WEIGHTS = ("gloo",)
# How often a program is solved with less and less memory until its solution fits. Chosen: each round costs a solve.
ROUNDS = 4
# How often it is then solved with more memory, and the share of the limit that is not worth another solve. Chosen, as
# above.
MORE_ROUNDS, SPARE = 2, 0.005
# Seconds that a program may take with another limit, or with layers that may differ: so many, or so many for each of
# its choices, or as many as it took before.
# Chosen: those of an MLP (600 choices) found within 4 s all that they found in 15 s.
REFINING_SECONDS, REFINING_SECONDS_OF_CHOICE = 3.0, 2e-3


class TooSlowError(InfeasibleError):
    """No placement of a step takes less than ``seconds``, which is more than it may: proven by the program, whose equal
    layers choose alike, unless ``is_proven`` says that the seconds are an estimate; ``is_least``: not of a step, but of
    what it takes at least. ``how`` says so in words."""

    def __init__(self, what: str, seconds: float, is_proven: bool = True, is_least: bool = False) -> None:
        self.how = "at least" if is_proven else "at least about" if is_least else "about"
        super().__init__(f"{what} take {self.how} {duration(seconds)}")
        self.seconds = seconds
        self.is_proven = is_proven
        self.is_least = is_least


class ShortOfMemoryError(InfeasibleError):
    """The quickest placements, which take so many ``seconds``, do not fit, and no others were asked for
    (``PlanRequest.only_quickest``). ``with_savers`` finds the seconds of the quickest that seem to fit of what a search
    for placements that save memory begins with; infinite if there is none."""

    def __init__(self, what: str, seconds: float, with_savers: Callable[[], float]) -> None:
        super().__init__(f"{what} do not fit")
        self.seconds = seconds
        self.with_savers = with_savers


def without_limit(instance: Instance) -> Instance:
    return with_limit(instance, math.inf)


def with_limit(instance: Instance, limit: float, price: float = 0.0) -> Instance:
    """The instance with another limit of the device's memory, as the program counts it. ``price``: what a byte was
    worth with a limit before, 0 if that is not known."""
    return replace(instance, problem=replace(instance.problem, memory_limit=limit, memory_price=price))


@dataclass(frozen=True, eq=False)
class Unlimited:
    """The ``solution`` of an ``instance`` without a memory limit."""

    instance: Instance
    solution: Solution

    @property
    def seconds(self) -> float:
        """A lower bound for any memory limit, if one is known."""
        return self.solution.bound if self.solution.status != "infeasible" else -math.inf

    def costs_of_limit(self, solution: Solution) -> float:
        """The share of its seconds that a limit of memory costs ``solution``, compared with what was found without."""
        if self.solution.status == "infeasible":
            return math.inf
        return 1.0 - self.solution.objective / solution.objective if solution.objective > 0.0 else 0.0


def solve_unlimited(
    options: Options, plain: Instance, widen: Callable[[], Instance], solve: Solve, incumbents: Sequence[Ints]
) -> Unlimited:
    """Solves ``plain`` without a memory limit; if the options require recomputation or offload, the instance that
    ``widen`` returns. ``incumbents`` are choices of ``plain``; they mean the same in both. Raises
    :class:`OptionsError` if ``options`` ask for offload where it is impossible."""
    check_offload(options, plain.prices.cluster)
    if options.recompute in (None, "none") and not required(options.offload):
        return Unlimited(plain, solve(without_limit(plain), incumbents))
    wide = widen()
    return Unlimited(wide, solve_wide(without_limit(wide), solve, incumbents))


@dataclass(frozen=True)
class Needed:
    """The bytes of a solution: as the program counts them, and at the ``peak`` of its rehearsed step."""

    counted: float
    peak: float


def refining_seconds(instance: Instance, seconds: float) -> float:
    """The most seconds for the program of ``instance``, of which one with another limit took so many."""
    choices = sum(len(group.cost) for group in instance.problem.groups)
    return max(REFINING_SECONDS, REFINING_SECONDS_OF_CHOICE * choices, seconds)


def first_limit(allowed: float, free: Needed | None) -> float:
    """The first limit to give the program, so that the step of its solution needs at most ``allowed`` bytes. ``free``:
    what the solution without a limit needs, which is more.

    >>> first_limit(100, Needed(150, 120))
    130
    """
    return allowed if free is None else max(allowed, allowed + free.counted - free.peak)


def next_limit(allowed: float, beyond: Needed | None, within: Needed | None) -> float:
    """The limit to give the program next, so that the step of its solution needs at most ``allowed`` bytes and not much
    less. ``beyond``: a solution that needs more; ``within``: one that does not. What the program counts in excess
    changes little from one to the next: of one solution it is taken as it is, of two in proportion to their peaks.

    >>> next_limit(100, Needed(150, 120), None)
    129.6
    >>> next_limit(10000, Needed(15000, 10001), None)
    14974.0
    >>> next_limit(100, Needed(150, 120), Needed(120, 95))
    126.0
    >>> next_limit(100, None, Needed(120, 95))
    125
    >>> next_limit(100, Needed(150, 105), Needed(120, 95))
    135.0
    """
    if beyond is None:
        return allowed if within is None else within.counted + (allowed - within.peak)
    if within is None:
        # More than what is too much, by 2% of it and by half of what is not worth another solve: chosen, so that few
        # rounds are needed. GPT 1T without stages needed 3% too much, with that much less 0.04%, and then 0.01%.
        excess = beyond.peak - allowed
        guess = beyond.counted - excess - max(0.02 * excess, 0.5 * SPARE * allowed)
    else:
        # What is counted as less may need as much: one that fits by what an estimate said before it was corrected.
        share = (allowed - within.peak) / (beyond.peak - within.peak) if beyond.peak > within.peak else 0.5
        guess = within.counted + share * (beyond.counted - within.counted)
    return min(guess, beyond.counted - 1.0)  # Excludes what is known not to fit.


def solve_wide(wide: Instance, solve: Solve, incumbents: Sequence[Ints]) -> Solution:
    """Solves a widened instance. ``incumbents`` are choices of the instance before it was widened."""
    return solve(wide, _starts(wide, incumbents))


def _starts(wide: Instance, incumbents: Sequence[Ints]) -> list[Ints]:
    """``incumbents`` of an instance before it was widened, and the first of them with less and less in memory."""
    recomputing = list(_recomputing(wide, incumbents))
    starts = [*incumbents, *recomputing]
    if not wide.offload:
        return starts
    return [*starts, *(_with_offload(wide, choices) for choices in [*incumbents[:1], *recomputing])]


def seconds_with_savers(wide: Instance, free: Needed, allowed: float, incumbents: Sequence[Ints]) -> float:
    """Seconds of the quickest of the assignments with which :func:`solve_wide` begins for each of ``incumbents``, of
    those that count no more than ``allowed`` and what a ``free`` solution counts in excess; infinite if there is none.
    """
    limit = first_limit(allowed, free)
    starts = [choices for incumbent in incumbents for choices in _starts(wide, [incumbent])]
    within = (choices for choices in starts if memory_of(wide.problem, choices) <= limit)
    return min((evaluate(wide.problem, choices) for choices in within), default=math.inf)


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
            yield with_recomputed(wide, choices, wide.recomputable.chain(dropped))


def with_recomputed(wide: Instance, choices: Ints, names: frozenset[str]) -> Ints:
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
