"""What to say of a model that fits nowhere: what would make it fit, with bytes."""

from __future__ import annotations

import math

from .errors import InfeasibleError
from .graph import REST
from .instance import Instance
from .plan_units import size
from .solve import smallest_memory


def infeasible(instance: Instance, limit: float) -> InfeasibleError:
    """The error for an ``instance`` that has no solution within ``limit`` bytes per device."""
    least = smallest_memory(instance.problem)
    values = [n for n in instance.graph.nodes if n.op in ("param", REST)]
    largest = sorted(values, key=lambda n: -int(n.type.bytes))[:5]
    named = "; ".join(
        f"{n.target if n.op == 'param' else 'activation of ' + (n.module or n.name)} {n.type}, "
        f"{size(int(n.type.bytes))}"
        for n in largest
    )
    return InfeasibleError(
        f"no plan on mesh {instance.prices.mesh} fits into {size(limit)} per device. The smallest limit that would fit "
        f"is {math.ceil(least)} bytes ({size(least)}): Options(memory_limit={math.ceil(least)}). "
        f"Largest tensors: {named}. "
        "More devices, a smaller batch or an optimizer with less state also lower it."
    )
