"""Where a parameter, its gradient and its optimizer state may rest."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from autopar.ir.assignment import ParameterPlacement
from autopar.ir.placements import REPLICATE, Placements, Strategy, is_shard


def parameter_choices(strategies: tuple[Strategy, ...], trainable: bool) -> tuple[ParameterPlacement, ...]:
    """Every sensible triple of resting places. The optimizer state either lies as the weight does or shards further
    what the weight replicates, all of it along one dim; the gradient lies as one of the two."""
    found: dict[ParameterPlacement, None] = {}
    places = [strategy.outputs[0] for strategy in strategies]
    for weight in places:
        found[ParameterPlacement(weight, weight, weight)] = None
    for weight, state in product(places, places) if trainable else ():
        if state != weight and _refines(weight, state):
            found[ParameterPlacement(weight, state, state)] = None
            if _is_cut_from(weight, state):
                found[ParameterPlacement(weight, weight, state)] = None
    return tuple(found)


def in_host_memory(places: tuple[ParameterPlacement, ...]) -> tuple[ParameterPlacement, ...]:
    """The same resting places with the optimizer state in host memory."""
    return tuple(replace(place, offload=True) for place in places)


def _refines(weight: Placements, state: Placements) -> bool:
    added = {s for w, s in zip(weight, state, strict=True) if w != s}
    kept = all(w in (s, REPLICATE) for w, s in zip(weight, state, strict=True))
    return kept and len(added) == 1 and all(map(is_shard, added))


def _is_cut_from(weight: Placements, state: Placements) -> bool:
    """Whether what a device holds of ``state`` is part of what it holds of ``weight``: no axis inside an added one
    chunks the same dim."""
    return not any(w != s and s in weight[axis + 1 :] for axis, (w, s) in enumerate(zip(weight, state, strict=True)))
