"""Numbers that a model draws from Python's or numpy's generators when it is called.

Eager execution draws new numbers at each call; a graph contains those drawn while it was traced. (Torch's own draws are
operations of the graph.)
"""

from __future__ import annotations

import linecache
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np

from autopar.content.code_origin import is_model_code
from autopar.errors import TraceError

Generator = random.Random | np.random.Generator | np.random.RandomState
GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
# The least and the largest number of random.random(), which has 53 bits.
_LEAST, _MOST = 0.0, 1.0 - 2.0**-53
# Chosen: a coin that always shows the same side in eight throws is one in 256.
_SEEDS = range(8)


class DrawError(TraceError):
    """A graph of the model would contain the numbers that it drew as constants."""


@dataclass(frozen=True)
class Place:
    """A line of the user's code, and the path of the module that ran it."""

    module: str
    file: str
    line: int

    def __str__(self) -> str:
        where = f"module {self.module!r}" if self.module else "the model"
        return f"{where} at {self.file}:{self.line}\n    {linecache.getline(self.file, self.line).strip()}"


def _state(generator: Generator) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    return pickle.dumps(
        generator.get_state() if isinstance(generator, np.random.RandomState) else generator.bit_generator.state
    )


def _set_state(generator: Generator, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(pickle.loads(state))
    else:
        generator.bit_generator.state = pickle.loads(state)


def _reseed(generator: Generator, seed: int) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    else:
        generator.seed(seed)


class WatchedGenerators:
    """The generators that a model may draw from, with their names and the states that they had."""

    def __init__(self) -> None:
        self._generators: dict[int, tuple[Generator, str]] = {}
        self._states: dict[int, Any] = {}
        self.drawn: tuple[str, ...] = ()
        self.watch(random._inst, "Python's random")
        self.watch(np.random.mtrand._rand, "numpy.random")

    def watch(self, generator: Generator, name: str) -> None:
        """Watches ``generator`` too."""
        if not isinstance(generator, random.SystemRandom) and id(generator) not in self._generators:
            self._generators[id(generator)] = generator, name
            self._states[id(generator)] = _state(generator)

    def _advanced(self) -> tuple[str, ...]:
        return tuple(
            name for key, (generator, name) in self._generators.items() if _state(generator) != self._states[key]
        )

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Adds the generators that are drawn from inside the ``with`` block to ``drawn``, and restores their states."""
        try:
            yield
        finally:
            self.drawn = (*self.drawn, *(name for name in self._advanced() if name not in self.drawn))
            for key, (generator, _) in self._generators.items():
                _set_state(generator, self._states[key])

    def affect(self, run: Callable[[], object]) -> bool:
        """Whether ``run``, which returns what it computes, returns something else when other numbers are drawn: with
        other seeds, and with the least and the largest uniform number, which decide probabilities."""
        with self.watching():
            usual = run()
        return any(self._outcome(run, seed) != usual for seed in _SEEDS) or any(
            self._outcome(run, None, value) != usual for value in (_LEAST, _MOST)
        )

    def _outcome(self, run: Callable[[], object], seed: int | None, value: float | None = None) -> object:
        with self.watching(), _drawing(value):
            for generator, _ in self._generators.values():
                if seed is not None:
                    _reseed(generator, seed)
            return run()

    def place(self, run: Callable[[], object], path: Callable[[], str]) -> Place | None:
        """The line that draws first; ``path`` returns the path of the running module."""
        first_draw: list[Place] = []
        running: list[Place] = []  # The lines of the functions that run, outermost first.

        def line(frame: Any, event: str, _argument: Any) -> Any:
            if not first_draw and running and self._advanced():
                first_draw.append(running[-1])
            if event == "return":
                running.pop()
            else:
                running[-1 if event == "line" else len(running) :] = [
                    Place(path(), frame.f_code.co_filename, frame.f_lineno)
                ]
            return line

        def call(frame: Any, event: str, argument: Any) -> Any:
            return (
                line(frame, event, argument) if is_model_code(frame.f_code.co_filename, frame.f_code.co_name) else None
            )

        before = sys.gettrace()
        with self.watching():
            sys.settrace(call)
            try:
                run()
            finally:
                sys.settrace(before)
        return first_draw[0] if first_draw else None


@contextmanager
def _drawing(value: float | None) -> Iterator[None]:
    """Makes every uniform number lie at the fraction ``value`` between its bounds, unless ``value`` is None."""
    if value is None:
        yield
        return

    def between(low: Any = 0.0, high: Any = 1.0, size: Any = None) -> Any:
        number = low + (high - low) * value
        return number if size is None else np.broadcast_to(number, size).copy()

    drawers: Mapping[str, Callable[..., Any]] = {
        "rand": lambda *shape: between(size=shape or None),
        "random": lambda size=None: between(size=size),
        "random_sample": lambda size=None: between(size=size),
        "uniform": between,
    }
    with ExitStack() as stack:
        stack.enter_context(patch.object(random, "random", between))
        stack.enter_context(patch.object(random, "uniform", between))
        for name, drawer in drawers.items():
            stack.enter_context(patch.object(np.random, name, drawer))
        yield


def notes_on_draws(
    generators: WatchedGenerators, run: Callable[[], object], path: Callable[[], str], model: str
) -> tuple[str, ...]:
    """Notes for people about the numbers that a model drew. ``run`` runs the model and returns what it computes;
    ``path`` returns the path of the running module.

    Raises:
        DrawError: other numbers make a difference, or may.
    """
    drawn, place = generators.drawn, None
    try:
        matters = generators.affect(run)
    except Exception:  # The model runs only with the numbers drawn at first.
        matters = True
    with suppress(Exception):
        place = generators.place(run, path)
    if matters:
        raise DrawError(_error(model, drawn, place))
    return (_note(drawn, place),)


def _error(model: str, drawn: tuple[str, ...], place: Place | None) -> str:
    return (
        f"{model} could not be captured as one graph: {place or 'it'}\n"
        f"draws from {' and '.join(drawn)}, anew at each call, but a graph keeps what was drawn while it was traced; "
        "draw with torch, which draws anew at each step: torch.where(torch.rand(()) < p, x, x + self.block(x)) skips a "
        "block, torch.rand_like(x) is noise; or draw outside of the model and pass the tensor as an input"
    )


def _note(drawn: tuple[str, ...], place: Place | None) -> str:
    where = " ".join(str(place or "the model").split())
    return (
        f"{where} draws from {' and '.join(drawn)}; whatever was drawn while tracing, the model did the same, so these "
        "draws are left out"
    )
