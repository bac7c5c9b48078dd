"""What replicas have agreed on, in the store in which all ranks met.

An *epoch* is a time with the same members. Each round of an epoch has one decision, apply or redo, and each epoch one
successor with its members: whoever writes first decides (``compare_set``), and all read the same. Apply needs the vote
of every rank of every member, so nobody applies a round that another member goes on to redo; and a member that was left
out finds the redo of the round in which it was missing, since only decisions that all have read are deleted.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from autopar.content.files_read import ignore_this_thread

from .waits import LostPeersError

APPLY, REDO = "apply", "redo"
# Into how many waits that for the store is divided.
# Chosen: one of them is short.
_WAITS = 8
Successor = tuple[tuple[int, ...], dict[int, str]]


class Ledger:
    """Questions to ``store``. Each raises :class:`LostPeersError` if the store does not answer within ``patience``
    seconds."""

    def __init__(self, store: Any, patience: float) -> None:
        self.store, self._patience = store, patience
        self._asked: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]]] = queue.SimpleQueue()
        # On a thread of its own, since the store's own waits for an answer have no end where its host is cut off.
        threading.Thread(target=self._serve, name="autopar rounds", daemon=True).start()

    def _serve(self) -> None:
        ignore_this_thread()
        while True:
            question, answer = self._asked.get()
            try:
                answer.put((question(), None))
            except Exception as error:
                answer.put((None, error))

    def _ask(self, question: Callable[[], Any]) -> Any:
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._asked.put((question, answer))
        found, error = self._answer(answer)
        if isinstance(error, (dist.DistError, RuntimeError)):
            raise LostPeersError(f"the ranks' store does not answer: {str(error).strip().splitlines()[0]}") from error
        if error is not None:
            raise error
        return found

    def _answer(self, answer: queue.SimpleQueue[Any]) -> Any:
        # In several waits: a process that was stopped finds one of them over.
        for _ in range(_WAITS):
            with suppress(queue.Empty):
                return answer.get(timeout=self._patience / _WAITS)
        raise LostPeersError(
            f"the ranks' store has not answered for {self._patience:g} s: its host has left, or this one is cut off"
        )

    def _read(self, key: str) -> str | None:
        def question() -> str | None:
            return self.store.get(key).decode() if self.store.check([key]) else None

        found: str | None = self._ask(question)
        return found

    def _first(self, key: str, value: str) -> str:
        """The value of ``key``: the first that was written."""
        return str(self._ask(lambda: self.store.compare_set(key, "", value)).decode())

    def publish(self, key: str, value: str) -> None:
        """Writes something that others may want to know."""
        self._ask(lambda: self.store.set(key, value))

    def published(self, key: str) -> str | None:
        """What was written, if it was."""
        return self._read(key)

    def are_published(self, keys: Sequence[str]) -> bool:
        """Whether something was written for all ``keys``."""
        return not keys or bool(self._ask(lambda: self.store.check(list(keys))))

    def vote(self, epoch: int, number: int) -> int:
        """Says that this rank has the result of round ``number``; how many ranks have."""
        return int(self._ask(lambda: self.store.add(f"votes/{epoch}/{number}", 1)))

    def decide(self, epoch: int, number: int, outcome: str) -> str:
        """The decision on a round: ``outcome``, if there was none."""
        return self._first(f"decision/{epoch}/{number}", outcome)

    def decision(self, epoch: int, number: int) -> str | None:
        """The decision on a round, if there is one."""
        return self._read(f"decision/{epoch}/{number}")

    def forget(self, epoch: int, number: int) -> None:
        """Deletes a decision that every member has read."""

        def question() -> None:
            for key in (f"decision/{epoch}/{number}", f"votes/{epoch}/{number}"):
                with suppress(NotImplementedError):
                    self.store.delete_key(key)

        self._ask(question)

    def doubt(self, epoch: int) -> None:
        """Says that a round of ``epoch`` has failed somewhere, so that nobody waits for it."""
        self.publish(f"doubted/{epoch}", "")

    def is_doubted(self, epoch: int) -> bool:
        """Whether somebody has said so, or the epoch has ended."""
        keys = f"doubted/{epoch}", f"epoch/{epoch + 1}"
        return bool(self._ask(lambda: any(self.store.check([key]) for key in keys)))

    def answer(self, epoch: int, rank: int) -> None:
        """Says that ``rank`` is there, and waits for the end of ``epoch``."""
        self.publish(f"here/{epoch}/{rank}", "")

    def have_answered(self, epoch: int, ranks: Sequence[int]) -> bool:
        """Whether all of ``ranks`` have said so."""
        return self.are_published([f"here/{epoch}/{rank}" for rank in ranks])

    def succeed(self, epoch: int, members: Sequence[int], left: Mapping[int, str]) -> None:
        """Ends ``epoch``, unless somebody has: ``members`` go on, and those that have ``left`` did so for a reason."""
        text = json.dumps({"members": list(members), "left": {str(each): why for each, why in left.items()}})
        self._first(f"epoch/{epoch + 1}", text)

    def successor(self, epoch: int) -> Successor | None:
        """The members after ``epoch`` and why others are not among them, once it has ended."""
        text = self._read(f"epoch/{epoch + 1}")
        if text is None:
            return None
        data = json.loads(text)
        return tuple(data["members"]), {int(each): why for each, why in data["left"].items()}

    def stir(self, epoch: int) -> None:
        """Says that messages of a round of ``epoch`` move."""
        self._ask(lambda: self.store.add(f"moves/{epoch}", 1))

    def moves(self, epoch: int) -> int:
        """How often somebody has said so."""
        return int(self._ask(lambda: self.store.add(f"moves/{epoch}", 0)))
