"""What the fields of a published row may hold: a row that says something else is skipped with the field and the value.

A field that is absent, or null, is not given. What is only looked for words (names, kernels, networks) may be anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .published_shape import NotExpressible

PARTS = ("model", "cluster", "parallel", "measured")
# Longer values are cut off in reasons.
MOST_SHOWN = 60


@dataclass(frozen=True)
class Number:
    """A whole number from ``least`` to ``most``, or else any positive one up to ``most``: more is a mistake. Degrees of
    0 say that something is not used."""

    most: float
    least: float = 1
    whole: bool = True

    def fault(self, value: object) -> str:
        """Why a value is none; empty if it is."""
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or (isinstance(value, float) and not math.isfinite(value)):
            return f"no {self._kind}"
        assert isinstance(value, (int, float))
        if value < self.least or (self.whole and value != int(value)) or (value <= 0 and not self.whole):
            return f"no {self._kind}"
        return f"more than {self.most:,.0f}, which nobody trained with" if value > self.most else ""

    @property
    def _kind(self) -> str:
        if not self.whole:
            return "positive number"
        return "positive whole number" if self.least else "whole number of at least 0"


FLAGS: Mapping[str, tuple[str, ...]] = {
    "parallel": (
        *("sequence_parallel", "ddp_overlap", "tp_comm_overlap", "async_tp", "cpu_offload_optimizer", "compile"),
    ),
    "model": ("normed_heads", "attention_bias"),
    "measured": ("oom",),
}
DIM, DEGREE, AMOUNT = Number(10**7), Number(10**6, 0), Number(1e21, 0, whole=False)
NUMBERS: Mapping[str, Mapping[str, Number]] = {
    "model": {
        **dict.fromkeys(("hidden", "heads", "kv_heads", "head_dim", "ffn", "top_k"), DIM),
        **dict.fromkeys(("layers",), Number(10_000)),
        **dict.fromkeys(("dense_layers",), Number(10_000, 0)),
        **dict.fromkeys(("expert_groups", "chosen_groups"), DEGREE),
        **dict.fromkeys(("seq", "vocab", "expert_group_size"), Number(10**8)),
        **dict.fromkeys(("experts_every_other_layer", "global_parameter_scale"), Number(10**6)),
        **dict.fromkeys(("params", "active_params"), AMOUNT),
    },
    "model.experts": {
        **dict.fromkeys(("n", "top_k"), Number(10**6)),
        **dict.fromkeys(("ffn",), DIM),
        **dict.fromkeys(("shared",), DEGREE),
        **dict.fromkeys(("every",), Number(10_000)),
    },
    "cluster": {
        **dict.fromkeys(("n_gpus", "gpus_per_node", "slices"), Number(10**7)),
        **dict.fromkeys(("hbm_GBps", "power_W"), AMOUNT),
    },
    "parallel": {
        **dict.fromkeys(("t", "p", "d", "cp", "ep", "etp", "interleave"), DEGREE),
        **dict.fromkeys(("microbatch", "per_device_batch", "local_batch", "n_microbatches"), Number(10**8)),
        **dict.fromkeys(("global_batch",), Number(10**8)),
        **dict.fromkeys(("capacity_factor",), Number(10**6, 0, whole=False)),
    },
    "measured": dict.fromkeys(
        ("iter_s", "iter_s_derived", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu", "mfu_peak"), AMOUNT
    ),
}


def check_fields(row: Mapping[str, Any]) -> None:
    """Raises :class:`NotExpressible` for a part that is missing or no JSON object, and for a field that holds what it
    cannot, with its name and value."""
    for part in PARTS:
        if part not in row or row[part] is None:
            raise NotExpressible(f"the row has no {part!r}")
        if not isinstance(row[part], Mapping):
            raise NotExpressible(f"{part} is {shown(row[part])}, no JSON object of fields")
    for where, fields in _tables(row):
        for name, kind in NUMBERS[where].items():
            value = fields.get(name)
            if value is not None and (fault := kind.fault(value)):
                raise NotExpressible(f"{where}.{name} is {shown(value)}, {fault}")
        for name in FLAGS.get(where, ()):
            if fields.get(name) not in (None, True, False):
                raise NotExpressible(f"{where}.{name} is {shown(fields[name])}, neither true nor false")
    convention = row["measured"].get("flops_convention")
    if convention is not None and not isinstance(convention, str):
        raise NotExpressible(f"measured.flops_convention is {shown(convention)}, no name of a convention")
    experts = row["model"].get("experts")
    if experts and not isinstance(experts, Mapping) and NUMBERS["model.experts"]["n"].fault(experts):
        raise NotExpressible(
            f"model.experts is {shown(experts)}, neither how many there are nor an object with n and top_k"
        )


def _tables(row: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for part in PARTS:
        yield part, row[part]
    experts = row["model"].get("experts")
    if isinstance(experts, Mapping):
        yield "model.experts", experts


def shown(value: object) -> str:
    """A value as a reason quotes it.

    >>> shown("many")
    "'many'"
    """
    try:
        text = repr(value)
    except ValueError:  # Python writes no whole number of more than some thousand digits.
        return "a number of thousands of digits"
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."
