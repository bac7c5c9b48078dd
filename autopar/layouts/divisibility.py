"""Checks, before anything is solved, that a layout divides the model. Errors name the dim, its module and what would
work."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from torch import nn
from torch.distributed.tensor import Partial, Shard

from autopar.cost import family_of
from autopar.errors import OptionsError
from autopar.ir.graph import Graph
from autopar.ir.module_paths import did_you_mean
from autopar.ir.node import SAVED_ACTIVATION, Node, Value
from autopar.ir.placements import Placement, is_shard
from autopar.layout import PATTERNS, Layout, degrees, matches, matches_whole
from autopar.layouts.sections.experts import FORWARD, MATRICES
from autopar.layouts.sections.shortened_model import Depth, inside
from autopar.passes.rule_language.compose import op_call
from autopar.passes.rule_language.registry import RULES
from autopar.placement.axis_names import weight_values


def check_modules(model: nn.Module, layout: Layout) -> None:
    """Raises :class:`OptionsError` for a field that names modules which ``model`` does not have."""
    paths = [path for path, _ in model.named_modules()]
    for name in PATTERNS:
        for pattern in getattr(layout, name):
            if not any(matches(path, (pattern,)) for path in paths):
                raise OptionsError(
                    f"Layout({name}=...): the model has no module {pattern!r}{did_you_mean(pattern, paths)}"
                )


def check_represented(modules: Sequence[str], depth: Depth, layout: Layout) -> None:
    """Raises :class:`OptionsError` for a field that names modules in some of the layers that share one price, but not
    in all of them: a layer and those it represents. ``modules``: the paths of all modules."""
    for name in PATTERNS:
        patterns = getattr(layout, name)
        named = [path for path in modules if matches(path, patterns)]
        for path, kinds in depth.kinds.items() if named else ():
            parts = _parts(named, path)
            for layer, kind in kinds.items():
                own, representative = (parts.get(name, set()) for name in (layer, kind))
                if own != representative:
                    part = min(own ^ representative)
                    named_in, missing_in = (layer, kind) if part in own else (kind, layer)
                    count = list(kinds.values()).count(kind)
                    raise OptionsError(
                        f"Layout({name}={patterns!r}) names {inside(path, named_in + part)} and not "
                        f"{inside(path, missing_in + part)}, but they share one price, as do all "
                        f"{count} layers equal to {inside(path, kind)}; name it in all of them, such as by "
                        f"{inside(path, '*' + part)!r}, or in none"
                    )


def check_recomputed(graph: Graph, layout: Layout) -> None:
    """Raises :class:`OptionsError` if a block of experts would be recomputed separately."""
    for node in graph.nodes:
        if node.op == FORWARD and matches_whole(node.module, layout.recomputed):
            raise OptionsError(
                f"Layout(recomputed={layout.recomputed!r}) names {node.module or node.name}, whose experts are priced "
                'separately, and would send their rows once more; name other modules, or take recompute="full"'
            )


def _parts(paths: Iterable[str], layers: str) -> dict[str, set[str]]:
    """For each element of the list at ``layers``, by name: the ends of its own path and of its parts' paths among
    ``paths``, relative to the element."""
    below, parts = inside(layers, ""), dict[str, set[str]]()
    for path in paths:
        if path.startswith(below):
            name, dot, part = path.removeprefix(below).partition(".")
            parts.setdefault(name, set()).add(dot + part)
    return parts


def check_division(graph: Graph, layout: Layout) -> None:
    """Raises :class:`OptionsError` for a concrete step graph that ``layout`` cannot divide: an input without a
    sequence, or whose sequence does not divide among context ranks; heads or experts that do not divide among tensor
    ranks."""
    for node in graph.placeholders("input"):
        if layout.context > 1 and node.type.rank > 1:
            _check_sequence(graph, node, layout)
    counts = dict(_counted(graph, layout))
    common = math.gcd(*counts.values())
    for node, count in counts.items():
        if count % layout.tensor:
            kind = "experts" if node.op == FORWARD else "heads"
            works = degrees("tensor", common, layout.tensor)
            if kind == "heads":
                works += f", or replicated=({node.module!r},), so that every tensor rank computes all of them"
            raise OptionsError(
                f"{layout}: {node.module or node.name} has {count} {kind}, which do not divide among {layout.tensor} "
                f"tensor ranks; {works}"
            )


def _counted(graph: Graph, layout: Layout) -> Iterator[tuple[Node, int]]:
    """Nodes whose heads or experts tensor ranks divide, with their number. Query heads of attention: no system with
    such a layout gives some ranks one more head, since all would wait for them. (Attention written out in products
    shows no heads.) Experts: each tensor rank has its own."""
    for node in graph.nodes:
        if node.phase != "forward" or matches(node.module, layout.replicated):
            continue
        if node.op == FORWARD:
            yield node, int(graph.type_of(node.operands[MATRICES]).shape[0])
        elif family_of(node.op).is_attention:
            yield node, int(graph.type_of(node.operands[0]).shape[1])


def _check_sequence(graph: Graph, node: Node, layout: Layout) -> None:
    size = int(node.type.shape[1])
    product = _summed_over(graph, Value(node.name), size) if size > 1 else None
    if product is not None:
        raise OptionsError(
            f"{layout}: context ranks divide a sequence, dim 1 of every input, but that of {node.target!r} {node.type} "
            f"is not one: {product.module or product.name} ({product.op}) sums over it; take context=1, and more "
            "data or tensor ranks"
        )
    if size % layout.context:
        raise OptionsError(
            f"{layout}: the input {node.target!r} {node.type} has a sequence of {size} (dim 1), which does not "
            f"divide among {layout.context} context ranks; {degrees('context', size, layout.context)}"
        )


def _summed_over(graph: Graph, value: Value, size: int) -> Node | None:
    """A product with weights, convolution included, that sums over dim 1 of ``value``, or over what that dim has
    become: devices with a piece each can only compute parts of the sum. Products of activations may sum over sequences
    too (a masked mean); products with weights sum over features."""
    weights = weight_values(graph)
    waiting: list[tuple[Value, Placement]] = [(value, Shard(1))]
    seen = set(waiting)
    while waiting:
        here, place = waiting.pop()
        for user, index in graph.users.get(here, ()):
            results = _results(graph, user, index, place, size) if user.phase == "forward" else []
            if results and family_of(user.op).matrix is not None:
                if all(isinstance(result, Partial) for result in results) and weights & {v.node for v in user.operands}:
                    return user
                continue
            further = [(Value(user.name), result) for result in results if is_shard(result)]
            waiting += [shard for shard in further if shard not in seen]
            seen.update(further)
    return None


def _results(graph: Graph, node: Node, index: int, place: Placement, size: int) -> list[Placement]:
    """The placements that a node's first result may have on ``size`` devices if operand ``index`` has ``place``."""
    if node.op == SAVED_ACTIVATION:
        return [place]
    if node.op not in RULES:
        return []
    strategies = RULES[node.op](op_call(graph, node, size))
    return list(dict.fromkeys(s.outputs[0] for s in strategies if s.inputs[index] == place))
