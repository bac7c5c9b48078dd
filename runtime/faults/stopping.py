"""Leaving when the launcher or the host asks for it: save, then end, on all ranks at the same step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from autopar.errors import AutoparError


class Stop:
    """True once a rank was asked to stop and all ranks know it: the same value on every rank between two calls of the
    model, each of which brings it up to date. ``asked``: whether this rank was asked."""

    def __init__(self) -> None:
        self.asked = False
        self._agreed = False
        self._before: dict[signal.Signals, Any] = {}

    def __bool__(self) -> bool:
        return self._agreed

    def agree(self, asked: bool) -> None:
        """Takes what the ranks agreed on; once true, it stays so."""
        self._agreed = self._agreed or asked

    def listen(self, numbers: Sequence[signal.Signals]) -> None:
        """Takes the first of these signals that comes as the request to stop."""
        self._before = {number: signal.getsignal(number) for number in numbers}
        for number in numbers:
            signal.signal(number, self._ask)

    def restore(self) -> None:
        """Gives the signals their usual effects back."""
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _ask(self, _number: int, _frame: FrameType | None) -> None:
        self.asked = True
        self.restore()


# The open contexts of this process, innermost last.
_OPEN: list[Stop] = []


def innermost() -> Stop | None:
    """The innermost open context of :func:`stopping`, which calls of models bring up to date."""
    return _OPEN[-1] if _OPEN else None


@contextmanager
def stopping(*signals: signal.Signals) -> Iterator[Stop]:
    """Lets a training loop save and leave when it is asked to, by SIGTERM or the given ``signals``::

        with autopar.stopping() as stop:
            for batch in loader:
                model.step(**batch)
                optimizer.step()
                if stop:
                    save()
                    break

    ``stop`` is false, and true on every rank after the first call of a parallel model that began after a rank received
    a signal. The ranks tell each other in the exchange with which each call begins anyway; with
    ``Options(check_inputs="never")`` in one of a byte. Open it on every rank. A second signal has its usual effect. The
    launcher kills what has not ended after ``autopar run --grace`` seconds.

    Raises :class:`AutoparError` outside of the main thread, which alone receives signals.
    """
    if threading.current_thread() is not threading.main_thread():
        raise AutoparError("autopar.stopping() receives signals, which only the main thread can: open it there")
    stop = Stop()
    stop.listen(signals or (signal.SIGTERM,))
    _OPEN.append(stop)
    try:
        yield stop
    finally:
        _OPEN.remove(stop)
        stop.restore()
