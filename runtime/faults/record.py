"""What a rank says of itself to the others, at each interval (:mod:`.pace`)."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

State = Literal["running", "broken", "failed", "ended"]


@dataclass(frozen=True)
class Record:
    """``number`` of the collective call that the rank is in (or was in last), its ``name`` ("" outside of calls),
    whether it is ``planning``, whether it ``waits`` for others, the seconds for which it has been ``still``, its
    ``instruction`` and the user's ``line``. ``state``: ``broken`` if a communication failed, ``failed`` if it raised an
    error of its own, ``ended`` if its script came to its end; ``note`` says which error, also of one that its last
    call raised and that it may have caught (``running``). ``timeout``: the seconds for which others may wait for it.
    ``where``: its process and host."""

    number: int = 0
    name: str = ""
    planning: bool = False
    waits: bool = False
    still: float = 0.0
    instruction: str = ""
    line: str = ""
    state: State = "running"
    note: str = ""
    timeout: float = 60.0
    where: str = ""

    @property
    def place(self) -> str:
        """In words: the call, or the line of the user's code."""
        at = self.line and f" at {self.line}"
        if not self.name:
            return f"outside of autopar{at}" if at else "outside of autopar"
        inside = f", in {self.instruction}" if self.instruction else " while it plans" if self.planning else ""
        return f"in {self.call}{at}{inside}"

    @property
    def call(self) -> str:
        return f"{self.name} (collective call {self.number})"


# The kind of value that each field has.
_KINDS: dict[str, Any] = {
    field.name: (float, int) if field.type == "float" else type(field.default) for field in fields(Record)
}


def to_json(record: Record) -> str:
    return json.dumps(vars(record))


def from_json(text: bytes) -> Record | None:
    """The record that another rank sent; None for anything else."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict) or not data.keys() <= _KINDS.keys() or data.get("state") not in get_args(State):
        return None
    if not all(isinstance(value, _KINDS[name]) for name, value in data.items()):
        return None
    return Record(**data)


def letters_from_json(text: bytes) -> dict[str, str]:
    """What a rank says of the processes it was asked about (:func:`~.process_state.state_of`), by their place."""
    with suppress(ValueError, AttributeError, RecursionError):
        found = json.loads(text).get("letters")
        if isinstance(found, dict):
            return {where: letter for where, letter in found.items() if isinstance(letter, str)}
    return {}
