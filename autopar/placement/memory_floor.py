"""What a step that runs once holds at least, as its placements are chosen: the other side of :mod:`.memory_bound`.

When forward has ended, a device holds all weights, the state of the optimizer and every saved value; when backward has,
the stored weights, the state and all gradients. What else it holds then, and at any other time, depends on the order of
operations. So a limit on either sum excludes nothing that fits, and what is proven with it holds for every step that
does.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Literal

import numpy as np

from autopar.ir.assignment import Offloaded, ParameterPlacement, Recomputed, WeightInHost
from autopar.ir.node import SAVED_ACTIVATION, VIEWS, Node
from autopar.solver.problem import Floats, Problem
from autopar.torch_internals.operators import aliased_argument, operation_called

from .choice_costs import ChoiceCosts
from .choices import Choice, ChoiceSets
from .formulation import Instance
from .item_prices import parameter_bytes
from .placed_step import trained
from .prices import local_bytes

Moment = Literal["forward", "backward"]
"""The part of the step that has ended."""


def held_at_least(instance: Instance, moment: Moment) -> Problem:
    """The program of ``instance`` that counts, as memory, what its devices, which have no rooms, hold at a ``moment``
    alone."""
    sizes = Counter(instance.graph.classes.get(node.name, node.name) for node in instance.graph.nodes)
    learning = frozenset(trained(instance.graph))

    def held(name: str, choices: tuple[Choice, ...]) -> Floats:
        of = [0] * len(choices)
        node = instance.graph[name] if sizes[name] else None  # The group of the outputs has no nodes.
        if node is not None and node.op == "param":
            of = [_of_parameter(instance, node, place, moment, node.target in learning) for place in choices]
        elif node is not None and node.op == SAVED_ACTIVATION and moment == "forward" and not _is_part(instance, node):
            of = [_of_saved(instance, node, choice) for choice in choices]
        return sizes[name] * np.array(of, dtype=np.float64)

    groups = tuple(
        replace(group, memory=held(name, choices), temporary=np.zeros_like(group.temporary))
        for name, choices, group in zip(instance.names, instance.choices, instance.problem.groups, strict=True)
    )
    return replace(instance.problem, groups=groups)


def without_waiting(instance: Instance) -> Problem:
    """The program of ``instance`` that counts no gradients that wait for others: a step may hold most at another
    time. The program itself if none waits, as in microbatches, which accumulate them."""
    own = instance.optimizer, instance.repeats, instance.recomputable, instance.offload
    costs = ChoiceCosts(ChoiceSets(instance.graph, instance.prices, *own))
    computing = {costs.choice_sets.class_of(value.node) for value in costs.gradients}

    def waiting(name: str, choices: tuple[Choice, ...]) -> Floats:
        node = instance.graph[name]
        of = [0.0 if isinstance(c, ParameterPlacement) else costs.waiting_bytes(node, c) for c in choices]
        return costs.choice_sets.counts[name] * np.array(of)

    named = zip(instance.names, instance.choices, strict=True)
    less = [waiting(*own) if own[0] in computing else None for own in named]
    if not any(each is not None and each.any() for each in less):
        return instance.problem
    groups = zip(instance.problem.groups, less, strict=True)
    return replace(
        instance.problem,
        groups=tuple(own if each is None else replace(own, memory=own.memory - each) for own, each in groups),
    )


def _of_parameter(instance: Instance, node: Node, place: Choice, moment: Moment, learns: bool) -> int:
    assert isinstance(place, ParameterPlacement)
    weights, gradient, state = parameter_bytes(instance.prices, node, place, instance.optimizer)
    stored = local_bytes(node.stored, place.optimizer, instance.prices.mesh)
    # A working copy of as many bytes may be the stored weight itself.
    weights = stored if moment == "backward" or weights == 2 * stored else weights
    weights = 0 if isinstance(place, WeightInHost) else weights
    return weights + (state + (gradient if moment == "backward" else 0) if learns else 0)


def _of_saved(instance: Instance, node: Node, choice: Choice) -> int:
    if isinstance(choice, (Recomputed, Offloaded, ParameterPlacement)):
        return 0
    return local_bytes(node.type, choice.outputs[0], instance.prices.mesh)


def _is_part(instance: Instance, node: Node) -> bool:
    """Whether a saved value may share its memory with another."""
    made = instance.graph[node.operands[0].node]
    operation = operation_called(made.op)
    return made.op in VIEWS or (operation is not None and aliased_argument(operation) is not None)
