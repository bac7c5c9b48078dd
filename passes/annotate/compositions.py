"""Strategies of calls on a mesh, composed once for all graphs that have the same calls.

A search annotates many graphs: of few layers and of all, of one schedule and of another. Most of their calls are equal.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace

from autopar.errors import OperatorError
from autopar.ir.node import Node
from autopar.ir.placements import AxisStrategy, Shares, Strategy
from autopar.passes.rule_language.compose import compose
from autopar.passes.rule_language.registry import OpCall

from .equivalent_nodes import without_positions

# How many calls are kept, those used last.
# Chosen: a Llama has 400 on a mesh of two axes, with 7,000 strategies of some 350 bytes.
KEPT_CALLS = 4000


@dataclass(frozen=True, eq=False)
class Compositions:
    """The results of :func:`.compose.compose` so far."""

    _known: OrderedDict[Hashable, tuple[Strategy, ...]] = field(default_factory=OrderedDict)

    def of(
        self,
        call: OpCall,
        node: Node,
        mesh: tuple[int, ...],
        shares: Shares,
        offer: Callable[[OpCall], tuple[AxisStrategy, ...]],
        offered: Hashable,
    ) -> tuple[Strategy, ...]:
        """All strategies of ``call``, that of ``node``, on ``mesh``. ``offered``: what those of one axis that ``offer``
        lists depend on, besides the call. Raises :class:`OperatorError`."""
        key = alike(call), mesh, shares, offered
        if key not in self._known:
            self._known[key] = _composed(call, node, mesh, shares, offer)
        self._known.move_to_end(key)
        while len(self._known) > KEPT_CALLS:
            self._known.popitem(last=False)
        return self._known[key]


def alike(call: OpCall) -> OpCall:
    """The call without the positions that it indexes."""
    return replace(call, args=without_positions(call.op, call.args))


def _composed(
    call: OpCall,
    node: Node,
    mesh: tuple[int, ...],
    shares: Shares,
    offer: Callable[[OpCall], tuple[AxisStrategy, ...]],
) -> tuple[Strategy, ...]:
    try:
        return compose(call, mesh, offer, shares)
    except OperatorError as error:
        where = f"in module {node.module!r}" if node.module else "in the model"
        raise OperatorError(f"{error} ({where}{f', {node.source}' if node.source else ''})") from error
