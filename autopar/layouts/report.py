"""Finds the best layout of a model, and compares it with layouts that the user names and with a rule of thumb.

The report of :func:`plan_layouts` prints as a table. It says how long training takes, what a checkpoint contains and
where the prices come from.
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

from autopar.arguments import Batch, check_model, split_batch
from autopar.cluster.description import Cluster
from autopar.errors import OptionsError
from autopar.keywords import suggests
from autopar.layout import Layout, Recompute
from autopar.options import Options
from autopar.planner.prepare import batch_size
from autopar.plans.views.columns import columns
from autopar.plans.views.quantities import duration, size

from .model import LayoutModel
from .precision import DTYPES, computed_in
from .price import Priced
from .pricing import pricing_of
from .search import LayoutSearchResult, best_layout
from .space import PLANNED, Space

# How many layouts a report shows.
# Chosen: what fits on a page next to those compared with.
SHOWN = 5
# By definition.
SECONDS_OF_A_DAY = 86400.0


@dataclass(frozen=True)
class LayoutReport:
    """The best layouts for ``devices`` of ``cluster``.

    ``source``: where prices come from. ``named``: layouts priced for comparison. ``trained``: how many of the
    ``parameters`` are trained. ``tokens``: those of the whole training; ``sample_tokens``: those of a sample.
    ``seconds``, ``cpu_seconds``: the time planning took, tracing included."""

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
        """Days of training for ``tokens`` under a layout; None if the number of tokens is unknown."""
        if self.tokens is None or self.sample_tokens is None:
            return None
        steps = self.tokens / (self.batch * self.sample_tokens)
        return steps * priced.predicted.step_seconds / SECONDS_OF_A_DAY

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of the weights, and of the optimizer's state and master weights of trained ones."""
        each = 4 if self.best.layout.precision == "fp32" else 2
        return self.parameters * each + self.trained * self.best.layout.state_itemsize

    @property
    def compared(self) -> dict[str, Priced]:
        """The layouts to compare with, by name."""
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
            "layouts": [self._figures(priced) for priced in self.found.ranked[:SHOWN]],
            **{name: self._figures(priced) for name, priced in self.compared.items()},
        }

    def _figures(self, priced: Priced) -> dict[str, Any]:
        predicted = priced.predicted
        return {
            "layout": str(priced.layout),
            "step_seconds": predicted.step_seconds,
            "compute_seconds": predicted.compute_seconds,
            "comm_seconds": predicted.comm_seconds,
            "bubble_seconds": predicted.bubble_seconds,
            "tflops_per_device": priced.flops_per_second / 1e12,
            "mfu": predicted.mfu,
            "days": self.days(priced),
            "peak_bytes": predicted.peak_bytes,
            "weight_bytes": predicted.weight_bytes,
            "gradient_bytes": predicted.gradient_bytes,
            "optimizer_bytes": predicted.optimizer_bytes,
            "activation_bytes": predicted.activation_bytes,
            "temporary_bytes": predicted.temporary_bytes,
            "memory_limit": priced.memory_limit,
            "fits": priced.fits,
            "notes": list(priced.notes),
        }

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        result = self.found
        yield (
            f"{self.model}: {self.parameters / 1e9:,.2f}B parameters on {self.devices} devices of {self.cluster}, "
            f"batches of {self.batch}"
        )
        yield (
            f"planned in {duration(self.seconds)} ({duration(self.cpu_seconds)} of computing): {result.considered} "
            f"layouts, {result.fitting} fit; placements proven within {result.gap:.2%} of the best of their program"
        )
        yield ""
        rows = {**{str(i): priced for i, priced in enumerate(result.ranked[:SHOWN], 1)}, **self.compared}
        table = columns(_HEAD, [self._row(name, priced) for name, priced in rows.items()], right=range(1, len(_HEAD)))
        # Layouts are the last column, so that they may have any length.
        for line, layout in zip(table, ["layout", *(str(priced.layout) for priced in rows.values())], strict=True):
            yield f"{line}  {layout}"
        too_big = [f"{name} by {size(priced.excess_bytes)}" for name, priced in rows.items() if not priced.fits]
        if too_big:
            yield f"! does not fit: {', '.join(too_big)}"
        yield from (f"! {note}" for note in dict.fromkeys(note for priced in rows.values() for note in priced.notes))
        if result.rule is None:
            yield "rule: tensor = devices of a node, and no number of stages fits"
        yield ""
        yield f"memory of the fullest device: {_memory(self.best)}"
        held = "weights" if self.best.layout.precision == "fp32" else "weights, master weights"
        yield f"checkpoint: {size(self.checkpoint_bytes)} ({held} and two moments)"
        yield f"prices: {self.source}"

    def _row(self, name: str, priced: Priced) -> list[str]:
        predicted, days = priced.predicted, self.days(priced)
        return [
            name,
            duration(predicted.step_seconds),
            _short(priced.flops_per_second / 1e12),
            f"{predicted.mfu:.1%}",
            "-" if days is None else _short(days),
            duration(predicted.comm_seconds),
            duration(predicted.bubble_seconds),
            size(predicted.peak_bytes) + (" " if priced.fits else "!"),
        ]


_HEAD = ("", "step", "TFLOP/s", "MFU", "days", "messages", "bubble", "memory ")


def _short(number: float) -> str:
    """Rounded to an integer from a hundred on, else to two or three digits, however small."""
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}" if number >= 1 else f"{number:.2g}"


def _memory(priced: Priced) -> str:
    predicted = priced.predicted
    parts = {
        "weights": predicted.weight_bytes,
        "gradients": predicted.gradient_bytes,
        "optimizer": predicted.optimizer_bytes,
        "activations": predicted.activation_bytes,
        "at work": predicted.temporary_bytes,
    }
    breakdown = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in parts.items())
    offloaded = max(rank.offloaded for rank in priced.held)
    breakdown += f"; {size(offloaded)} on the host" if offloaded else ""
    breakdown += f"; {size(priced.reserved)} kept free besides"
    return f"{size(predicted.peak_bytes)} of {size(priced.memory_limit)} ({breakdown})"


@suggests
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
        tokens: how many tokens the whole training reads, to say how many days it takes; a sample has as many tokens as
            its first input has elements.
        compare: layouts priced for comparison, by name.
        precision: the dtype of computation, with fp32 master weights if it is reduced. A model in fp32 is priced as if
            converted to it.
        memory_limit: bytes per device that tensors may take; default: the device's memory less its ``reserve_bytes``
            and less what is lost to fragmentation.
        zero, recompute: fixes them for every layout; by default ZeRO-1 and 3 and every recomputation are searched.
        offload: whether optimizer states rest in host memory.

    Raises:
        TraceError: the model cannot be captured.
        InfeasibleError: no layout fits; says what would fit, in bytes.
        OptionsError: a layout for comparison takes another number of devices, or does not divide the model.
    """
    check_model(model)
    began, cpu_began = time.perf_counter(), time.process_time()
    hardware = Cluster.get(cluster)
    like, space = _searched(zero, recompute, precision, offload)
    samples, sample_tokens = _samples(batch)
    step_samples = samples if global_batch is None else global_batch
    limit = _checked(devices, step_samples, memory_limit, tokens, compare or {})
    traced = cache(lambda dtype: LayoutModel.of(*computed_in(model, batch, dtype), loss_fn))
    searched = traced(DTYPES[precision])
    result = best_layout(searched, hardware, devices, batch=step_samples, limit=limit, like=like, space=space)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    named = {
        name: traced(pricing_of(layout).dtype(layout)).price(layout, hardware, step_samples, limit)
        for name, layout in (compare or {}).items()
    }
    return LayoutReport(
        model=type(model).__name__,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        trained=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        devices=devices,
        cluster=hardware.name,
        source=hardware.source,
        batch=step_samples,
        sample_tokens=sample_tokens,
        tokens=tokens,
        found=result,
        named=named,
        seconds=seconds,
        cpu_seconds=cpu_seconds,
    )


def _searched(zero: Any, recompute: Any, precision: Any, offload: bool) -> tuple[Layout, Space]:
    """The fields that every layout shares, and the space that is searched. Raises :class:`OptionsError` for values that
    no layout has."""
    fixed = {name: (value,) for name, value in (("zero", zero), ("recompute", recompute)) if value is not None}
    Layout(zero=zero or 0, recompute=recompute or "none")
    return Layout(precision=precision, offload=offload), replace(PLANNED, **fixed)


def _samples(batch: Batch) -> tuple[int, int | None]:
    """How many samples a batch has, and how many elements the first input has of each; None if there is no tensor."""
    args, kwargs = split_batch(batch)
    samples = batch_size(args, kwargs)
    first = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
    return samples, None if first is None else first.numel() // max(1, samples)


def _checked(
    devices: int, batch: int, memory_limit: Any, tokens: float | None, compare: Mapping[str, Layout]
) -> int | None:
    """The memory limit in bytes. Raises :class:`OptionsError` for invalid arguments before anything takes time."""
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
    """Raises :class:`OptionsError` for layouts on another number of devices, or that do not divide the batch."""
    unchecked: object = compare
    if not isinstance(unchecked, Mapping) or not all(isinstance(layout, Layout) for layout in unchecked.values()):
        raise OptionsError(f"compare={compare!r}: give names and an autopar.Layout of each, {{'ours': Layout(data=8)}}")
    for name, layout in compare.items():
        if layout.devices != devices:
            raise OptionsError(f"{name}: {layout} takes {layout.devices} devices, not {devices}")
        layout.microbatches(batch)
