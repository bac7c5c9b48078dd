"""Finds checkpoints in a folder by reading manifests: a folder is a checkpoint if its manifest is valid, whatever its
name."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from autopar.errors import CheckpointError

from .manifest import MANIFEST, Manifest, read_manifest
from .stores import Store

# What the names of folders that are being written begin with. They are hidden, so that nothing takes them for results.
WRITING = ".writing-"


@dataclass(frozen=True)
class Found:
    """A checkpoint: its folder and its manifest."""

    store: Store
    name: str
    manifest: Manifest

    @property
    def order(self) -> tuple[int, int]:
        """By which the newest is found."""
        return self.manifest.number, self.manifest.step


def checkpoints(store: Store) -> list[Found]:
    """The complete checkpoints in ``store``, oldest first. Warns of folders whose manifest is damaged."""
    found = []
    for name in store.names():
        try:
            text = store.inside(name).read(MANIFEST)
        except OSError:  # No folder, or one that was not completed.
            continue
        try:
            found.append(Found(store.inside(name), name, read_manifest(text)))
        except CheckpointError as error:
            if not name.startswith(WRITING):  # The manifest itself was being written.
                warnings.warn(f"{store}/{name} is left out: {MANIFEST}: {error}", stacklevel=2)
    return sorted(found, key=lambda checkpoint: checkpoint.order)


def find(store: Store) -> Found:
    """The checkpoint ``store`` itself, or the newest one in it. Raises :class:`CheckpointError` if there is none."""
    try:
        text = store.read(MANIFEST)
    except OSError:
        complete = checkpoints(store)
        if complete:
            return complete[-1]
        begun = [name for name in store.names() if name.startswith((WRITING, "step-"))]
        detail = f": {', '.join(begun[:4])} {'was' if len(begun) == 1 else 'were'} not completed" if begun else ""
        raise CheckpointError(f"there is no complete checkpoint in {store}{detail}") from None
    try:
        return Found(store, "", read_manifest(text))
    except CheckpointError as error:
        raise CheckpointError(f"{store}/{MANIFEST}: {error}") from error
