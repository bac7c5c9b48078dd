"""Where figures go: a file of JSON lines, TensorBoard, a progress bar."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from autopar.errors import OptionsError

from .record import StepRecord


class Output(Protocol):
    """Takes each record of the first rank."""

    def write(self, record: StepRecord) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """One JSON object a line, appended to ``path`` and flushed, so that a run that dies has written all its steps. Half
    a line that it may have left stays a line of its own."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        torn = path.is_file() and path.stat().st_size > 0 and _last_byte(path) != b"\n"
        self._file: TextIO = path.open("a", encoding="utf-8")
        if torn:
            self._file.write("\n")

    def write(self, record: StepRecord) -> None:
        # NaN and infinities are no JSON.
        figures = {k: str(v) if isinstance(v, float) and v - v != 0 else v for k, v in record.to_dict().items()}
        self._file.write(json.dumps(figures) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read()


def has_tensorboard() -> bool:
    """Whether the package is installed."""
    return importlib.util.find_spec("tensorboard") is not None


class TensorBoard:
    """Scalars for TensorBoard, in ``folder``. Raises :class:`OptionsError` if it is not installed."""

    def __init__(self, folder: Path) -> None:
        if not has_tensorboard():
            raise OptionsError(
                'tensorboard=True needs the package: pip install "autopar[tensorboard]", or leave it out; '
                "figures are in steps.jsonl too"
            )
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder))

    def write(self, record: StepRecord) -> None:
        for name, value in record.scalars():
            self._writer.add_scalar(name, value, record.step)
        for index, seconds in enumerate(record.waiting_seconds or ()):
            self._writer.add_scalar(f"waiting_seconds/{index}", seconds, record.step)

    def close(self) -> None:
        self._writer.close()


class ProgressBar:
    """A bar on the terminal, of ``total`` steps if that is known."""

    def __init__(self, total: int | None, console: Console | None = None) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=console or Console(stderr=True))
        self._task = self._progress.add_task("training", total=total, figures="")
        self._progress.start()

    def write(self, record: StepRecord) -> None:
        self._progress.update(self._task, completed=record.step + 1, figures=in_short(record))

    def close(self) -> None:
        self._progress.stop()


def in_short(record: StepRecord) -> str:
    """The figures that fit into a line."""
    words = [] if record.loss is None else [f"loss {record.loss:.4g}"]
    words.append(f"{record.seconds * 1e3:.0f} ms a step")
    if record.predicted_seconds:
        words[-1] += f" (predicted {record.predicted_seconds * 1e3:.0f})"
    if record.tokens_per_second is not None:
        words.append(f"{record.tokens_per_second:,.0f} tokens/s")
    if record.mfu is not None:
        words.append(f"MFU {record.mfu:.0%}")
    if record.straggler is not None:
        words.append(f"waiting for rank {record.straggler}")
    return "   ".join(words)
