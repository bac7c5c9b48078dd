"""What the axes of a mesh are for under a layout, and the restriction of a placement program to that.

A degree of a layout is the number of devices among which *products* are divided in its way. Products are the operations
that read matrices or tables of weights: matrix products, convolutions, embeddings, and blocks of experts, forward and
backward. On an axis of the mesh a product is divided

- by ``data``: it has some samples of the batch, and reads the weight whole;
- by ``context``: it has some positions of the sequence, and reads the weight whole;
- by ``tensor``: it reads a shard of the weight (for a block of experts: some of the experts);
- not at all (``none``): devices compute the same.

All other operations, and where weights, gradients and states rest, are decided by price, except that on a tensor axis
each matrix rests in the shards in which it is read, and that ``sequence_parallel`` says what is between products:

- False: no value is in shards of the sequence or of samples on the tensor axis;
- True: sums of products are scattered along the sequence on the tensor axis and never summed on every device, and no
  value of which :mod:`.divided_values` knows the positions goes from shards of one dim to shards of another there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.ir.assignment import ParameterPlacement
from autopar.ir.node import Node
from autopar.ir.placements import is_shard
from autopar.placement.choices import Choice
from autopar.placement.constraints import Allowed, with_choices
from autopar.placement.formulation import Instance

from .expert_blocks import OPERATIONS
from .moves_between import divided_between, keep_in_shards
from .products import Products


@dataclass(frozen=True)
class AxisRole:
    """What one axis is for. ``products``: how products may be divided on it; ``experts``: how blocks of experts may be.
    ``name``: the field of the layout, or ``""`` for devices that the layout leaves to the search."""

    name: str
    products: frozenset[str]
    experts: frozenset[str]
    sequence_parallel: bool | None = None


def role_names(roles: tuple[AxisRole, ...], names: tuple[str, ...]) -> tuple[str, ...]:
    """``names`` of the axes, with those of their roles where a layout says what they are for. Equal names are
    numbered."""
    if not roles:
        return names
    wanted = [ROLE_NAMES.get(role.name, name) for role, name in zip(roles, names, strict=True)]
    return tuple(n if wanted.count(n) == 1 else f"{n}{wanted[:i].count(n)}" for i, n in enumerate(wanted))


def restricted_to(instance: Instance, roles: tuple[AxisRole, ...], products: Products, layout: str) -> Instance:
    """The instance in which every axis is used as its role says. ``products``: those of its graph; ``layout``: the
    restriction in words, for errors. Raises :class:`OptionsError` if some operation cannot be divided so."""
    for axis, role in enumerate(roles):
        size = instance.prices.mesh[axis]
        if size > 1:
            reason = f"{layout}: on the axis of {size} {role.name or 'remaining'} ranks {_meaning(role)}"
            instance = with_choices(instance, _allowed(products, axis, role), strict=reason)
            if role.products == {"tensor"}:
                instance = keep_in_shards(instance, products, axis)
                instance = divided_between(instance, products, axis, role.sequence_parallel)
    return instance


def _allowed(products: Products, axis: int, role: AxisRole) -> Allowed:
    is_tensor = role.products == {"tensor"}

    def allowed(node: Node, choice: Choice) -> bool:
        if isinstance(choice, ParameterPlacement):
            return not (is_tensor and node.name in products.parameters) or is_shard(choice.weight[axis])
        if node.name not in products.names:
            return True
        found = products.divided(node, choice, axis)
        permitted = role.experts if node.op in OPERATIONS else role.products
        if found in permitted or (is_tensor and node.name in products.choosing):
            return True
        return not is_tensor and (found == "weight" or (found == "some" and not permitted.isdisjoint(_OF_ROWS)))

    return allowed


# As plans without a layout call such axes where they can tell (:mod:`autopar.placement.axis_names`).
ROLE_NAMES: Mapping[str, str] = {"data": "dp", "context": "cp", "tensor": "tp", "expert": "ep"}
# Products that are divided so read whole weights.
_OF_ROWS = ("data", "context")
_WORDS = {
    "data": "a part of the samples",
    "context": "a part of the sequence",
    "tensor": "a shard of the weight",
    "none": "everything",
}


def _meaning(role: AxisRole) -> str:
    return f"each reads {' or '.join(word for name, word in _WORDS.items() if name in role.products)}"
