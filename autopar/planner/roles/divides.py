"""Checks that a layout divides a graph: its heads, its experts, its weights, its sequence. Errors name the dim, its
module and what would work."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping

from torch.distributed.tensor import Partial, Shard

from autopar.cost import family_of
from autopar.errors import OptionsError
from autopar.ir.graph import Graph
from autopar.ir.node import SAVED_ACTIVATION, Node, Value
from autopar.ir.placements import Placement, chunk_bounds, is_shard
from autopar.layout import degrees
from autopar.passes.recompute.attention import products_with_values
from autopar.passes.rule_language.compose import op_call
from autopar.passes.rule_language.registry import RULES
from autopar.placement.axis_names import weight_values

from .expert_blocks import FORWARD, number_of_experts


def check_tensor(counts: Mapping[Node, int], tensor: int, words: object, advised: bool = False) -> None:
    """Raises :class:`OptionsError` for heads or experts, of which nodes have ``counts``, that do not divide among
    ``tensor`` ranks of a layout, in ``words``. ``advised``: whether errors name the degrees that divide them."""
    common = math.gcd(*counts.values())
    for node, count in counts.items():
        if count % tensor:
            kind = "experts" if node.op == FORWARD else "heads"
            advice = f"; {degrees('tensor', common, tensor)}" if advised else ""
            raise OptionsError(
                f"{words}: {node.module or node.name} has {count} {kind}, which do not divide among {tensor} tensor "
                f"ranks{advice}"
            )


def check_matrices(graph: Graph, parameters: Collection[str], tensor: int, words: object) -> None:
    """Raises :class:`OptionsError` for a matrix or table of weights, of ``parameters``, of which no dim has a piece for
    each of ``tensor`` equal ranks of a layout, in ``words``."""
    for node in graph.placeholders("param"):
        sizes = map(int, node.type.shape)
        if node.name in parameters and not any(chunk_bounds(size, tensor, tensor - 1)[1] for size in sizes):
            raise OptionsError(
                f"{words}: each of {tensor} tensor ranks reads a shard of every weight of a product, and "
                f"{node.target!r} {node.type} has no dim with a piece for each"
            )


def heads_and_experts(graph: Graph) -> Iterator[tuple[Node, int]]:
    """Operations whose heads or experts tensor ranks divide, with their number. Query heads of attention: no system
    with such a layout gives some ranks one more head, since all would wait for them. Experts: each tensor rank has its
    own."""
    for node in graph.nodes:
        if node.op == FORWARD:
            yield node, number_of_experts(graph, node)
        elif node.phase == "forward" and family_of(node.op).is_attention:
            yield node, int(graph.type_of(node.operands[0]).shape[1])


def written_heads(graph: Graph) -> Iterator[tuple[Node, int]]:
    """Attention written out in products, with its heads: how many matrices a product has for each sample. (If they are
    of windows or blocks of a sequence too, they are a multiple of the heads, and what does not divide them does not
    divide heads.) Without heads there is one."""
    sizes = Counter(int(node.type.shape[0]) for node in graph.placeholders("input") if node.type.rank)
    batch = max(sizes, key=sizes.__getitem__, default=0)
    for node in products_with_values(graph) if batch else ():
        count, rest = divmod(int(node.type.shape[0]), batch)
        if node.type.rank == 3 and rest == 0 and count > 1:
            yield node, count


def divided_by_tensor(graph: Graph) -> dict[Node, int]:
    """The operations of :func:`heads_and_experts` and :func:`written_heads`, with their numbers."""
    return dict((*heads_and_experts(graph), *written_heads(graph)))


def check_sequences(graph: Graph, context: int, words: object, advised: bool = False) -> None:
    """Raises :class:`OptionsError` for an input of a concrete step graph without a sequence, or whose sequence does not
    divide among ``context`` ranks of a layout, in ``words``. ``advised``: as of :func:`check_tensor`."""
    for node in graph.placeholders("input") if context > 1 else ():
        size = int(node.type.shape[1]) if node.type.rank > 1 else 0
        product = _summed_over(graph, Value(node.name), size) if size > 1 else None
        if product is not None:
            raise OptionsError(
                f"{words}: context ranks divide a sequence, dim 1 of every input, but that of {node.target!r} "
                f"{node.type} is not one: {product.module or product.name} ({product.op}) sums over it; take "
                "context=1, and more data or tensor ranks"
            )
        if size % context:
            advice = f"; {degrees('context', size, context)}" if advised else ""
            raise OptionsError(
                f"{words}: the input {node.target!r} {node.type} has a sequence of {size} (dim 1), which does not "
                f"divide among {context} context ranks{advice}"
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
