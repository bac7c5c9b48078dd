"""Checkpoints of a training loop: resumes, saves every so many steps beside training, and keeps the newest few."""

from __future__ import annotations

import warnings
from types import TracebackType
from typing import Any, Self

from torch import nn

from autopar.errors import OptionsError

from .background import Background, Buffers, copied
from .find import checkpoints
from .load import Checkpoint, load
from .manifest import MANIFEST
from .ranks import LostReplicaError, Ranks, anywhere, ranks_of
from .save import write_snapshot
from .snapshot import Training, take_snapshot
from .stores import Folder, Store, store_of


class Checkpointer:
    """The checkpoints of a training, in ``folder``.

    Args:
        folder: a local folder that all ranks share, or a URL of fsspec.
        model, optimizer, scheduler, dataloader: as :func:`autopar.checkpoint.save` takes them.
        every: steps between two checkpoints.
        keep: how many checkpoints to keep, the newest; None keeps all.
        asynchronous: whether files are written in a thread beside training. A save then takes as long as copying this
            rank's share of the state to host memory, for which there has to be room.

    Every rank makes one and calls its methods alike. An error of writing is raised on every rank by the next call that
    saves, or by :meth:`finish`, which leaving the context calls.
    """

    def __init__(
        self,
        folder: Folder,
        model: nn.Module,
        optimizer: Any = None,
        *,
        scheduler: Any = None,
        dataloader: Any = None,
        every: int,
        keep: int | None = 3,
        asynchronous: bool = True,
    ) -> None:
        if type(every) is not int or every < 1:
            raise OptionsError(f"every={every!r} is not a number of steps: give an int from 1 on")
        if keep is not None and (type(keep) is not int or keep < 1):
            raise OptionsError(f"keep={keep!r} is not a number of checkpoints: give an int from 1 on, or None for all")
        self.folder, self.every, self.keep, self.asynchronous = folder, every, keep, asynchronous
        self._training = Training(model, optimizer, scheduler, dataloader)
        self._background, self._buffers, self._saved = Background(), Buffers(), -1

    def resume(self, *, verify: bool = True) -> Checkpoint:
        """Loads the newest checkpoint, and returns it; without one, returns step 0 and changes nothing. Collective.
        Raises :class:`CheckpointError` as :func:`autopar.checkpoint.load` does."""
        self.finish()
        ranks, store = ranks_of(self._training.model), store_of(self.folder)
        if not ranks.from_first(lambda: bool(checkpoints(store))):
            return Checkpoint(str(store), 0, None, None)
        training = self._training
        found = load(
            self.folder,
            training.model,
            training.optimizer,
            scheduler=training.scheduler,
            dataloader=training.dataloader,
            verify=verify,
        )
        self._saved = found.step
        return found

    def step(self, step: int, *, extra: Any = None) -> bool:
        """Called after each step; ``step``: how many were done. Saves if it is a multiple of ``every``, and returns
        whether it does."""
        if step % self.every:
            return False
        self.save(step, extra=extra)
        return True

    def save(self, step: int, *, extra: Any = None) -> None:
        """Saves now, unless this step was saved already. Collective; waits for the save before to be written. Raises
        :class:`CheckpointError` if that failed; warns if it did since a replica left, without which the others go
        on."""
        try:
            self.finish()
        except LostReplicaError as error:  # Others may not have noticed, and go on to save.
            warnings.warn(f"autopar: {error}", stacklevel=2)
        try:
            if anywhere(self._training.model, step != self._saved):
                self._save(step, extra)
        except LostReplicaError as error:
            self._saved = -1
            warnings.warn(f"autopar: {error}", stacklevel=2)

    def _save(self, step: int, extra: Any) -> None:
        ranks, store = ranks_of(self._training.model), store_of(self.folder)
        snapshot = take_snapshot(self._training, ranks, step, extra)
        self._saved = step
        if not self.asynchronous:
            write_snapshot(snapshot, store, ranks)
            self._delete_old(store, ranks)
            return
        beside = ranks_of(self._training.model, "writing beside training", again=True)
        copy = copied(snapshot, self._buffers)

        def write() -> None:
            write_snapshot(copy, store, beside)
            self._delete_old(store, beside)

        self._background.start(write)

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written beside training."""
        return self._background.busy

    def finish(self) -> None:
        """Waits until all is written. Raises :class:`CheckpointError` if something was not."""
        try:
            self._background.wait()
        except Exception:
            self._saved = -1
            raise

    def _delete_old(self, store: Store, ranks: Ranks) -> None:
        keep = self.keep
        if keep is not None:
            ranks.from_first(lambda: delete_old(store, keep))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            self.finish()
        except Exception as failure:
            if error is None:  # The error is the cause, and not that others have left.
                raise
            warnings.warn(f"the last checkpoint was not written: {failure}", stacklevel=2)


def delete_old(store: Store, keep: int) -> None:
    """Deletes all complete checkpoints in ``store`` but the newest ``keep``. The manifest goes first, so that none is
    found half."""
    for found in checkpoints(store)[:-keep]:
        try:
            store.remove(found.name, MANIFEST)
        except OSError as error:
            warnings.warn(f"{found.store} is to be deleted, and cannot be: {error}", stacklevel=2)
