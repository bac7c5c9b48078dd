"""Suggests an argument for a keyword argument that a function does not have."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from difflib import get_close_matches
from functools import wraps
from typing import ParamSpec, TypeVar

from .errors import ArgumentError

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C")
_BATCH = ("batch", "example_inputs")
# Other names of an argument -> its names here; the first that the function has is suggested.
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
    **dict.fromkeys(("pp", "pipeline_stages", "num_stages", "pipeline_parallel"), ("stages", "pipeline")),
    "pipeline": ("stages",),
    "stages": ("pipeline",),
    **dict.fromkeys(("tp", "tensor_parallel", "model_parallel"), ("tensor",)),
    **dict.fromkeys(("dp", "data_parallel"), ("data",)),
    **dict.fromkeys(("cp", "context_parallel"), ("context",)),
    **dict.fromkeys(("ep", "expert_parallel"), ("expert",)),
    **dict.fromkeys(("micro_batch", "micro_batch_size", "microbatch_size"), ("microbatch",)),
    **dict.fromkeys(("batchsize", "per_device_batch_size", "bs"), ("batch_size",)),
    **dict.fromkeys(("collate", "collator", "data_collator"), ("collate_fn",)),
    **dict.fromkeys(("workers",), ("num_workers",)),
    **dict.fromkeys(("num_microbatches", "accumulation_steps", "chunks"), ("microbatches",)),
    **dict.fromkeys(("checkpointing", "activation_checkpointing", "gradient_checkpointing"), ("recompute",)),
    **dict.fromkeys(("time",), ("time_limit", "timeout")),
    **dict.fromkeys(("drop_last",), ("last_batch",)),
    **dict.fromkeys(("rtol", "atol", "tol"), ("tolerance",)),
}


# From so similar names on, a slip of the keys is as likely as another word.
_ALMOST = 0.9


def suggests(function: Callable[P, R]) -> Callable[P, R]:
    """Makes ``function`` raise :class:`ArgumentError` for a keyword argument that it does not have, and for one that it
    lacks."""
    signature = inspect.signature(function)
    parameters = tuple(name for name in signature.parameters if name != "self")

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        check_keywords(function.__name__, kwargs, parameters)
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise ArgumentError(f"{function.__name__}: {error}; its arguments are {', '.join(parameters)}") from None
        return function(*args, **kwargs)

    return checked


def suggests_fields(cls: type[C]) -> type[C]:
    """Makes the constructor of a dataclass raise :class:`ArgumentError` for a keyword argument that it does not have.
    Fields that are left out of comparisons are not the user's, and not suggested."""
    initialise = cls.__init__
    parameters = tuple(inspect.signature(initialise).parameters)[1:]
    internal = {field.name for field in fields(cls) if not field.compare}  # type: ignore[arg-type]
    offered = tuple(name for name in parameters if name not in internal)

    @wraps(initialise)
    def checked(self: C, *args: object, **kwargs: object) -> None:
        check_keywords(cls.__name__, [name for name in kwargs if name not in internal], offered)
        initialise(self, *args, **kwargs)

    cls.__init__ = checked  # type: ignore[assignment]
    return cls


def check_keywords(function: str, keywords: Collection[str], parameters: tuple[str, ...]) -> None:
    """Raises :class:`ArgumentError` for the first of ``keywords`` that is none of ``parameters``."""
    for name in keywords:
        if name not in parameters:
            suggestion = _did_you_mean(name, parameters)
            raise ArgumentError(
                f"{function} has no argument {name!r}{suggestion}; its arguments are {', '.join(parameters)}"
            )


def _did_you_mean(name: str, parameters: tuple[str, ...]) -> str:
    same = [other for other in SYNONYMS.get(name, ()) if other in parameters]
    near = dict.fromkeys((*same[:1], *get_close_matches(name, parameters, 1, 0.6 if not same else _ALMOST)))
    return f": did you mean {' or '.join(f'{other}=' for other in near)}?" if near else ""
