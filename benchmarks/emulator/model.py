"""A model traced once, with few layers, to be priced under many layouts; placements and prices are cached."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from autopar.arguments import Batch, split_batch
from autopar.cluster.description import Cluster
from autopar.cluster.device import Device
from autopar.ir.graph import Graph
from autopar.layout import Layout
from autopar.placement.fused_kernels import FusedKernels
from autopar.planner.prepare import Prepared, batch_size, prepare
from autopar.planner.step_graphs import step_graph
from benchmarks.emulator.sections.experts import expert_counts
from benchmarks.emulator.sections.placement import Placed
from benchmarks.emulator.sections.section import Sections
from benchmarks.emulator.sections.section_of_node import multiplicities
from benchmarks.emulator.sections.shortened_model import Depth, order_in, traced_short
from benchmarks.emulator.sections.stand_in import read_by_others

from .precision import Conversion
from .price import Priced, price_sections
from .pricing import pricing_of


@dataclass(frozen=True, eq=False)
class LayoutModel:
    """See the module docstring. ``batch``: the global batch that layouts divide; ``modules``: the paths of all
    modules."""

    prepared: Prepared
    depth: Depth
    batch: int
    modules: tuple[str, ...]
    _sections: dict[object, Sections] = field(default_factory=dict)
    _placed: dict[object, Placed] = field(default_factory=dict)
    _priced: dict[object, Priced] = field(default_factory=dict)
    _graphs: dict[object, tuple[Graph, FusedKernels]] = field(default_factory=dict)

    @staticmethod
    def of(model: nn.Module, batch: Batch, loss_fn: Callable[..., torch.Tensor] | None = None) -> LayoutModel:
        """Traces ``model`` with three layers of each kind if these can represent the others. Raises
        :class:`TraceError`."""
        return LayoutModel.of_call(model, *split_batch(batch), loss_fn)

    @staticmethod
    def of_call(
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        loss_fn: Callable[..., torch.Tensor] | None = None,
        dtype: torch.dtype | None = None,
    ) -> LayoutModel:
        """:meth:`of` for the arguments of a call, with all computed in ``dtype``, if given (:func:`computed_in`): of
        the model only the layers that are traced are copied. Raises :class:`OptionsError` if they cannot be."""
        conversion = Conversion(frozenset(), torch.float32) if dtype is None else Conversion.of(model, dtype)
        args, kwargs = conversion.of_arguments(args, kwargs)

        def trace(short: nn.Module) -> Prepared:
            return prepare(short, args, kwargs, device="cpu", loss_fn=loss_fn, training=True)

        prepared, depth = traced_short(model, trace, _needed_whole, conversion.of_model)
        modules = tuple(path for path, _ in model.named_modules())
        if depth.is_whole:  # Then the trace may be from the cache, and nothing have been called.
            depth = replace(depth, called=order_in(prepared.traced.graph, depth))
        return LayoutModel(prepared, depth, batch_size(args, kwargs), modules)

    def price(self, layout: Layout, cluster: Cluster, batch: int | None = None, limit: int | None = None) -> Priced:
        """The price of ``layout`` on ``cluster`` for a global batch, and memory of ``limit`` bytes."""
        layout, batch = layout.completed(), batch or self.batch
        key = layout, cluster, batch, limit
        if key not in self._priced:
            self._priced[key] = price_sections(self.sections(layout, cluster, batch), layout, batch, cluster, limit)
        return self._priced[key]

    @property
    def experts(self) -> int:
        """How many experts the model's blocks have (the greatest common divisor of several numbers); 0 without
        blocks."""
        return math.gcd(*expert_counts(self.prepared.graph))

    @property
    def every_placed(self) -> tuple[Placed, ...]:
        return tuple(self._placed.values())

    def sections(self, layout: Layout, cluster: Cluster, batch: int | None = None) -> Sections:
        """The priced sections of one microbatch of a global batch under ``layout``."""
        pricing = pricing_of(layout)
        key = *self._key(layout, cluster), *_values(layout, pricing.sections.reads)
        if key not in self._sections:
            pricing.check(layout, cluster, self.prepared.graph, self.depth, self.modules)
            self._sections[key] = pricing.sections(self.placed(layout, cluster), self.depth, layout).every()
        # With a single microbatch nothing is accumulated: products write their own gradients.
        accumulates = (batch or self.batch) > layout.data * layout.microbatch
        divided = (*key, accumulates, *_values(layout, pricing.blocks.reads))
        if divided not in self._sections:
            prices = pricing.blocks(layout, cluster, accumulates)
            self._sections[divided] = pricing.with_experts(self._sections[key], prices)
        return self._sections[divided]

    @staticmethod
    def _key(layout: Layout, cluster: Cluster) -> tuple[object, ...]:
        """Everything that placements depend on."""
        return type(layout), cluster, *_values(layout, pricing_of(layout).placing.reads)

    def placed(self, layout: Layout, cluster: Cluster) -> Placed:
        key = self._key(layout, cluster)
        if key not in self._placed:
            graph, fused = self._compiled(layout.microbatch, cluster.device)
            placing = pricing_of(layout).placing(layout)
            self._placed[key] = placing.place(graph, fused, cluster, multiplicities(graph, self.depth))
        return self._placed[key]

    def _compiled(self, microbatch: int, device: Device) -> tuple[Graph, FusedKernels]:
        """The graph of a step of one microbatch, and its kernels on such a device."""
        key = microbatch, device.is_gpu
        if key not in self._graphs:
            graph = step_graph(self.prepared.graph, self.prepared.loss, microbatch)
            self._graphs[key] = graph, FusedKernels.of(graph, device)
        return self._graphs[key]


def _values(layout: Layout, names: Iterable[str]) -> tuple[object, ...]:
    return tuple(getattr(layout, name) for name in names)


def _needed_whole(prepared: Prepared, depth: Depth) -> list[str]:
    """The lists of layers that must be traced in full."""
    graph, loss = prepared.traced.graph, prepared.loss
    return [path for path, kinds in depth.kinds.items() if read_by_others(graph, loss, path, kinds)]
