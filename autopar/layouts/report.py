"""Planning by layouts: the best of all ways to lay a model out, compared with layouts that somebody names and with a
rule of thumb.

What :func:`plan_layouts` gives prints as a table and says how long training takes, what a checkpoint holds and where
the prices come from.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch
from torch import nn

from autopar.api import Batch, split_batch
from autopar.cluster.description import Cluster
from autopar.errors import OptionsError
from autopar.layout import Layout, Recompute
from autopar.options import Options
from autopar.planner.prepare import batch_size
from autopar.plans.views.columns import columns
from autopar.plans.views.quantities import duration, size

from .divisibility import check_modules
from .model import LayoutModel
from .precision import computed_in, dtype_of
from .price import Priced
from .search import LayoutSearchResult, best_layout
from .space import PLANNED, Space

# Layouts that are shown.
# Chosen: what fits on a page next to those compared with.
SHOWN = 5
# By definition.
SECONDS_OF_A_DAY = 86400.0


@dataclass(frozen=True)
class LayoutReport:
    """What was found for ``devices`` of ``cluster``, whose ``source`` says where prices come from; ``named`` ones are
    priced for comparison. Of ``parameters`` so many are ``trained``. ``tokens`` are those of training, and a sample has
    ``sample_tokens``. ``seconds`` and ``cpu_seconds`` are what planning took, tracing included."""

    model: str
    parameters: int
    trained: int
    devices: int
    cluster: str
    source: str
    batch: int
    sample_tokens: int | None
    tokens: float | None
    found: LayoutSearchResult
    named: Mapping[str, Priced]
    seconds: float
    cpu_seconds: float

    @property
    def best(self) -> Priced:
        return self.found.best

    def days(self, priced: Priced) -> float | None:
        """Days of training for ``tokens`` under a layout; None where there is no number of tokens."""
        if self.tokens is None or self.sample_tokens is None:
            return None
        steps = self.tokens / (self.batch * self.sample_tokens)
        return steps * priced.predicted.step_seconds / SECONDS_OF_A_DAY

    @property
    def checkpoint_bytes(self) -> int:
        """Weights, and the optimizer's state with master weights of those that are trained."""
        each = 4 if self.best.layout.precision == "fp32" else 2
        return self.parameters * each + self.trained * self.best.layout.state_itemsize

    @property
    def compared(self) -> dict[str, Priced]:
        """The layouts to compare with, by what they are."""
        rule = {"rule": self.found.rule} if self.found.rule is not None else {}
        return {**self.named, **rule}

    def data(self) -> dict[str, Any]:
        """Everything as plain numbers."""
        return {
            "model": self.model,
            "parameters": self.parameters,
            "devices": self.devices,
            "cluster": self.cluster,
            "source": self.source,
            "batch": self.batch,
            "planning_seconds": self.seconds,
            "planning_cpu_seconds": self.cpu_seconds,
            "considered": self.found.considered,
            "fitting": self.found.fitting,
            "placement_gap": self.found.gap,
            "tokens": self.tokens,
            "checkpoint_bytes": self.checkpoint_bytes,
            "layouts": [self._figures(one) for one in self.found.ranked[:SHOWN]],
            **{name: self._figures(one) for name, one in self.compared.items()},
        }

    def _figures(self, priced: Priced) -> dict[str, Any]:
        found = priced.predicted
        return {
            "layout": str(priced.layout),
            "step_seconds": found.step_seconds,
            "compute_seconds": found.compute_seconds,
            "comm_seconds": found.comm_seconds,
            "bubble_seconds": found.bubble_seconds,
            "tflops_per_device": priced.flops_per_second / 1e12,
            "mfu": found.mfu,
            "days": self.days(priced),
            "peak_bytes": found.peak_bytes,
            "weight_bytes": found.weight_bytes,
            "gradient_bytes": found.gradient_bytes,
            "optimizer_bytes": found.optimizer_bytes,
            "activation_bytes": found.activation_bytes,
            "temporary_bytes": found.temporary_bytes,
            "memory_limit": priced.memory_limit,
            "fits": priced.fits,
            "notes": list(priced.notes),
        }

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        found = self.found
        yield (
            f"{self.model}: {self.parameters / 1e9:,.2f}B parameters on {self.devices} devices of {self.cluster}, "
            f"batches of {self.batch}"
        )
        yield (
            f"planned in {duration(self.seconds)} ({duration(self.cpu_seconds)} of computing): {found.considered} "
            f"layouts, {found.fitting} fit; placements proven within {found.gap:.2%} of the best of their program"
        )
        yield ""
        rows = {**{str(i): one for i, one in enumerate(found.ranked[:SHOWN], 1)}, **self.compared}
        table = columns(_HEAD, [self._row(name, one) for name, one in rows.items()], right=range(1, len(_HEAD)))
        # Layouts are the last column, which may be as long as they are.
        for line, layout in zip(table, ["layout", *(str(one.layout) for one in rows.values())], strict=True):
            yield f"{line}  {layout}"
        too_big = [f"{name} by {size(one.excess_bytes)}" for name, one in rows.items() if not one.fits]
        if too_big:
            yield f"! does not fit: {', '.join(too_big)}"
        yield from (f"! {note}" for note in dict.fromkeys(note for one in rows.values() for note in one.notes))
        if found.rule is None:
            yield "rule: tensor = devices of a node, and no number of stages fits"
        yield ""
        yield f"memory of the fullest device: {_memory(self.best)}"
        held = "weights" if self.best.layout.precision == "fp32" else "weights, master weights"
        yield f"checkpoint: {size(self.checkpoint_bytes)} ({held} and two moments)"
        yield f"prices: {self.source}"

    def _row(self, name: str, priced: Priced) -> list[str]:
        found, days = priced.predicted, self.days(priced)
        return [
            name,
            duration(found.step_seconds),
            _short(priced.flops_per_second / 1e12),
            f"{found.mfu:.1%}",
            "-" if days is None else _short(days),
            duration(found.comm_seconds),
            duration(found.bubble_seconds),
            size(found.peak_bytes) + (" " if priced.fits else "!"),
        ]


_HEAD = ("", "step", "TFLOP/s", "MFU", "days", "messages", "bubble", "memory ")


def _short(number: float) -> str:
    """Whole from a hundred on, else two or three digits, however small."""
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}" if number >= 1 else f"{number:.2g}"


def _memory(priced: Priced) -> str:
    found = priced.predicted
    parts = {
        "weights": found.weight_bytes,
        "gradients": found.gradient_bytes,
        "optimizer": found.optimizer_bytes,
        "activations": found.activation_bytes,
        "at work": found.temporary_bytes,
    }
    said = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in parts.items())
    offloaded = max(one.offloaded for one in priced.held)
    said += f"; {size(offloaded)} on the host" if offloaded else ""
    return (
        f"{size(found.peak_bytes)} of {size(priced.memory_limit)} ({said}; {size(priced.reserved)} kept free besides)"
    )


def plan_layouts(
    model: nn.Module,
    batch: Batch,
    cluster: str | Cluster,
    *,
    devices: int,
    global_batch: int | None = None,
    tokens: float | None = None,
    compare: Mapping[str, Layout] | None = None,
    precision: str = "bf16",
    memory_limit: int | None = None,
    zero: Literal[0, 1, 2, 3] | None = None,
    recompute: Recompute | None = None,
    offload: bool = False,
    loss_fn: Callable[..., torch.Tensor] | None = None,
) -> LayoutReport:
    """The best layouts of ``model`` on so many ``devices``. The model may be on the meta device; equal layers are
    traced once.

    Args:
        batch: sample inputs, as for :func:`autopar.plan`.
        global_batch: samples of a step; default: those of ``batch``.
        tokens: how many tokens training takes in all, for the days it needs; a sample has as many as its first input
            has elements.
        compare: layouts priced for comparison, by name.
        precision: what is computed in, with fp32 master weights if it is a reduced one. A model in fp32 is priced as
            converted to it.
        memory_limit: bytes per device that tensors may take; default: the device's memory less its ``reserve_bytes``
            and less what is lost to fragmentation.
        zero, recompute: fixes them for every layout; by default ZeRO-1 and 3 and every recomputation are searched.
        offload: whether optimizer states rest in host memory.

    Raises:
        TraceError: the model cannot be captured.
        InfeasibleError: no layout fits; says what would, in bytes.
        OptionsError: a layout for comparison takes another number of devices, or does not divide the model.
    """
    began, cpu_began = time.perf_counter(), time.process_time()
    hardware = Cluster.get(cluster)
    like, space = _asked(zero, recompute, precision, offload)
    samples, first = _measured(batch)
    whole = samples if global_batch is None else global_batch
    limit = _checked(devices, whole, memory_limit, tokens, compare or {})
    for layout in (compare or {}).values():
        check_modules(model, layout)
    traced = cache(lambda dtype: LayoutModel.of(*computed_in(model, batch, dtype), loss_fn))
    searched = traced(dtype_of(precision))
    found = best_layout(searched, hardware, devices, batch=whole, limit=limit, like=like, space=space)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    named = {
        name: traced(dtype_of(layout.precision)).price(layout, hardware, whole, limit)
        for name, layout in (compare or {}).items()
    }
    return LayoutReport(
        model=type(model).__name__,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        trained=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        devices=devices,
        cluster=hardware.name,
        source=hardware.source,
        batch=whole,
        sample_tokens=first,
        tokens=tokens,
        found=found,
        named=named,
        seconds=seconds,
        cpu_seconds=cpu_seconds,
    )


def _asked(zero: Any, recompute: Any, precision: Any, offload: bool) -> tuple[Layout, Space]:
    """What every layout has, and the space that is searched. Raises :class:`OptionsError` for values that no layout
    has."""
    fixed = {name: (value,) for name, value in (("zero", zero), ("recompute", recompute)) if value is not None}
    Layout(zero=zero or 0, recompute=recompute or "none")
    return Layout(precision=precision, offload=offload), replace(PLANNED, **fixed)


def _measured(batch: Batch) -> tuple[int, int | None]:
    """How many samples a batch has, and how many elements the first input has of each; None if there is no tensor."""
    args, kwargs = split_batch(batch)
    samples = batch_size(args, kwargs)
    first = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
    return samples, None if first is None else first.numel() // max(1, samples)


def _checked(
    devices: int, batch: int, memory_limit: Any, tokens: float | None, compare: Mapping[str, Layout]
) -> int | None:
    """The memory limit in bytes. Raises :class:`OptionsError` for what cannot be asked, before anything takes time."""
    _check_numbers(devices=devices, global_batch=batch)
    limit = Options(memory_limit=memory_limit).memory_limit
    _check_tokens(tokens)
    _check_compared(compare, devices, batch)
    return limit


def _check_numbers(**named: object) -> None:
    for name, value in named.items():
        if type(value) is not int or value < 1:
            raise OptionsError(f"{name}={value!r}: not a positive whole number")


def _check_tokens(tokens: object) -> None:
    if tokens is not None and not (isinstance(tokens, (int, float)) and 0 < tokens < math.inf):
        raise OptionsError(f"tokens={tokens!r}: not a positive number")


def _check_compared(compare: Mapping[str, Layout], devices: int, batch: int) -> None:
    """Raises :class:`OptionsError` for what does not divide so."""
    given: object = compare
    if not isinstance(given, Mapping) or not all(isinstance(layout, Layout) for layout in given.values()):
        raise OptionsError(f"compare={compare!r}: give names and an autopar.Layout of each, {{'ours': Layout(data=8)}}")
    for name, layout in compare.items():
        if layout.devices != devices:
            raise OptionsError(f"{name}: {layout} takes {layout.devices} devices, not {devices}")
        layout.microbatches(batch)
