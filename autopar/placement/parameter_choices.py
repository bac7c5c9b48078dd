"""Where a parameter, its gradient and its optimizer state may rest."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from autopar.ir.assignment import ParameterPlacement, WeightInHost
from autopar.ir.placements import REPLICATE, Placements, Strategy, is_shard
from autopar.offload import Tier


def parameter_choices(strategies: tuple[Strategy, ...], trainable: bool) -> tuple[ParameterPlacement, ...]:
    """Every sensible triple of resting places. The optimizer state is placed like the weight, or it shards axes on
    which the weight is replicated, all along one dim. The gradient is placed like one of the two."""
    choices: dict[ParameterPlacement, None] = {}
    places = [strategy.outputs[0] for strategy in strategies]
    for weight in places:
        choices[ParameterPlacement(weight, weight, weight)] = None
    for weight, state in product(places, places) if trainable else ():
        if state != weight and _refines(weight, state):
            choices[ParameterPlacement(weight, state, state)] = None
            if _is_cut_from(weight, state):
                choices[ParameterPlacement(weight, weight, state)] = None
    return tuple(choices)


def with_state_in(tier: Tier, places: tuple[ParameterPlacement, ...]) -> tuple[ParameterPlacement, ...]:
    """The same resting places with the optimizer state in ``tier``."""
    return tuple(replace(place, offload=tier) for place in places)


def with_weight_in_host(places: tuple[ParameterPlacement, ...]) -> tuple[WeightInHost, ...]:
    """The same resting places with the stored weight in host memory."""
    return tuple(WeightInHost(p.weight, p.gradient, p.optimizer, p.offload) for p in places)


def _refines(weight: Placements, state: Placements) -> bool:
    added = {s for w, s in zip(weight, state, strict=True) if w != s}
    keeps_shards = all(w in (s, REPLICATE) for w, s in zip(weight, state, strict=True))
    return keeps_shards and len(added) == 1 and all(map(is_shard, added))


def _is_cut_from(weight: Placements, state: Placements) -> bool:
    """Whether a device's shard of ``state`` is part of its shard of ``weight``: no axis inside an added one shards the
    same dim."""
    return not any(w != s and s in weight[axis + 1 :] for axis, (w, s) in enumerate(zip(weight, state, strict=True)))
