"""Which training saves in a folder: two in one would delete and replace each other's checkpoints.

The one that saved last has its name in a file. Another that comes takes over, since the first is mostly one that was
killed, on whatever host. If it is alive, it finds at its next save that it was taken for dead, and takes the folder
back; the other is refused at its second save. Only one that comes back after others have saved several times is refused
itself. So nothing depends on clocks, on what can be known of other hosts, nor on how long a training may be silent.
"""

from __future__ import annotations

import json
import os
import socket
import uuid
import warnings
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

from autopar.errors import CheckpointError

from .stores import Store

# The name of the file.
CLAIM = ".claim.json"
# How many trainings that were refused are remembered.
# Chosen: far more than there are at a time.
_REMEMBERED = 16
# By process (a fork is another training): its name; and the folders in which it has saved.
_NAMES: dict[int, str] = {}
_CLAIMED: set[tuple[str, str]] = set()


@dataclass(frozen=True)
class Claim:
    """A ``training`` by a random name, the ``process`` of its first rank and the ``host`` of that, how often it has
    saved in a row, and the trainings that were ``refused``."""

    training: str
    host: str
    process: int
    saves: int = 0
    refused: tuple[str, ...] = ()


def claim(store: Store) -> None:
    """Makes this training the one that saves in ``store``, which exists. Raises :class:`CheckpointError` if another one
    does."""
    own, found, place = _own(), _read(store), str(store)
    found = own if found is None else found
    refused = found.refused
    if found.training != own.training:
        before = (own.training, place) in _CLAIMED
        if own.training in refused or (before and found.saves > 1):
            raise CheckpointError(
                f"nothing was saved in {store}: another training saves there, process {found.process} on {found.host}; "
                "two in one folder would delete each other's checkpoints. Give this one a folder of its own, or end "
                f"the other (if there is none any more, delete {store}/{CLAIM})"
            )
        if before:
            warnings.warn(
                f"another training, process {found.process} on {found.host}, has begun to save in {store}: it will be "
                "refused; give it a folder of its own",
                stacklevel=2,
            )
            refused = (*refused, found.training)[-_REMEMBERED:]
        found = own
    _CLAIMED.add((own.training, place))
    _write(store, replace(own, saves=found.saves + 1, refused=refused))


def _own() -> Claim:
    name = _NAMES.setdefault(os.getpid(), uuid.uuid4().hex)
    return Claim(name, socket.gethostname(), os.getpid())


def _read(store: Store) -> Claim | None:
    with suppress(OSError, ValueError, TypeError, KeyError, OverflowError):
        data = json.loads(store.read(CLAIM))
        refused = tuple(map(str, data["refused"]))
        return Claim(str(data["training"]), str(data["host"]), int(data["process"]), int(data["saves"]), refused)
    return None


def _write(store: Store, own: Claim) -> None:
    name = f"{CLAIM}-{own.training}" if store.renames else CLAIM
    with store.writing(name) as file:
        file.write(json.dumps(asdict(own)).encode())
    if store.renames:
        store.rename(name, CLAIM)
