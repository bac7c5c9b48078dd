"""Decentralised averaging: :class:`autopar.Gossip`.

With x a replica's parameters and w the weights of a round, x_i = sum over j of w_ij x_j after its optimizer step
(D-PSGD, Lian et al. 2017, in the order adapt, then combine). With a code C, replica i keeps h_i, what its neighbours
know of it, and s_i = sum over j of w_ij h_j (CHOCO-SGD, Koloskova et al. 2019):

    q_i = C(x_i - h_i),   h_i += q_i,   s_i += sum over j of w_ij q_j,   x_i += consensus (s_i - h_i)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from autopar.runtime.comm.groups import AxisGroup
from autopar.sync import Gossip

from .codecs import codec_of, pack, unpack
from .local_steps import check_same_pieces, wide
from .pieces import Piece, own_pieces, spread
from .topology import Round, round_of
from .waits import awaited


class Mixing:
    """The exchanges of the parameters of one optimizer. ``step`` is called after each of its steps."""

    def __init__(self, sync: Gossip, pieces: tuple[Piece, ...], buffers: tuple[Piece, ...], peers: AxisGroup) -> None:
        self._sync, self._peers = sync, peers
        self._pieces, self._buffers = pieces, buffers
        self._codec = codec_of(sync.compression)
        self.count = 0
        known = [] if self._codec is None else [wide(piece.local).reshape(-1) for piece in own_pieces(pieces)]
        # Replicas have equal parameters here, so neighbours know them.
        self._known = [value.clone() for value in known]
        self._mixed = [value.clone() for value in known]

    def step(self) -> None:
        """Counts a step of the optimizer, and mixes if it is due. Collective over neighbours and the replica."""
        self.count += 1
        if self.count % self._sync.every:
            return
        number = self.count // self._sync.every - 1
        mixing = round_of(self._sync.topology, self._peers.index, self._peers.size, number, self._sync.seed)
        if self._codec is None:
            self._mix(mixing, (*self._pieces, *self._buffers))
        else:
            self._mix_known(mixing)
            self._mix(mixing, self._buffers)
        spread((*self._pieces, *self._buffers))

    def _mix(self, mixing: Round, pieces: tuple[Piece, ...]) -> None:
        own = own_pieces(pieces)
        for dtype in dict.fromkeys(piece.local.dtype for piece in own):
            members = [piece for piece in own if piece.local.dtype == dtype]
            sent = torch.cat([piece.local.reshape(-1) for piece in members])
            total = wide(sent) * mixing.own
            for weight, received in self._exchanged(mixing, sent):
                total += wide(received) * weight
            way = torch.lerp(wide(sent), total, self._sync.consensus) if self._sync.consensus < 1 else total
            _write(members, way)

    def _mix_known(self, mixing: Round) -> None:
        assert self._codec is not None
        own = own_pieces(self._pieces)
        if not own:
            return
        values = [wide(piece.local).reshape(-1) for piece in own]
        message = pack(self._codec, [value - known for value, known in zip(values, self._known, strict=True)])
        changes = unpack(self._codec, message, values)
        for known, mixed, change in zip(self._known, self._mixed, changes, strict=True):
            known += change
            mixed += change * mixing.own
        for weight, received in self._exchanged(mixing, message):
            for mixed, change in zip(self._mixed, unpack(self._codec, received, values), strict=True):
                mixed += change * weight
        for piece, value, known, mixed in zip(own, values, self._known, self._mixed, strict=True):
            _write([piece], value + self._sync.consensus * (mixed - known))

    def _exchanged(self, mixing: Round, sent: torch.Tensor) -> list[tuple[float, torch.Tensor]]:
        """What arrives, with its weights, in the order of ``mixing``."""
        received = [(weight, torch.empty_like(sent)) for _, weight in mixing.receives]
        group = self._peers.group
        sends = [_message(dist.isend, sent, group, peer) for peer in mixing.sends]
        arrivals = zip(mixing.receives, received, strict=True)
        receives = [_message(dist.irecv, buffer, group, peer) for (peer, _), (_, buffer) in arrivals]
        if sends or receives:
            for work in dist.batch_isend_irecv([*sends, *receives]):
                awaited(work.wait)
        return received

    def settle(self) -> None:
        """Nothing is in flight between steps."""

    def state(self) -> dict[str, Any]:
        """What the next steps depend on, beside the parameters."""
        return {"count": self.count, "known": list(self._known), "mixed": list(self._mixed)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restores a state of the same pieces. Raises :class:`PlanMismatchError` for others."""
        own, saved = (dict(zip(map(str, range(len(v))), v, strict=True)) for v in (self._known, state["known"]))
        check_same_pieces(own, saved)
        self.count, self._known, self._mixed = state["count"], list(state["known"]), list(state["mixed"])


def _message(send: Any, tensor: torch.Tensor, group: dist.ProcessGroup | None, peer: int) -> dist.P2POp:
    return dist.P2POp(send, tensor.view(torch.uint8), group=group, group_peer=peer)


def _write(pieces: Sequence[Piece], flat: torch.Tensor) -> None:
    for piece, values in zip(pieces, flat.split([piece.local.numel() for piece in pieces]), strict=True):
        piece.local.copy_(values.view(piece.local.shape))
