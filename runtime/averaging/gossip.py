"""Decentralised averaging: :class:`autopar.Gossip`.

With x a replica's parameters and w the weights of a round, x_i = sum over j of w_ij x_j after its optimizer step
(D-PSGD, Lian et al. 2017, in the order adapt, then combine). With a code C, replica i keeps h_i, what its neighbours
know of it, and s_i = sum over j of w_ij h_j (CHOCO-SGD, Koloskova et al. 2019):

    q_i = C(x_i - h_i),   h_i += q_i,   s_i += sum over j of w_ij q_j,   x_i += consensus (s_i - h_i)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from autopar.runtime.comm.groups import AxisGroup
from autopar.sync import Gossip

from .codecs import codec_of, pack, unpack
from .local_steps import check_same_pieces, wide
from .pending import Pending, Sender, Values, joined
from .pieces import Piece, own_pieces, spread
from .rounds import Rounds
from .topology import Round, round_of

# What arrives beside values of parameters, which have dots or are identifiers.
_KNOWN, _MIXED, _AMONG = "known/", "mixed/", "among/"


@dataclass(frozen=True)
class _Flat:
    """Pieces of one dtype, as they were sent."""

    pieces: Sequence[Piece]
    values: torch.Tensor


class Mixing:
    """The exchanges of the parameters of one optimizer. ``step`` is called after each of its steps."""

    def __init__(self, sync: Gossip, pieces: tuple[Piece, ...], buffers: tuple[Piece, ...], rounds: Rounds) -> None:
        self._sync, self._rounds = sync, rounds
        self._pieces, self._buffers = pieces, buffers
        self._codec = codec_of(sync.compression)
        self.count = 0
        known = [] if self._codec is None else [wide(piece.local).reshape(-1) for piece in own_pieces(pieces)]
        # Replicas have equal parameters here, so neighbours know them.
        self._known = [value.clone() for value in known]
        self._mixed = [value.clone() for value in known]
        # Among how many replicas, since neighbours change when some leave.
        self._mixed_among = 0

    def step(self) -> None:
        """Counts a step of the optimizer, and mixes if it is due. Collective over neighbours and the replica."""
        self.count += 1
        if self.count % self._sync.every:
            return
        number = self.count // self._sync.every - 1
        mixed = self._buffers if self._codec is not None else (*self._pieces, *self._buffers)
        senders = [self._sender_of(flat, number) for flat in _flats(mixed)]
        if self._codec is not None and self._known:
            senders.append(self._sender_of_changes(number))
        arrived = self._rounds.begin(id(self), joined(*senders)).wait()
        self._write(arrived, own_pieces((*self._pieces, *self._buffers)))
        spread((*self._pieces, *self._buffers))

    def _write(self, arrived: Mapping[str, torch.Tensor], own: Sequence[Piece]) -> None:
        for piece in own:
            piece.local.copy_(arrived[piece.name].view(piece.local.shape))
        if self._known:
            count = range(len(self._known))
            self._known = [arrived[f"{_KNOWN}{number}"] for number in count]
            self._mixed = [arrived[f"{_MIXED}{number}"] for number in count]
            self._mixed_among = int(arrived[_AMONG])

    def _round(self, number: int, peers: AxisGroup) -> _Mix:
        mixing = round_of(self._sync.topology, peers.index, peers.size, number, self._sync.seed)
        return _Mix(mixing, peers, self._rounds.repeats)

    def _sender_of(self, flat: _Flat, number: int) -> Sender:
        """Mixes what is sent as it is."""

        def send(peers: AxisGroup) -> Pending:
            mix = self._round(number, peers)
            received, works = mix.exchange(flat.values)

            def finish() -> Values:
                own = wide(flat.values)
                total = mix.total(own, map(wide, received))
                way = torch.lerp(own, total, self._sync.consensus) if self._sync.consensus < 1 else total
                parts = way.split([piece.local.numel() for piece in flat.pieces])
                return {piece.name: part for piece, part in zip(flat.pieces, parts, strict=True)}

            return Pending(works, finish)

        return send

    def _sender_of_changes(self, number: int) -> Sender:
        """Mixes what neighbours know of each other, and sends what they do not know."""
        codec = self._codec
        assert codec is not None
        own = own_pieces(self._pieces)
        values = [wide(piece.local).reshape(-1).clone() for piece in own]
        message = pack(codec, [value - known for value, known in zip(values, self._known, strict=True)])
        changes = unpack(codec, message, values)

        def send(peers: AxisGroup) -> Pending:
            mix = self._round(number, peers)
            received, works = mix.exchange(message)
            known_to_each: list[torch.Tensor] = []
            meets = self._mixed_among not in (0, peers.size)
            if meets:  # Neighbours of whom nothing is known.
                known_to_each, more = mix.exchange(torch.cat(self._known))
                works = [*works, *more]

            def finish() -> Values:
                mixed = mix.total(torch.cat(self._known if meets else self._mixed), known_to_each, whole=meets)
                mixed = mixed + mix.total(torch.cat(changes), (torch.cat(unpack(codec, e, values)) for e in received))
                among = {_AMONG: torch.tensor(peers.size)}
                parts = mixed.split([value.numel() for value in values])
                return among | self._way(own, values, changes, parts)

            return Pending(works, finish)

        return send

    def _way(
        self, own: Sequence[Piece], values: Sequence[torch.Tensor], changes: Sequence[torch.Tensor], mixed: Any
    ) -> Values:
        arrived: Values = {}
        for number, (piece, value, change, into) in enumerate(zip(own, values, changes, mixed, strict=True)):
            known = self._known[number] + change
            arrived |= {f"{_KNOWN}{number}": known, f"{_MIXED}{number}": into}
            arrived[piece.name] = value + self._sync.consensus * (into - known)
        return arrived

    def settle(self) -> None:
        """Nothing is in flight between steps."""

    def state(self) -> dict[str, Any]:
        """What the next steps depend on, beside the parameters."""
        known, mixed = list(self._known), list(self._mixed)
        return {"count": self.count, "known": known, "mixed": mixed, "among": self._mixed_among}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restores a state of the same pieces. Raises :class:`PlanMismatchError` for others."""
        own, saved = (dict(zip(map(str, range(len(v))), v, strict=True)) for v in (self._known, state["known"]))
        check_same_pieces(own, saved)
        self.count, self._known, self._mixed = state["count"], list(state["known"]), list(state["mixed"])
        self._mixed_among = state.get("among", 0)


@dataclass(frozen=True)
class _Mix:
    """One round among ``peers``. ``agreed``: they wait for each other at its end, so one collective is as good as
    messages, of which gloo says only to who waits whether they have arrived."""

    mixing: Round
    peers: AxisGroup
    agreed: bool

    def total(self, own: torch.Tensor, received: Iterable[torch.Tensor], *, whole: bool = True) -> torch.Tensor:
        """The sum by the weights of the round; only ``own`` as it is, if it is not the ``whole``."""
        if not whole:
            return own
        total = own * self.mixing.own
        for (_, weight), value in zip(self.mixing.receives, received, strict=True):
            total += value * weight
        return total

    def exchange(self, sent: torch.Tensor) -> tuple[list[torch.Tensor], list[Any]]:
        """What will arrive, in the order of the round, and the communication."""
        received = [torch.empty_like(sent) for _ in self.mixing.receives]
        if self.peers.size == 1:
            return received, []
        if self.agreed:
            return self._collectively(sent)
        group = self.peers.group
        sends = [_message(dist.isend, sent, group, peer) for peer in self.mixing.sends]
        arrivals = zip(self.mixing.receives, received, strict=True)
        receives = [_message(dist.irecv, buffer, group, peer) for (peer, _), buffer in arrivals]
        return received, dist.batch_isend_irecv([*sends, *receives]) if sends or receives else []

    def _collectively(self, sent: torch.Tensor) -> tuple[list[torch.Tensor], list[Any]]:
        data, everyone = sent.view(torch.uint8), range(self.peers.size)
        sources = [peer for peer, _ in self.mixing.receives]
        given = [data.numel() if peer in self.mixing.sends else 0 for peer in everyone]
        taken = [data.numel() if peer in sources else 0 for peer in everyone]
        received = data.new_empty(sum(taken))
        out = data.repeat(len(self.mixing.sends))
        work = dist.all_to_all_single(received, out, taken, given, group=self.peers.group, async_op=True)
        parts = dict(zip(sorted(sources), received.split(data.numel()) if sources else (), strict=True))
        return [parts[peer].view(sent.dtype) for peer in sources], [work]


def _message(send: Any, tensor: torch.Tensor, group: dist.ProcessGroup | None, peer: int) -> dist.P2POp:
    return dist.P2POp(send, tensor.view(torch.uint8), group=group, group_peer=peer)


def _flats(pieces: Sequence[Piece]) -> list[_Flat]:
    own = own_pieces(pieces)
    flats = []
    for dtype in dict.fromkeys(piece.local.dtype for piece in own):
        members = [piece for piece in own if piece.local.dtype == dtype]
        flats.append(_Flat(members, torch.cat([piece.local.reshape(-1) for piece in members])))
    return flats
