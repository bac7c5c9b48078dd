"""Placements of another graph of a model whose parameters already rest somewhere: of evaluation, above all."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from autopar.passes.fold import fold_layers

from .assignment import Assignment, ParameterPlacement
from .graph import Graph, Node
from .instance import build_instance
from .offer import Choice
from .prices import Prices
from .question import Question
from .restrict import with_choices
from .solve_in_time import solve_in_time
from .timings import Timings


def fixed_assignment(question: Question, graph: Graph, parameters: Mapping[str, ParameterPlacement]) -> Assignment:
    """The best assignment of an annotated graph whose parameters rest where ``parameters`` says (those it does not
    name: anywhere)."""
    prices = Prices.of(question.cluster, question.mesh, graph)
    instance = build_instance(fold_layers(graph), prices, optimizer=question.options.optimizer, memory_limit=math.inf)

    def allowed(node: Node, choice: Choice) -> bool:
        if not isinstance(choice, ParameterPlacement) or node.target not in parameters:
            return True
        return choice.weight == parameters[node.target].weight

    solution = solve_in_time(with_choices(instance, allowed).problem, question.options, Timings())
    chosen = instance.assignment(solution.choices)
    places = {
        node.name: parameters.get(node.target, chosen.parameters[node.name]) for node in graph.placeholders("param")
    }
    return replace(chosen, parameters=places)
