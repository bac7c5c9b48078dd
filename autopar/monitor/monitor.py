"""Watches a training loop."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from rich.console import Console
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError, OptionsError
from autopar.plans.plan import Plan
from autopar.runtime.comm.exchange import Exchange
from autopar.runtime.comm.waiting import WAITING
from autopar.runtime.module.parallel_module import ParallelModule

from .measure import Measured, peak_memory, step_seconds, straggler, waiting_seconds
from .outputs import JsonLines, Output, ProgressBar, TensorBoard, has_tensorboard
from .record import StepRecord


class Monitor:
    """Writes the figures of each step of ``model``'s training (:class:`StepRecord`)::

        with Monitor(model, folder="runs/first", tokens=BATCH * SEQUENCE, total=STEPS) as monitor:
            for batch in loader:
                optimizer.zero_grad()
                loss = model.step(**batch)
                optimizer.step()
                monitor.step(loss)

    Args:
        folder: where the first rank writes ``steps.jsonl`` (appended to, one line a step), and events for TensorBoard;
            None: no files.
        tensorboard: whether to write events; None: if the package is installed (extra ``autopar[tensorboard]``).
        progress: whether the first rank shows a progress bar; None: if standard error is a terminal.
        total: how many steps there will be, for the progress bar.
        tokens: tokens of the global batch, unless :meth:`step` says it.
        every: write every so many steps, figures being those of the latest, times the mean since the last one written.
        first: the number of the first step, after a restart.

    Raises :class:`OptionsError` for a model that is not parallel, an ``every`` below 1, and for ``tensorboard=True``
    without the package or without a folder.
    """

    def __init__(
        self,
        model: ParallelModule,
        *,
        folder: str | Path | None = None,
        tensorboard: bool | None = None,
        progress: bool | None = None,
        total: int | None = None,
        tokens: float | None = None,
        every: int = 1,
        first: int = 0,
    ) -> None:
        if not isinstance(model, ParallelModule):
            raise OptionsError(f"a Monitor takes what autopar.parallelize returned, not a {type(model).__name__}")
        if type(every) is not int or every < 1:
            raise OptionsError(f"every={every!r} is not a number of steps: give an int from 1 on")
        if tensorboard and folder is None:
            raise OptionsError("tensorboard=True needs folder=..., where its events go")
        self.model, self.every, self.tokens = model, every, tokens
        parts = model.autopar_parts
        self._groups, self._call = parts.weights.groups, parts.call
        with self._call("Monitor()"):
            self._exchange = Exchange(self._groups, apart=True)
        self._step, self._since, self._is_first = first, 0, True
        self._outputs = self._open(folder, tensorboard, progress, total) if self._exchange.index == 0 else []
        self._mark()

    def _open(
        self, folder: str | Path | None, tensorboard: bool | None, progress: bool | None, total: int | None
    ) -> list[Output]:
        outputs: list[Output] = []
        if folder is not None:
            outputs.append(JsonLines(Path(folder) / "steps.jsonl"))
            if tensorboard or (tensorboard is None and has_tensorboard()):
                outputs.append(TensorBoard(Path(folder)))
        if progress or (progress is None and Console(stderr=True).is_terminal):
            outputs.append(ProgressBar(total))
        return outputs

    def _mark(self) -> None:
        self._began, self._waited = time.perf_counter(), WAITING.seconds

    def step(self, loss: Any = None, *, tokens: float | None = None, gradient_norm: Any = None) -> StepRecord | None:
        """Called once after each step, on every rank; collective where it writes. Returns the record of a step that is
        written, on every rank. Reading ``loss`` and ``gradient_norm`` (numbers or tensors) waits for a GPU: with
        ``every`` above 1 only where it writes."""
        step, self._step, self._since = self._step, self._step + 1, self._since + 1
        if (step + 1) % self.every:
            return None
        value, norm = _number(loss), _number(gradient_norm)
        seconds = (time.perf_counter() - self._began) / self._since
        waits = (WAITING.seconds - self._waited) / self._since if self._groups.device.type == "cpu" else None
        own = Measured(seconds, peak_memory(self._groups.device), waits)
        with self._call("monitor.step()"):
            everyone = [Measured.from_bytes(data) for data in self._exchange.all_bytes(own.to_bytes())]
        record = self._record(step, value, norm, tokens or self.tokens, everyone)
        for output in self._outputs:
            output.write(record)
        self._since, self._is_first = 0, False
        self._mark()
        return record

    def _record(
        self, step: int, loss: float | None, norm: float | None, tokens: float | None, everyone: list[Measured]
    ) -> StepRecord:
        seconds, waiting, plan = step_seconds(everyone), waiting_seconds(everyone), _plan_of(self.model)
        predicted = None if plan is None else plan.predicted
        return StepRecord(
            step=step,
            loss=loss,
            seconds=seconds,
            predicted_seconds=None if predicted is None else predicted.step_seconds,
            tokens_per_second=None if tokens is None else tokens / seconds,
            mfu=None if predicted is None else predicted.mfu * predicted.step_seconds / seconds,
            memory_bytes=int(max(one.peak for one in everyone)),
            predicted_bytes=None if predicted is None else predicted.peak_bytes,
            gradient_norm=norm,
            loss_scale=self.model.loss_scale_state().get("scale"),
            waiting_seconds=waiting,
            straggler=straggler(self._exchange.ranks, waiting, seconds),
            first_of_run=self._is_first or None,
        )

    def close(self) -> None:
        """Closes files and the progress bar."""
        for output in self._outputs:
            output.close()
        self._outputs = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()


def _number(value: Any) -> float | None:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return None if value is None else float(value.detach() if isinstance(value, torch.Tensor) else value)


def _plan_of(model: ParallelModule) -> Plan | None:
    """The plan of a training call; None before there is one."""
    try:
        plan = model.plan
    except AutoparError:
        return None
    return plan if isinstance(plan, Plan) else None
