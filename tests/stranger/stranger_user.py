"""A user with a fresh environment, who runs programs in it."""

from __future__ import annotations

import itertools
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.stranger.fresh_environment import FreshEnvironment
from tests.stranger.user_run import run_as_user

HERE = Path(__file__).resolve().parent
# Signs of a failure that some launcher or thread kept from the exit status.
_BAD = re.compile(r"Traceback|terminate called|Fatal Python error|Segmentation fault|\bAborted\b|std::")


@dataclass
class Stranger:
    """Runs programs as a user would: from a folder outside the checkout, with autopar from its wheel, unseeded, and
    with every warning in the output."""

    environment: FreshEnvironment
    folder: Path
    _counter: itertools.count[int] = field(default_factory=itertools.count)

    def run(
        self,
        program: str | Path,
        ranks: int | None = None,
        *,
        timeout: float = 240,
        arguments: Sequence[str] = (),
        says: str = "fine",
        error: str | None = None,
        extra: Mapping[str, str] | None = None,
    ) -> str:
        """Runs a ``program`` (a path below tests/stranger) on ``ranks`` processes under torchrun, or, without
        ``ranks``, by plain Python; the output of all.

        It must end within ``timeout`` seconds with status 0, show no traceback, leave no process, and print ``says``.
        With ``error``, it must end with another status after printing a traceback that contains this text. ``extra``
        are environment variables.
        """
        folder = self.folder / f"{next(self._counter)}"
        folder.mkdir()
        source = HERE / program
        shutil.copy(source, folder / source.name)
        launch = ["torchrun", "--standalone", "--nproc-per-node", str(ranks)] if ranks else ["python"]
        command = [*launch, source.name, *arguments]
        return self.command(command, folder, timeout=timeout, says=says, error=error, extra=extra)

    def command(
        self,
        command: Sequence[str | Path],
        folder: Path | None = None,
        *,
        timeout: float = 240,
        says: str = "",
        error: str | None = None,
        extra: Mapping[str, str] | None = None,
    ) -> str:
        """Runs ``command`` in ``folder`` (by default a new one), with the environment's commands on the path; else like
        :meth:`run`."""
        if folder is None:
            folder = self.folder / f"{next(self._counter)}"
            folder.mkdir()
        path = f"{self.environment.folder / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
        added = {"PATH": path, "AUTOPAR_CACHE": str(self.environment.cache), **(extra or {})}
        ended = run_as_user(command, folder, added, timeout)
        shown = f"{' '.join(map(str, command))}\nstatus {ended.status}\n{ended.output}"
        assert ended.status is not None, f"no end after {timeout:g} s: {shown}"
        assert not ended.left, f"processes {ended.left} were left running by {shown}"
        if error is None:
            assert ended.status == 0, shown
            assert not _BAD.search(ended.output), shown
        else:
            assert ended.status != 0, shown
            assert error in ended.output, f"expected {error!r} from {shown}"
        assert error is not None or says in ended.output, f"expected {says!r} from {shown}"
        return ended.output
