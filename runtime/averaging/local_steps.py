"""Local steps: :class:`autopar.LocalSGD` and :class:`autopar.DiLoCo`, in fragments and beside computation.

With x the replica's parameters, *a* where the last exchange ended (the *anchor*, the same on all replicas) and C what a
code leaves of a tensor, an exchange is

    d = C(a - x + e),   e = (a - x + e) - d,   g = mean of d over the replicas,   a = outer(a, g),
    x = kept x + (1 - kept) a

where ``outer`` is a step of the outer optimizer with gradient g, and a - g under local SGD: the mean of x. Without a
code local SGD sends x itself, and needs no anchor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autopar.errors import PlanMismatchError
from autopar.sync import DiLoCo, LocalSGD

from .fragments import Fragment, fragments_of
from .mean import Mean, WholeMean, mean_by
from .pending import Pending, joined
from .pieces import Piece, own_pieces, spread
from .rounds import Round, Rounds

# Whether something holds on all ranks of the replica; collective over them.
Everywhere = Callable[[bool], bool]


@dataclass
class _InFlight:
    begun: int
    round: Round


class LocalSteps:
    """The exchanges of the parameters of one optimizer. ``step`` is called after each of its steps."""

    def __init__(
        self,
        sync: LocalSGD,
        pieces: tuple[Piece, ...],
        buffers: tuple[Piece, ...],
        rounds: Rounds,
        everywhere: Everywhere,
    ) -> None:
        self._sync, self._rounds, self._everywhere = sync, rounds, everywhere
        self.fragments = fragments_of(sync, pieces, buffers)
        self._mean: Mean = mean_by(sync.compression, rounds.repeats)
        self.count = 0
        self._flying: dict[int, _InFlight] = {}
        self._anchors: dict[str, torch.Tensor] = {}
        self._outer: torch.optim.Optimizer | None = None
        if isinstance(sync, DiLoCo) or sync.compression is not None:
            self._anchors = {piece.name: wide(piece.local).clone() for piece in own_pieces(pieces)}
        if isinstance(sync, DiLoCo) and self._anchors:
            self._outer = sync.make_outer(list(self._anchors.values()))

    def step(self) -> None:
        """Counts a step of the optimizer; ends and begins exchanges. Collective over the replica, and over all where it
        waits."""
        self.count += 1
        for number, fragment in enumerate(self.fragments):
            if number in self._flying and self._is_over(self._flying[number]):
                self._end(fragment, self._flying.pop(number))
        for number, fragment in enumerate(self.fragments):
            if fragment.is_due(self.count):
                begun = self._begin(number, fragment)
                if self._sync.latest:
                    self._flying[number] = begun
                else:
                    self._end(fragment, begun)

    def _is_over(self, exchange: _InFlight) -> bool:
        if self.count - exchange.begun >= self._sync.latest:
            return True
        return self._sync.staleness is not None and self._everywhere(exchange.round.is_done())

    def _begin(self, number: int, fragment: Fragment) -> _InFlight:
        own = {piece.name: wide(piece.local) for piece in own_pieces(fragment.pieces)}
        if self._anchors:
            own = {name: self._anchors[name] - value for name, value in own.items()}
        buffers = {piece.name: wide(piece.local) for piece in own_pieces(fragment.buffers)}
        if self._rounds.repeats and self._sync.latest:  # They are to be sent again, and steps go on.
            own, buffers = ({name: v.clone() for name, v in each.items()} for each in (own, buffers))
        # Last what may go on sending later: all ranks have to send in one order.
        send = joined(WholeMean().start(buffers), self._mean.start(own))
        return _InFlight(self.count, self._rounds.begin((id(self), number), send))

    def _end(self, fragment: Fragment, exchange: _InFlight) -> None:
        arrived = exchange.round.wait()
        means = {piece.name: arrived[piece.name] for piece in own_pieces(fragment.pieces)}
        if self._anchors:
            self._move_anchors(means)
            means = {name: self._anchors[name] for name in means}
        kept = self._sync.kept
        for piece in own_pieces(fragment.pieces):
            common = means[piece.name].to(piece.local.dtype)
            piece.local.copy_(torch.lerp(common, piece.local, kept) if kept else common)
        for piece in own_pieces(fragment.buffers):
            piece.local.copy_(arrived[piece.name])
        spread((*fragment.pieces, *fragment.buffers))

    def _move_anchors(self, gradients: Mapping[str, torch.Tensor]) -> None:
        if self._outer is None:
            for name, gradient in gradients.items():
                self._anchors[name].sub_(gradient)
            return
        for name, gradient in gradients.items():
            self._anchors[name].grad = gradient
        self._outer.step()
        self._outer.zero_grad(set_to_none=True)

    def settle(self) -> None:
        """Waits for what is in flight, whose results are still used when they are due."""
        for exchange in self._flying.values():
            exchange.round.wait()

    def state(self) -> dict[str, Any]:
        """What the next steps depend on, beside the parameters. Waits for what is in flight."""
        self.settle()
        flying = {number: {"begun": each.begun, "main": each.round.wait()} for number, each in self._flying.items()}
        outer = None if self._outer is None else self._outer.state_dict()
        mean = self._mean.state()
        return {"count": self.count, "anchors": dict(self._anchors), "outer": outer, "mean": mean, "flying": flying}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restores a state of the same pieces. Raises :class:`PlanMismatchError` for others."""
        check_same_pieces(self._anchors, state["anchors"])
        self.count = state["count"]
        for name, anchor in self._anchors.items():
            anchor.copy_(state["anchors"][name])
        if self._outer is not None:
            self._outer.load_state_dict(state["outer"])
        self._mean.load(state["mean"])
        self._flying = {
            number: _InFlight(each["begun"], _arrived({**each["main"], **each.get("buffers", {})}))
            for number, each in state["flying"].items()
        }


def check_same_pieces(own: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]) -> None:
    """Raises :class:`PlanMismatchError` unless this rank exchanges the shards that were saved."""
    shapes, before = ({name: tuple(value.shape) for name, value in each.items()} for each in (own, saved))
    if shapes != before:
        name = next(name for name in (*shapes, *before) if shapes.get(name) != before.get(name))
        raise PlanMismatchError(
            f"this rank exchanges {shapes.get(name, 'nothing')} of {name}, and the checkpoint has "
            f"{before.get(name, 'nothing')} of it: exchanges go on only under the plan of then. Give "
            "parallelize that plan, plan=autopar.Plan.from_json(found.plan) of what load returns"
        )


def wide(local: torch.Tensor) -> torch.Tensor:
    """``local`` in the dtype in which means are computed: 32 bits at least."""
    return local.detach().to(torch.promote_types(local.dtype, torch.float32))


def _arrived(means: Mapping[str, torch.Tensor]) -> Round:
    return Pending([], lambda: dict(means))
