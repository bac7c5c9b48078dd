"""Constraints that remove choices from the planner: pins and ZeRO stages."""

from __future__ import annotations

import fnmatch
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from autopar.errors import OptionsError
from autopar.ir.assignment import ParameterPlacement
from autopar.ir.graph import Graph
from autopar.ir.module_paths import did_you_mean
from autopar.ir.node import SAVED_ACTIVATION, Node, Value
from autopar.ir.placements import NOT, Placements, Shape, is_shard, parse_placements, shard_before, shard_dim, short
from autopar.ir.stage_meshes import on_axes
from autopar.solver.problem import Transfer

from .axis_names import weight_values
from .choices import OUTPUTS, Choice, operand_place, result_place
from .edge_costs import how_sent
from .edges import TensorEdge
from .formulation import Instance

Allowed = Callable[[Node, Choice], bool]
# Whether a value may not go from one placement to another (of :func:`without_moves`: from a ``part`` of one).
Forbidden = Callable[[Any, Any], bool]


def live_axes(mesh: tuple[int, ...]) -> tuple[int, ...]:
    """The axes of more than one device."""
    return tuple(axis for axis, size in enumerate(mesh) if size > 1)


def degree(placements: Placements, mesh: tuple[int, ...]) -> int:
    """The number of shards of a tensor."""
    return math.prod(mesh[axis] for axis, placement in enumerate(placements) if is_shard(placement))


def with_choices(instance: Instance, allowed: Allowed, *, gathers: bool = True, strict: str = "") -> Instance:
    """The instance with all choices forbidden that are not ``allowed`` and, unless ``gathers``, all collectives on
    weights. A group that would have no choice left keeps all of them or, if ``strict`` is given, raises
    :class:`OptionsError`, whose message starts with ``strict``."""
    groups = []
    for name, choices, group in zip(instance.names, instance.choices, instance.problem.groups, strict=True):
        node = None if name == OUTPUTS else instance.graph[name]
        keep = np.array([node is None or allowed(node, choice) for choice in choices])
        keep &= np.isfinite(group.cost)
        if not keep.any():
            if strict and node is not None:
                raise OptionsError(_nothing_left(strict, node, choices, np.isfinite(group.cost)))
            keep = np.isfinite(group.cost)
        groups.append(replace(group, cost=np.where(keep, group.cost, np.inf)))
    transfers = instance.problem.transfers
    if not gathers:
        weights = weight_values(instance.graph)
        weight_edges = {i for i, edge in enumerate(instance.edges) if edge.producer in weights}
        transfers = tuple(
            _without_gathers(instance, instance.edges[i], transfer) if i in weight_edges else transfer
            for i, transfer in enumerate(transfers)
        )
    return replace(instance, problem=replace(instance.problem, groups=tuple(groups), transfers=transfers))


def _nothing_left(reason: str, node: Node, choices: tuple[Choice, ...], possible: Iterable[bool]) -> str:
    places = dict.fromkeys(short(_place(choice)) for choice, is_left in zip(choices, possible, strict=True) if is_left)
    offered = ", ".join(list(places)[:12])
    where = node.target if node.is_placeholder else f"{node.module} ({node.op})"
    return f"{reason}: no strategy of {where}, {node.type}, satisfies it; possible are {offered}"


def _place(choice: Choice) -> Placements:
    return choice.weight if isinstance(choice, ParameterPlacement) else choice.outputs[0]


def _without_gathers(instance: Instance, edge: TensorEdge, transfer: Transfer) -> Transfer:
    """Forbids communication between a parameter, or a view or cast of one, and its uses."""
    kind = instance.graph.type_of(Value(edge.producer, edge.result))

    def communicates(source: Placements, target: Placements) -> bool:
        path = instance.prices.path(kind, source, target, how_sent(instance.graph, edge))
        return any(hop.collective is not None for hop in path)

    return without_moves(instance, edge, transfer, communicates)


def without_moves(
    instance: Instance,
    edge: TensorEdge,
    transfer: Transfer,
    forbidden: Forbidden,
    part: Callable[[Placements], Any] = lambda places: places,
) -> Transfer:
    """``transfer``, of ``edge``, without the moves that are ``forbidden``. Those that are free change nothing, or feed
    a consumer that needs nothing: they stay. ``part``: what of the placements of source and target ``forbidden`` looks
    at; it is asked once for each pair."""
    choices = instance.choices[transfer.producer]
    left = (part(result_place(choice, edge.result)) for choice in choices)
    rows = dict(zip(map(int, transfer.source), left, strict=True))
    columns: dict[int, Any] = {}
    for (_, operand), consumer, needed in zip(edge.consumers, transfer.consumers, transfer.targets, strict=True):
        places = (part(operand_place(choice, operand)) for choice in instance.choices[consumer])
        columns.update(zip(map(int, needed), places, strict=True))
    moves = (transfer.cost > 0) & np.isfinite(transfer.cost)
    cost = transfer.cost.copy()
    for source, of_source in _positions(rows).items():
        for target, of_target in _positions(columns).items():
            cells = np.ix_(of_source, of_target)
            if moves[cells].any() and forbidden(source, target):
                cost[cells] = np.where(moves[cells], np.inf, cost[cells])
    return replace(transfer, cost=cost)


def _positions(parts: Mapping[int, Any]) -> dict[Any, list[int]]:
    """The positions at which each part occurs."""
    positions: dict[Any, list[int]] = {}
    for position, part in parts.items():
        positions.setdefault(part, []).append(position)
    return positions


def zero_allows(instance: Instance, stage: int) -> Allowed:
    """Allows the choices of ZeRO ``stage`` for parameters. Stages 1 to 3 shard the optimizer state over as many devices
    as the tensor allows, stages 2 and 3 also the gradient, stage 3 also the weight. Below 3 the weight rests as it is
    used."""
    mesh = instance.prices.mesh
    most = {
        name: max(degree(c.optimizer, mesh) for c in choices if isinstance(c, ParameterPlacement))
        for name, choices in zip(instance.names, instance.choices, strict=True)
        if isinstance(choices[0], ParameterPlacement)
    }

    def allowed(node: Node, choice: Choice) -> bool:
        if not isinstance(choice, ParameterPlacement):
            return True
        if stage == 0:
            return choice.optimizer == choice.weight
        full = degree(choice.optimizer, mesh) == most[instance.graph.classes.get(node.name, node.name)]
        if stage == 3:
            return full and choice.weight == choice.optimizer
        return full and choice.gradient == (choice.weight if stage == 1 else choice.optimizer)

    return allowed


def pin_instance(
    instance: Instance,
    pins: Mapping[str, str],
    options: Sequence[tuple[str, Instance]],
    returned: Mapping[str, Shape],
) -> Instance:
    """The instance restricted by ``pins``. ``options``: the options that have removed choices, each with the instance
    before it did. ``returned``: by path, the shape of what a module returns, for the samples of the instance's graph,
    whose dims pins of modules count.

    Raises:
        OptionsError: a pin matches nothing, or no strategy satisfies it; names the other pins or the option that it
            contradicts.
    """
    start = instance
    for position, (pattern, text) in enumerate(pins.items()):
        try:
            instance = _pinned(instance, pattern, text, returned)
        except OptionsError as error:
            earlier = list(pins.items())[:position]
            contradicted = _contradicted(start, (pattern, text), earlier, options, returned)
            if not contradicted:
                raise
            together = "both" if len(contradicted) == 1 else "all"
            raise OptionsError(
                f"the pin {pattern!r}: {text!r} contradicts {' and '.join(contradicted)}: no placement satisfies "
                f"{together}; leave one of them out"
            ) from error
    return instance


def _contradicted(
    restricted: Instance,
    pin: tuple[str, str],
    earlier: list[tuple[str, str]],
    options: Sequence[tuple[str, Instance]],
    returned: Mapping[str, Shape],
) -> list[str]:
    """What contradicts ``pin``: an option, or some of the pins before it. Empty if ``pin`` is impossible by itself.
    ``returned``: for :func:`pin_instance`."""
    names, before = [name for name, _ in options], [*(free for _, free in options), restricted]
    possible = [_is_possible(instance, [pin], returned) for instance in before]
    if not possible[0]:
        return []
    if not possible[-1]:
        return [names[possible.index(False) - 1]]
    return [f"the pin {name!r}: {text!r}" for name, text in _needed(before[0], pin, earlier, returned)]


def _needed(
    free: Instance, pin: tuple[str, str], earlier: list[tuple[str, str]], returned: Mapping[str, Shape]
) -> list[tuple[str, str]]:
    """The pins of ``earlier`` that contradict ``pin`` together, and of which none can be left out."""
    needed = list(earlier)
    for one in earlier:
        others = [other for other in needed if other != one]
        if not _is_possible(free, [*others, pin], returned):
            needed = others
    return needed


def _is_possible(instance: Instance, pins: list[tuple[str, str]], returned: Mapping[str, Shape]) -> bool:
    try:
        for pattern, text in pins:
            instance = _pinned(instance, pattern, text, returned)
    except OptionsError:
        return False
    return True


def _pinned(instance: Instance, pattern: str, text: str, returned: Mapping[str, Shape]) -> Instance:
    """The instance restricted by one pin; ``returned``: for :func:`pin_instance`."""
    pinned = _parsed(pattern, text)
    excluded = text.lstrip().startswith(NOT)
    mesh = instance.prices.mesh
    if len(pinned) != len(mesh):
        raise OptionsError(
            f"the pin {pattern!r}: {text!r} has {len(pinned)} placements, but the mesh {mesh} has "
            f"{len(mesh)} axes; "
            f"write one for each, for example {','.join(['S(0)', *['R'] * (len(mesh) - 1)])!r}"
        )
    names = set(_pinned_nodes(instance.graph, pattern))
    if not names:
        raise unmatched(instance.graph, pattern)
    if not pattern.startswith("%") and any(shard_dim(place) and shard_before(place) == 1 for place in pinned):
        own = {path: shape for path, shape in returned.items() if fnmatch.fnmatchcase(path, pattern)}
        dims = {shard_dim(place) or 0 for place in pinned}
        _check_dims(instance.graph, f"the pin {pattern!r}: {text!r}", names, own, dims)
    groups = {instance.graph.classes.get(name, name) for name in names}
    here = on_axes(pinned, mesh)
    if excluded and here != pinned:
        return instance
    return with_choices(
        instance,
        lambda node, choice: node.name not in groups or (_place(choice) == here) is not excluded,
        strict=f"the pin {pattern!r}: {text!r} cannot be met",
    )


def samples_of(graph: Graph) -> int:
    """How many samples the inputs have: the size of dim 0 of most, where it is not 1; 1 if it is in all."""
    inputs = (node.type for node in graph.placeholders("input") if node.type.rank)
    sizes = Counter(size for size in (int(kind.shape[0]) for kind in inputs) if size > 1)
    return max(sizes, key=sizes.__getitem__, default=1)


def _check_dims(
    graph: Graph, pin: str, names: Collection[str], returned: Mapping[str, Shape], dims: Collection[int]
) -> None:
    """Raises :class:`OptionsError` where a ``pin`` counts ``dims`` of what a module returned, and the graph has that
    with other dims: as products compute it, with samples and positions in one dim. Dims of one are no difference, as of
    a single position: nothing divides them, so no pin means them. But they count for a dim behind them."""
    for path, name in module_outputs(graph).items():
        shape = returned.get(path) if name in names else None
        if shape is None or _count_alike(shape, graph[name].type.shape, dims):
            continue
        kind = graph[name].type
        where = f"pin '%{name}' by these dims"
        if kind.rank == 2 < len(shape) and math.prod(shape[:-1]) == kind.shape[0]:
            rows = f", whose dim 0 is {shape[0]} samples x {math.prod(shape[1:-1])}"
            within = f"S(0/{shape[0]}) what is within a sample, and S(1) the last dim"
            where = f"{where}, where S(0) divides samples, {within}"
        else:
            rows = ""
        raise OptionsError(
            f"{pin} counts dims of what the module returns, {list(shape)}, but the plan has that as %{name} {kind}"
            f"{rows}: {where}"
        )


def _count_alike(shape: Sequence[object], computed: Sequence[object], dims: Collection[int]) -> bool:
    """Whether ``dims`` are the same in two shapes. One of one in the first says nothing."""
    one, other = ([n for n in own if n != 1] for own in (shape, computed))
    meant = [dim for dim in dims if dim < len(shape) and shape[dim] != 1]
    return one == other and all(tuple(shape[: dim + 1]) == tuple(computed[: dim + 1]) for dim in meant)


def _parsed(pattern: str, text: str) -> Placements:
    try:
        return parse_placements(text.lstrip().removeprefix(NOT))
    except OptionsError as error:
        if text.split()[:2] == [NOT.strip(), "stage"]:
            raise OptionsError(
                f"the pin {pattern!r}: {text!r}: a stage can be pinned, but not excluded; give the one that the "
                "module shall be in, such as 'stage 0'"
            ) from error
        raise OptionsError(
            f"the pin {pattern!r}: {text!r}: {error}, or 'stage 1' for the pipeline stage of a module"
        ) from error


def by_first_names(pins: Mapping[str, str], tied: Mapping[str, str]) -> dict[str, str]:
    """``pins`` with tied parameters under the names that graphs have of them. ``tied``: those by their other names.
    Raises :class:`OptionsError` if two names of one parameter are pinned apart."""
    named = {name: text for name, text in pins.items() if name not in tied}
    for alias in (name for name in pins if name in tied):
        name, text = tied[alias], pins[alias]
        if named.setdefault(name, text) != text:
            raise OptionsError(
                f"pins: {alias!r} and {name!r} are one parameter, which cannot be both {text!r} and {named[name]!r}: "
                "leave one of them out"
            )
    return named


def unmatched(graph: Graph, pattern: str) -> OptionsError:
    """The error for a pin that matches nothing."""
    names = [*(node.target for node in graph.placeholders("param")), *module_outputs(graph)]
    return OptionsError(
        f"the pin {pattern!r} matches no parameter and no module of the model{did_you_mean(pattern, names)}"
    )


def pinned_apart(graph: Graph, pins: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """For each pinned node, the pins that match it. One layer may be pinned while equal layers are not."""
    pins_of: dict[str, tuple[str, ...]] = {}
    for pattern in pins:
        for name in _pinned_nodes(graph, pattern):
            pins_of[name] = (*pins_of.get(name, ()), pattern)
    return pins_of


def _pinned_nodes(graph: Graph, pattern: str) -> Iterator[str]:
    """The parameters that a pattern matches; if none, the nodes that compute the outputs of the modules it matches.
    ``%name`` is the node of that name."""
    if pattern.startswith("%"):
        yield from (node.name for node in graph.nodes if fnmatch.fnmatchcase(node.name, pattern[1:]))
        return
    parameters = [n.name for n in graph.placeholders("param") if fnmatch.fnmatchcase(n.target, pattern)]
    if parameters:
        yield from parameters
        return
    for path, name in module_outputs(graph).items():
        if fnmatch.fnmatchcase(path, pattern):
            yield name


def module_outputs(graph: Graph) -> dict[str, str]:
    """For each module path, the last forward node that ran in it or below it: the node that computes its output."""
    outputs: dict[str, str] = {}
    for node in graph.nodes:
        if node.phase == "forward" and not node.is_placeholder and node.op != SAVED_ACTIVATION and node.module:
            parts = node.module.split(".")
            for length in range(1, len(parts) + 1):
                outputs[".".join(parts[:length])] = node.name
    return outputs
