"""The compiled calls of one parallel module: looked up by kind of call and guards, listed, and limited in number."""

from __future__ import annotations

import logging
import warnings
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from .call import Call
from .compiled import Guards
from .kind import CallKind, Difference, Leaf, differences
from .pipeline_call import PipelineCall

AnyCall = Call | PipelineCall
# Programs kept in addition to those that a plan was made for.
# Chosen: enough for sequence lengths padded to multiples, few enough to list; not measured.
KEPT = 64
# The number of programs for one changing input at which to warn.
# Chosen: more than a loop with evaluation and a last batch makes.
MANY = 8

_log = logging.getLogger("autopar.programs")


@dataclass(frozen=True)
class ProgramLine:
    """A description of one compiled program; ``str`` of it is one line.

    ``inputs``: type or value by name; ``mode``: ``training`` or ``evaluation``, and which outputs and gradients are
    used; ``planned``: whether the plan was made for it; ``reason``: how it differed from the most similar program when
    it was compiled, empty for the first; ``seconds``: the time to compile it; ``uses``: how often it has run.
    """

    inputs: Mapping[str, str]
    mode: str
    planned: bool
    reason: str
    seconds: float
    uses: int

    def __str__(self) -> str:
        inputs = ", ".join(f"{name} {text}" for name, text in self.inputs.items()) or "no inputs"
        origin = f"made in {self.seconds:.1f} s{', planned' if self.planned else ''}"
        because = f", because {self.reason}" if self.reason else ""
        return f"{self.mode} of {inputs}: used {self.uses}x, {origin}{because}"


@dataclass
class _Entry:
    call: AnyCall
    kind: CallKind
    leaves: Mapping[str, Leaf]
    guards: Guards | None
    planned: bool
    reason: str
    seconds: float
    uses: int = 0

    def line(self) -> ProgramLine:
        mode = "training" if self.kind.modes and self.kind.modes[0] else "evaluation"
        grad = "gradients" if self.kind.grad else "no gradients"
        inputs = {name: str(leaf) for name, leaf in self.leaves.items()}
        mode = f"{mode} ({grad}, {'loss only' if self.kind.outputs == 'loss' else 'all outputs'})"
        return ProgramLine(inputs, mode, self.planned, self.reason, self.seconds, self.uses)


class Programs:
    """Compiled calls of ``module``. Keeps those that a plan was made for, and of the others the ``kept`` used last.

    Ranks make the same calls in the same order, so that all of them find, compile and drop the same programs. Only the
    rank that ``speaks`` logs messages.
    """

    def __init__(self, module: nn.Module, *, speaks: bool = True, kept: int = KEPT) -> None:
        self._module, self.speaks, self._kept = module, speaks, kept
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._by_kind: dict[CallKind, list[int]] = {}
        self._made = 0
        self._changes: Counter[str] = Counter()

    def find(self, kind: CallKind) -> AnyCall | None:
        """The program for a call of this kind whose guards hold, or None; counts its use."""
        for index in self._by_kind.get(kind, ()):
            entry = self._entries[index]
            if entry.guards is None or entry.guards.changed(self._module) is None:
                entry.uses += 1
                self._entries.move_to_end(index)
                return entry.call
        return None

    def number(self, call: AnyCall) -> int:
        """The number of programs compiled before this one, which must be kept; the same on all ranks."""
        return next(index for index in reversed(self._entries) if self._entries[index].call is call)

    def why(self, kind: CallKind, leaves: Mapping[str, Leaf]) -> tuple[Difference, ...]:
        """How a call without a program differs from the most similar one, of equally similar ones the latest; empty for
        the first."""
        latest = [self._entries[index] for index in reversed(self._entries)]
        differences_of_each = [tuple(self._differences(entry, kind, leaves)) for entry in latest]
        return min(differences_of_each, key=len, default=())

    def _differences(self, entry: _Entry, kind: CallKind, leaves: Mapping[str, Leaf]) -> Iterator[Difference]:
        yield from differences(self._module, entry.kind, kind, entry.leaves, leaves)
        changed = None if entry.guards is None else entry.guards.changed(self._module)
        if changed is not None:
            yield Difference(changed, changed.split(" ")[0], value=True)

    def add(
        self,
        kind: CallKind,
        leaves: Mapping[str, Leaf],
        call: AnyCall,
        *,
        why: tuple[Difference, ...],
        guards: Guards | None,
        planned: bool,
        seconds: float,
    ) -> None:
        """Keeps ``call`` for calls of this ``kind``, and logs why it was compiled (:meth:`why`)."""
        reason = "; ".join(difference.text for difference in why)
        self._entries[self._made] = _Entry(call, kind, leaves, guards, planned, reason, seconds, uses=1)
        self._by_kind.setdefault(kind, []).append(self._made)
        self._made += 1
        self._drop()
        if self.speaks and why:
            self._tell(why, reason, seconds)

    def _drop(self) -> None:
        spare = [index for index, entry in self._entries.items() if not entry.planned]
        for index in spare[: max(0, len(spare) - self._kept)]:
            kind = self._entries.pop(index).kind
            self._by_kind[kind].remove(index)
            if not self._by_kind[kind]:
                del self._by_kind[kind]

    def _tell(self, why: tuple[Difference, ...], reason: str, seconds: float) -> None:
        """Logs a line for each program, at level warning the first time an input differs; warns if an input keeps
        changing."""
        inputs = [difference for difference in why if difference.subject is not None]
        fresh = any(self._changes[str(difference.subject)] == 0 for difference in inputs)
        level = logging.WARNING if fresh else logging.INFO
        _log.log(level, "made another program in %.1f s, because %s (model.programs() lists them)", seconds, reason)
        self._changes.update(str(difference.subject) for difference in inputs)
        often = [difference for difference in inputs if self._changes[str(difference.subject)] == MANY]
        for by_value in (False, True):
            if alike := [difference for difference in often if difference.value == by_value]:
                warnings.warn(_advice(alike, seconds), stacklevel=4)

    def listing(self) -> tuple[ProgramLine, ...]:
        """All programs, in the order in which they were compiled."""
        return tuple(self._entries[index].line() for index in sorted(self._entries))

    def calls(self) -> Iterator[tuple[CallKind, AnyCall]]:
        """All programs with their kinds, the most recently used first."""
        for index in reversed(self._entries):
            yield self._entries[index].kind, self._entries[index].call


def _advice(differences: Sequence[Difference], seconds: float) -> str:
    """What to do about inputs that all keep changing in value, or all in shape."""
    subjects, first = ", ".join(str(difference.subject) for difference in differences), differences[0]
    if first.value:
        advice = "if it changes all the time, make it a tensor, which is an input of one program for all values"
        if " when traced" in first.text:
            advice += ": a buffer (self.register_buffer) that the loop fills in place, or an input of forward"
    else:
        advice = (
            "pad it to one of a few shapes, so that calls share programs (Options(pad_to=64) does for token sequences)"
        )
    return (
        f"{MANY} programs were made because {subjects} changed ({first.text}, last); the last took {seconds:.1f} s to "
        f"make: {advice}"
    )
