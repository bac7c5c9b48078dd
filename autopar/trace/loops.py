"""Detects Python loops that a trace unrolls while the model is recorded, long before its graph is too long to plan.

A model that goes through a sequence step by step (recurrences, scans written out) runs the same few operations for
every step. Each is a node of the graph, and so are those of its backward. Steps share their choices, as equal layers do
(:mod:`autopar.passes.annotate.fold_loops`), but each is traced by itself.
"""

from __future__ import annotations

import linecache
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Hashable

from autopar.content.code_origin import is_model_code

# How often one line may run the same operation in one call of a module.
# Chosen: more than any model spells out, fewer than the steps of a usual sequence.
MOST = 256
# The line is not looked up for an operation that runs less often.
# Chosen: looking up a line costs more than counting.
FEW = 32


class LoopWatch:
    """Counts the operations in each call of a module, from one new module that it calls to the next, so that a loop
    over many layers does not count. Warns once for a model."""

    def __init__(self) -> None:
        self._seen: Counter[Hashable] = Counter()
        self._lines: Counter[tuple[Hashable, str, int]] = Counter()
        self._called: defaultdict[int, set[int]] = defaultdict(set)
        self._has_warned = False

    def count_module(self, call: int, module: int, name: str) -> None:
        """Counts that ``call``, of the module called ``name``, calls a module."""
        self._called[call].add(module)
        self.count(call, module, name)

    def count(self, call: int, event: Hashable, name: str) -> None:
        """Counts that ``call``, of the module called ``name``, runs an operation or a module."""
        if self._has_warned:
            return
        key = call, event, len(self._called[call])
        self._seen[key] += 1
        if self._seen[key] > FEW:
            line = _line()
            self._lines[key, *line] += 1
            if self._lines[key, *line] > MOST:
                self._has_warned = True
                _warn(name, *line)


def _line() -> tuple[str, int]:
    """The innermost line of the model's code that is running."""
    frame = sys._getframe(3)
    while frame.f_back is not None and not is_model_code(frame.f_code.co_filename, frame.f_code.co_name):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def _warn(name: str, file: str, line: int) -> None:
    code = linecache.getline(file, line).strip()
    warnings.warn_explicit(
        f"{name} runs {file}:{line} more than {MOST} times in one call\n    {code}\n"
        "A Python loop, perhaps over the steps of a sequence, becomes as many operations of the graph, which take "
        "minutes to trace. Compute all steps at once (cumsum, cumprod, scans of chunks), make the "
        "loop one operation (torch.library.custom_op), or plan with a shorter sequence.",
        UserWarning,
        file,
        line,
    )
