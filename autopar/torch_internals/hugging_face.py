"""Private and undocumented parts of transformers; numbers in brackets are its versions."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn

IGNORED_MEMBERS = frozenset(("_original_object_hash",))
"""Attributes of configurations that differ between processes and do not affect any computation."""

CACHE_NAMES = ("cache", "past_key_values")
"""What models call their key-value cache, as an argument and as an output: since 5.24, where the other name is
deprecated, and before."""


def cache_name(model: nn.Module) -> str:
    """What ``model`` calls its cache. Relies on the name of an argument of its forward (5.24)."""
    return _cache_name(type(model).forward)


@lru_cache(maxsize=256)
def _cache_name(forward: Callable[..., Any]) -> str:
    accepted = inspect.signature(forward).parameters
    return next((name for name in CACHE_NAMES if name in accepted), CACHE_NAMES[-1])


def cache_among(arguments: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The cache among the keyword arguments of a call, under either name, and the other arguments. None if there is no
    cache of transformers. Relies on the home of its class ``Cache`` (5.24)."""
    found = next((arguments[name] for name in CACHE_NAMES if _is_cache(arguments.get(name))), None)
    return found, {name: value for name, value in arguments.items() if found is None or name not in CACHE_NAMES}


def _is_cache(value: object) -> bool:
    return any(
        (kind.__module__, kind.__name__) == ("transformers.cache_utils", "Cache") for kind in type(value).__mro__
    )


@contextmanager
def masks_as_in_eager() -> Iterator[None]:
    """Leaves causal masks to the kernel although torch says that it exports. Relies on ``is_torchdynamo_exporting``,
    which ``transformers.masking_utils`` calls; some versions lack it (5.0)."""
    masking = sys.modules.get("transformers.masking_utils")
    if not hasattr(masking, "is_torchdynamo_exporting"):
        yield
        return
    with patch.object(masking, "is_torchdynamo_exporting", lambda: False):
        yield


def records_outputs(model: nn.Module) -> None:
    """Lets a model that was unpickled record outputs inside of its layers (router logits, hidden states), as the one
    that was pickled does. Relies on ``_CAN_RECORD_REGISTRY``, by class, which constructors fill (5.23; by name)."""
    registry: Any = getattr(sys.modules.get("transformers.modeling_utils"), "_CAN_RECORD_REGISTRY", None)
    for module in () if registry is None else model.modules():
        recorded = getattr(module, "_can_record_outputs", None)
        if recorded:
            dict.__setitem__(registry, str(type(module)), recorded)


def is_expert_parallel(experts: nn.Module) -> bool:
    """Whether transformers itself has sharded the block. Relies on ``_is_expert_parallel``, which
    some versions lack (5.0)."""
    return bool(getattr(experts, "_is_expert_parallel", False))


def gate_of(experts: Any) -> Callable[[Tensor], Tensor]:
    """The function that a block applies to the product of its gated matrices. Relies on ``_apply_gate`` (5.0)."""
    function: Callable[[Tensor], Tensor] = experts._apply_gate
    return function


def initialises_all_inside(module: nn.Module) -> bool:
    """Whether ``module.initialize_weights()`` initialises every module inside. Relies on that name and on
    ``_init_weights``, which it calls (5.0)."""
    return callable(getattr(module, "initialize_weights", None)) and hasattr(module, "_init_weights")


def names_not_saved(model: nn.Module) -> tuple[frozenset[str], frozenset[str]]:
    """The names that the class says are tied to others, and those that ``save_pretrained`` leaves out. Relies on
    ``_tied_weights_keys`` and ``_keys_to_ignore_on_save``, which modules of others lack (5.0)."""
    names = ("_tied_weights_keys", "_keys_to_ignore_on_save")
    tied, ignored = (frozenset(getattr(model, name, None) or ()) for name in names)
    return tied, ignored


def length_of_generation(model: nn.Module) -> int:
    """The length for which ``generate`` of ``model`` has last made a static cache, which layers of a sliding window do
    not tell; 0 if it has not. Relies on ``_previous_max_cache_length`` of models (5.24)."""
    return int(getattr(model, "_previous_max_cache_length", 0))
