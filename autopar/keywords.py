"""Keyword arguments that a function does not have: which one was meant."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from functools import wraps
from typing import ParamSpec, TypeVar

from .errors import ArgumentError

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C")
_BATCH = ("batch", "example_inputs")
# What others call an argument -> what it is called here, the first that the function has.
SYNONYMS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("criterion", "loss", "loss_function", "loss_func"), ("loss_fn",)),
    **dict.fromkeys(
        ("batch", "inputs", "input", "args", "example_batch", "example_input", "example_args", "example_inputs", "x"),
        _BATCH,
    ),
    **dict.fromkeys(("config", "settings", "opts", "option"), ("options",)),
    **dict.fromkeys(("device_mesh", "mesh_shape", "devices", "world_size"), ("mesh",)),
    **dict.fromkeys(("labels", "target", "label", "y"), ("targets",)),
    **dict.fromkeys(("module", "net", "network"), ("model",)),
    **dict.fromkeys(("hardware", "machine"), ("cluster",)),
    **dict.fromkeys(("memory", "max_memory", "memory_budget", "budget"), ("memory_limit",)),
    **dict.fromkeys(("zero_stage", "stage"), ("zero",)),
    **dict.fromkeys(("dtype", "mixed_precision", "amp"), ("precision",)),
    **dict.fromkeys(("pp", "pipeline", "pipeline_stages", "num_stages"), ("stages",)),
    **dict.fromkeys(("num_microbatches", "accumulation_steps", "chunks"), ("microbatches",)),
    **dict.fromkeys(("checkpointing", "activation_checkpointing", "gradient_checkpointing"), ("recompute",)),
    **dict.fromkeys(("timeout", "time"), ("time_limit",)),
    **dict.fromkeys(("drop_last",), ("last_batch",)),
    **dict.fromkeys(("rtol", "atol", "tol"), ("tolerance",)),
}


def suggests(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, which raises :class:`ArgumentError` for a keyword argument that it does not have."""
    known = tuple(inspect.signature(function).parameters)

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        _check(function.__name__, kwargs, known)
        return function(*args, **kwargs)

    return checked


def suggests_fields(cls: type[C]) -> type[C]:
    """The class, whose making raises :class:`ArgumentError` for a keyword argument that it does not have."""
    made = cls.__init__
    known = tuple(inspect.signature(made).parameters)[1:]

    @wraps(made)
    def checked(self: C, *args: object, **kwargs: object) -> None:
        _check(cls.__name__, kwargs, known)
        made(self, *args, **kwargs)

    cls.__init__ = checked  # type: ignore[assignment]
    return cls


def _check(function: str, given: Collection[str], known: tuple[str, ...]) -> None:
    for name in given:
        if name not in known:
            raise ArgumentError(
                f"{function} has no argument {name!r}{_did_you_mean(name, known)}; its arguments are {', '.join(known)}"
            )


def _did_you_mean(name: str, known: tuple[str, ...]) -> str:
    same = [other for other in SYNONYMS.get(name, ()) if other in known]
    near = same[:1] or get_close_matches(name, known, 1, 0.6)
    return f": did you mean {near[0]}=?" if near else ""
