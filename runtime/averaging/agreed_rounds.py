"""Rounds of replicas that go on when some of them leave: ``Options(sync=...(patience=))``.

gloo's collectives may end well on some ranks and with an error on others, so what arrived is used only once every rank
of every member has it (:mod:`.ledger`). Until then what was sent is kept. If it fails anywhere, all stop waiting and
answer; the members of which every rank has answered, or could not be waited for any longer without the others, are
those of the next epoch: they make new groups, and send again what is not decided. A replica of which a rank is missing
has left as a whole.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Hashable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from autopar.errors import OptionsError
from autopar.runtime.comm.groups import AxisGroup
from autopar.runtime.comm.waiting import WAITING
from autopar.runtime.faults.traffic import quiet_seconds_of
from autopar.runtime.torch_internals.collectives import world_timeout
from autopar.runtime.torch_internals.gloo_groups import GlooGroup
from autopar.runtime.torch_internals.interrupt import ranks_store

from .ledger import APPLY, REDO, Ledger
from .pending import Pending, Sender, Values
from .presence import Presence
from .replicas import Replicas
from .rounds import Rounds, SteadyRounds
from .waits import LostPeersError

# Seconds between two looks whether others have given up.
# Chosen: unnoticed beside an exchange, and no load for the store.
_LOOK_SECONDS = 0.25
# Seconds in which ranks that wait for a round answer once somebody doubts it, and are not taken for late.
# Chosen: several looks, on a machine that is busy.
_ANSWER_SECONDS = 3.0
# Pauses in a wait: the shortest, the longest for what comes by gloo and for what comes by the store, in seconds; and
# otherwise this part of what has been waited.
# Chosen: a twentieth more of a wait at most, and twenty questions a second to the store.
_SHORTEST, _LONG, _LONGEST, _PART = 0.0002, 0.005, 0.05, 0.05
# How often in ``patience`` seconds ranks say, and hear, that messages move.
# Chosen: so that it is heard in time.
_SIGNS = 8
# How many times ``patience`` a communication may take that nothing else ends.
# Chosen: ends are ours; this is for systems that do not tell which connections there are.
_MOST_WAITS = 10
# Seconds that the process with the store goes on after the last round.
# Chosen: others look for its decision twenty times a second.
_LINGER_SECONDS = 2.0
# Seconds until communication that was interrupted has ended.
# Chosen: gloo's threads see it at once.
_END_SECONDS = 5.0
# How often in a row all members try again, before it is the way between them that has failed.
_MOST_VAIN = 3


class LeftError(LostPeersError):
    """The others have gone on without this replica."""


@dataclass(eq=False)
class AgreedRound:
    """A round of :class:`AgreedRounds`. ``pending`` is None if it could not begin, or failed; ``before``: the epoch and
    number of the round before in its ``lane``, of which every rank that votes for this one has read the decision."""

    rounds: AgreedRounds
    number: int
    lane: Hashable
    send: Sender
    before: tuple[int, int] | None
    epoch: int = 0
    pending: Pending | None = None
    voted: bool = False
    applied: bool = False

    def is_done(self) -> bool:
        return self.rounds.glance(self)

    def wait(self) -> Values:
        WAITING.during(lambda: self.rounds.conclude(self))
        assert self.pending is not None
        return self.pending.wait()


class _Patience:
    """How long a wait may still take: ``seconds`` without a sign that messages move."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self.often = seconds, seconds / _SIGNS
        self._since = self._listened = self._begin = time.monotonic()
        self._moves, self._voted = -1, False

    @property
    def end(self) -> float:
        return self._since + self._seconds

    def pause(self, voted: bool) -> None:
        """Waits until the next look. The votes of others come soon after one's own."""
        if voted and not self._voted:
            self._voted, self._begin = voted, time.monotonic()
        longest = _LONGEST if voted else _LONG
        time.sleep(min(longest, max(_SHORTEST, _PART * (time.monotonic() - self._begin))))

    def is_due(self) -> bool:
        """Whether it is time to tell and to hear whether messages move."""
        now = time.monotonic()
        if now - self._listened < self.often:
            return False
        self._listened = now
        return True

    def hear(self, moves: int) -> None:
        """How often others have said that they do."""
        if self._moves >= 0 and moves != self._moves:
            self._since = time.monotonic()
        self._moves = moves


class AgreedRounds:
    """The rounds of ``replicas``, none of which waits for another for more than ``patience`` seconds. Made
    collectively over all ranks. Raises :class:`LostPeersError` where nobody can go on, and :class:`LeftError`."""

    repeats = True

    def __init__(self, replicas: Replicas, patience: float) -> None:
        self._members, self._patience = replicas.members, patience
        ranks = replicas.whole.mesh.mesh.reshape(replicas.count, -1)
        # Of each replica, in the order of their coordinates.
        self._ranks: list[list[int]] = ranks.tolist()
        self._rank = dist.get_rank()
        self._place = self._ranks[replicas.members.own].index(self._rank)
        self._ledger = Ledger(ranks_store(_prefix(tuple(ranks.flatten().tolist()))), patience)
        self._epochs = [replicas.members.present]
        self._vain, self._begun = 0, 0
        self._failure: RuntimeError | None = None
        self._open: list[AgreedRound] = []
        self._concluded: dict[Hashable, tuple[int, int]] = {}
        self._presence = Presence(self._ledger, self._rank)
        self._group: GlooGroup | None = None
        self._peers = self._make_group(world_timeout("gloo") or timedelta(seconds=_MOST_WAITS * patience))
        self._presence.meet(self._others())
        self._ended = time.monotonic()
        if self._rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            atexit.register(self._linger)  # The store is in this process.

    def _linger(self) -> None:
        """Lets the others read the last decision before the store ends."""
        time.sleep(max(0.0, self._ended + _LINGER_SECONDS - time.monotonic()))

    @property
    def _epoch(self) -> int:
        return len(self._epochs) - 1

    def _others(self) -> list[int]:
        """The ranks at this one's place of the other members."""
        return [self._ranks[each][self._place] for each in self._epochs[-1] if each != self._members.own]

    def begin(self, lane: Hashable, send: Sender) -> AgreedRound:
        """Begins a round by ``send``, which may be called again."""
        made = AgreedRound(self, self._begun, lane, send, self._concluded.get(lane))
        self._begun += 1
        self._open.append(made)
        self._send(made)
        return made

    def _send(self, made: AgreedRound) -> None:
        made.epoch, made.voted, made.pending = self._epoch, False, None
        if self._peers.size > 1 and self._peers.group is None:
            return  # The members did not meet.
        try:
            made.pending = made.send(self._peers)
        except RuntimeError as error:
            self._failed(made, error)

    def _failed(self, made: AgreedRound, error: RuntimeError) -> None:
        made.pending, self._failure = None, error
        self._ledger.doubt(made.epoch)

    def glance(self, made: AgreedRound) -> bool:
        """Whether it has been decided to use what arrived; votes for that once it has arrived here."""
        if made.applied:
            return True
        if not made.voted:
            if made.pending is None or not made.pending.is_done() or not self._vote(made):
                return False
            if made.applied:
                return True
        made.applied = self._ledger.decision(made.epoch, made.number) == APPLY
        return made.applied

    def _vote(self, made: AgreedRound) -> bool:
        assert made.pending is not None
        try:
            made.pending.wait()
        except RuntimeError as error:
            self._failed(made, error)
            return False
        made.voted = True
        everyone = len(self._epochs[made.epoch]) * len(self._ranks[0])
        if self._ledger.vote(made.epoch, made.number) == everyone:
            made.applied = self._ledger.decide(made.epoch, made.number, APPLY) == APPLY
            if made.before is not None:
                self._ledger.forget(*made.before)
        return True

    def conclude(self, made: AgreedRound) -> None:
        """Waits until what arrived is to be used, by as many epochs as it takes."""
        try:
            while not made.applied:
                if self._await(made) == REDO:
                    self._move_on()
        except LostPeersError:
            self._end_group()  # The process could not end before what is in flight.
            raise
        if made in self._open:
            self._open.remove(made)
            self._concluded[made.lane], self._ended = (made.epoch, made.number), time.monotonic()
            if made.epoch == self._epoch:
                self._vain = 0
            # Here, and not where it was agreed on: all ranks of a replica are at the same step here.
            present = self._epochs[made.epoch]
            if len(present) < self._members.count:
                self._members.present = present

    def _await(self, made: AgreedRound) -> str:
        patience, looked = _Patience(self._patience), time.monotonic()
        while not self.glance(made):
            if made.pending is None:
                return self._resolve(made, patience.end)
            if time.monotonic() - looked >= _LOOK_SECONDS:
                looked = time.monotonic()
                if self._ledger.is_doubted(made.epoch):
                    return self._resolve(made, patience.end)
                if patience.is_due():
                    self._tell_moves(made, patience.often)
                    patience.hear(self._ledger.moves(made.epoch))
                if looked >= patience.end or self._someone_is_gone():
                    self._ledger.doubt(made.epoch)
                    return self._resolve(made, looked)
            patience.pause(made.voted)
        return APPLY

    def _tell_moves(self, made: AgreedRound, often: float) -> None:
        """Tells those that wait if messages of a round that takes long have moved since it was told before."""
        if made.voted or self._group is None:
            return
        with ExitStack() as stack:
            if quiet_seconds_of(self._group.opened.connections(stack)) < often:
                self._ledger.stir(made.epoch)

    def _resolve(self, made: AgreedRound, end: float) -> str:
        """The decision on a round that is doubted. Others are waited for until ``end``, and a little longer."""
        end = max(end, time.monotonic() + _ANSWER_SECONDS)
        answered = False
        while (decision := self._ledger.decision(made.epoch, made.number)) is None:
            if self._ledger.successor(made.epoch) is not None:
                decision = self._ledger.decide(made.epoch, made.number, REDO)
                break
            if not answered:
                self._ledger.answer(made.epoch, self._rank)
                answered = True
            over = time.monotonic() - end
            if over > self._patience + _ANSWER_SECONDS:
                raise LostPeersError("no replica is left that has all of its ranks")
            self._someone_is_gone()
            if self._place == 0:
                self._propose(made.epoch, over > 0)
            time.sleep(_LOOK_SECONDS)
        made.applied = decision == APPLY
        return decision

    def _someone_is_gone(self) -> bool:
        """Whether a process at this one's place has ended; tells all of those that have."""
        gone = [rank for rank in self._others() if self._presence.is_gone(rank)]
        for rank in gone:
            index = next(each for each, ranks in enumerate(self._ranks) if rank in ranks)
            self._ledger.publish(f"gone/{index}", f"the process of rank {rank} has ended")
        return bool(gone)

    def _propose(self, epoch: int, over: bool) -> None:
        """Ends the epoch, if no more answers are to be expected: those of which all ranks have answered go on."""
        present, left = [], {}
        for index in self._epochs[epoch]:
            gone = self._ledger.published(f"gone/{index}")
            if gone is None and self._ledger.have_answered(epoch, self._ranks[index]):
                present.append(index)
            elif gone is None and not over:
                return
            else:
                left[index] = gone or f"it was later than patience={self._patience:g} seconds"
        if present:
            self._ledger.succeed(epoch, present, left)

    def _move_on(self) -> None:
        """Begins the next epoch with its members, and sends again what is not decided."""
        successor = self._ledger.successor(self._epoch)
        assert successor is not None
        present, left = successor
        if self._members.own not in present:
            raise LeftError(left[self._members.own])
        self._vain = self._vain + 1 if present == self._epochs[-1] else 0
        if self._vain > _MOST_VAIN:
            raise LostPeersError(
                f"{len(present)} replicas reach the ranks' store, and have not reached each other in {_MOST_VAIN + 1} "
                f"tries; the last failure here: {self._failure}"
            ) from self._failure
        self._announce(present, left)
        self._end_group()
        self._epochs.append(present)
        self._peers = self._make_group(timedelta(seconds=self._patience))
        for each in self._open:
            if each.applied or self._ledger.decide(each.epoch, each.number, REDO) == APPLY:
                each.applied = True
            else:
                self._send(each)

    def _announce(self, present: tuple[int, ...], left: dict[int, str]) -> None:
        if left and present[0] == self._members.own and self._place == 0:
            who = "; ".join(f"replica {index} has left: {why}" for index, why in left.items())
            print(f"autopar: {who}. {len(present)} go on", file=sys.stderr, flush=True)

    def _end_group(self) -> None:
        """Ends what is in flight, whose buffers and memories are to be used again."""
        if self._group is None:
            return
        self._group.opened.interrupt()
        end = time.monotonic() + _END_SECONDS
        flying = [each.pending for each in self._open if each.pending is not None]
        while not all(each.is_done() for each in flying) and time.monotonic() < end:
            time.sleep(_SHORTEST)

    def _make_group(self, come: timedelta) -> AxisGroup:
        """The group at this rank's place among the members; without a group if they do not come, which all hear."""
        epoch, present = self._epoch, self._epochs[-1]
        index, self._group = present.index(self._members.own), None
        if len(present) > 1 and (epoch == 0 or self._have_come()):
            store = PrefixStore(f"group/{epoch}/{self._place}", self._ledger.store)
            limit = timedelta(seconds=_MOST_WAITS * self._patience)
            try:
                self._group = GlooGroup(store, index, len(present), come, limit)
            except RuntimeError:
                if epoch == 0:
                    raise
                self._ledger.doubt(epoch)
        return AxisGroup(None if self._group is None else self._group.group, len(present), index)

    def _have_come(self) -> bool:
        """Whether all ranks at this one's place begin the new epoch."""
        self._ledger.publish(f"come/{self._epoch}/{self._rank}", "")
        end, keys = time.monotonic() + self._patience, [f"come/{self._epoch}/{rank}" for rank in self._others()]
        while not self._ledger.are_published(keys):
            if self._someone_is_gone() or time.monotonic() > end or self._ledger.is_doubted(self._epoch):
                self._ledger.doubt(self._epoch)
                return False
            time.sleep(_LONGEST)
        return True


# By ranks: how often they have made rounds.
_COUNTS: dict[tuple[int, ...], int] = {}


def _prefix(ranks: tuple[int, ...]) -> str:
    _COUNTS[ranks] = _COUNTS.get(ranks, -1) + 1
    return f"autopar/rounds/{'-'.join(map(str, ranks))}/{_COUNTS[ranks]}"


def rounds_of(replicas: Replicas, patience: float | None) -> Rounds:
    """The rounds of ``Options(sync=...(patience=))``. Raises :class:`OptionsError` for devices without gloo."""
    if patience is None or replicas.count == 1:
        return SteadyRounds(replicas.peers)
    kind = replicas.whole.mesh.device_type
    if kind != "cpu":
        raise OptionsError(
            f"patience={patience:g} on {kind} devices: replicas that go on when others leave exchange through gloo, "
            "between CPUs so far; leave patience out, and let the launcher restart after a fault"
        )
    return AgreedRounds(replicas, patience)
