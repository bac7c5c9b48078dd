"""Everything autopar raises on purpose derives from :class:`AutoparError`."""

from __future__ import annotations

from collections.abc import Callable


class AutoparError(Exception):
    """The base of every error that autopar raises on purpose."""


class GraphError(AutoparError):
    """A graph that is not well formed, or text that does not parse as a graph or program."""


class TraceError(AutoparError):
    """The model could not be captured as one graph; the message names module and source line."""


class FixedLengthError(TraceError):
    """A trace was to leave lengths of inputs open, but what the model runs depends on them."""


class InfeasibleError(AutoparError):
    """No plan satisfies the limits; the message names the smallest change that does. ``needed_bytes``: bytes per device
    that were found to be enough, if any were. ``explain`` makes the error that says what would fit, where this one does
    not: that takes a search, which an error that nobody sees need not wait for."""

    needed_bytes: int | None = None
    explain: Callable[[], InfeasibleError] | None = None

    def needing(self, count: int | None) -> InfeasibleError:
        """This error with :attr:`needed_bytes`."""
        self.needed_bytes = count
        return self

    def without_explanation(self) -> None:
        """Drops what only an error that is shown needs, :attr:`explain` and the traceback: both hold whole programs."""
        self.explain = self.__traceback__ = None

    @property
    def explained(self) -> InfeasibleError:
        """The error that says what would fit."""
        return self if self.explain is None else self.explain()


class PlanMismatchError(AutoparError):
    """A plan does not fit the model, mesh or batch it is applied to."""


class OptionsError(AutoparError):
    """An option, pin or mesh that cannot be honoured."""


class ArgumentError(OptionsError, TypeError):
    """A keyword argument that a function does not have; the message suggests a similar one."""


class InputMismatchError(AutoparError):
    """Ranks make different calls, or pass different values where all must pass the same; raised on every rank."""


class ScheduleError(AutoparError):
    """A pipeline schedule that is not well formed, or cannot run to its end; names rank and action."""


class ExecutionError(AutoparError):
    """An instruction of a program failed; the message names it, its module and its operands."""


class IndexRangeError(ExecutionError, IndexError):
    """A token id, label or other index outside of the dim it indexes; names module, value and range."""


class CheckpointError(AutoparError):
    """A checkpoint that cannot be written, is damaged, or does not fit; names the file or the parameter."""


class WorkerError(AutoparError):
    """A local process died or did not finish in time; carries that rank's traceback."""


class OperatorError(AutoparError):
    """An operation of the model that would compute something else on several devices; the message names it, where it
    is called, and what the author of the operation can do."""


class FaultError(AutoparError):
    """A rank ended, stopped, or does something else than those that wait for it; raised on every rank that still runs,
    with the same message, which names it."""


class ValueFaultError(AutoparError):
    """Replicas of a parameter differ, or a step computes NaN or infinities; names where. Raised on every rank."""
