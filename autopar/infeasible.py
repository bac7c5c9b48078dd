"""What to say of a model that fits nowhere: what would make it fit, with bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator

from .errors import InfeasibleError
from .graph import REST
from .instance import Instance
from .plan_units import size
from .problem import Ints, memory_of
from .solve import smallest_choices
from .within_memory import with_recomputation

# Seconds for finding the least memory of another program.
MOST_SECONDS = 10.0


def infeasible(instance: Instance, limit: float, known: int | None = None) -> InfeasibleError:
    """The error for an ``instance`` that has no solution within ``limit`` bytes per device; ``known``: bytes in which a
    step was found to fit."""
    choices = smallest_choices(instance.problem, 30.0)
    least = math.inf if choices is None else float(known or memory_of(instance.problem, choices))
    wanted = math.ceil(least) if math.isfinite(least) else least
    advice = "; ".join(_advice(instance, choices)) if choices is not None else "nothing: no plan is possible at all"
    return InfeasibleError(
        f"no plan on mesh {instance.prices.mesh} fits into {size(limit)} per device. The smallest limit that would fit "
        f"is {wanted} bytes ({size(least)}): Options(memory_limit={wanted}). Largest tensors: {_largest(instance)}. "
        f"What would lower it: {advice}."
    )


def _largest(instance: Instance) -> str:
    values = [n for n in instance.graph.nodes if n.op in ("param", REST)]
    largest = sorted(values, key=lambda n: -int(n.type.bytes))[:5]
    return "; ".join(
        f"{n.target if n.op == 'param' else 'activation of ' + (n.module or n.name)} {n.type}, "
        f"{size(int(n.type.bytes))}"
        for n in largest
    )


def _advice(instance: Instance, choices: Ints) -> Iterator[str]:
    """Changes that help, with the bytes per device they come to."""
    groups, chosen = instance.problem.groups, zip(instance.names, choices, strict=True)
    memory = {name: float(groups[i].memory[int(k)]) for i, (name, k) in enumerate(chosen)}
    parameters = sum(b for name, b in memory.items() if name in instance.graph and instance.graph[name].op == "param")
    least = memory_of(instance.problem, choices)
    batch = least - parameters
    if instance.again is None:
        wide = with_recomputation(instance, None)
        found = smallest_choices(wide.problem, MOST_SECONDS)
        if found is not None and memory_of(wide.problem, found) < least:
            yield f"recompute=None or 'full', {size(memory_of(wide.problem, found))}"
    if instance.repeats.microbatches == 1:
        yield f"half the batch, or microbatches=2, about {size(parameters + batch / 2)}"
    yield f"twice the devices, about {size(least / 2)} if all divides"
    yield f"an optimizer with less state (weights, gradients and state take {size(parameters)})"
