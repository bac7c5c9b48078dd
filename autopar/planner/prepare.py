"""A model traced for one kind of call and normalised, ready to be planned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autopar.arguments import check_names
from autopar.cluster.description import Cluster
from autopar.ir.graph import Graph
from autopar.ir.node import Dim, symbol
from autopar.options import Options
from autopar.passes.normalise.scaled_loss import with_scaled_loss
from autopar.passes.normalise.standard import normalise
from autopar.passes.recompute.compute_again import compute_again
from autopar.passes.recompute.draw_again import draw_again
from autopar.placement.constraints import module_outputs
from autopar.plans.views.quantities import amount
from autopar.precision import Precision, autocast_dtype, check_precision, scales_loss
from autopar.rare_collections import collecting_rarely
from autopar.runtime.calls.kind import kind_of
from autopar.runtime.comm.groups import AxisGroup
from autopar.trace.cache.cache import traced_once
from autopar.trace.call import Differentiate, describe_call
from autopar.trace.lengths import BATCH, Lengths
from autopar.trace.tracer import Traced, request_for

from .request import PlanRequest, Propose, as_stated
from .timings import Timings

LossFunction = Callable[..., torch.Tensor]
# What a plan for training says where the loss is not part of the step.
NO_LOSS = (
    "the model returns no loss for this batch: the plan is for the gradients of all outputs, as if a loss outside took "
    "them; with labels in the batch, or loss_fn=, it is that of a training step, with the loss"
)


def describe(model: nn.Module, inputs: Mapping[str, tuple[Dim, ...]]) -> str:
    """A model and its batch for people: ``LlamaForCausalLM, 6.7M parameters, input_ids 8x128``."""
    count = amount(sum(p.numel() for p in model.parameters()))
    shapes = ", ".join(f"{name} {'x'.join(map(str, shape)) or 'scalar'}" for name, shape in list(inputs.items())[:3])
    return f"{type(model).__name__}, {count} parameters, {shapes}"


@dataclass(frozen=True)
class Prepared:
    """A traced and normalised model, with the batch size it was called with, the loss function that was traced with it,
    and the :func:`circumstances` of the trace. ``compiled``: whether its backward computes again what compiled code
    need not save."""

    traced: Traced
    graph: Graph
    batch: int
    loss_fn: LossFunction | None = None
    circumstances: object = None
    compiled: bool = False

    @property
    def loss(self) -> str | None:
        return self.traced.signature.loss

    @property
    def lengths(self) -> tuple[str, ...]:
        """The symbols of sizes of inputs, besides the batch size, that the graph leaves open."""
        return tuple(name for name, _ in self.graph.symbols if name != BATCH)

    def without_loss(self) -> Prepared:
        """This without a loss: every output is a result of its own."""
        signature = replace(self.traced.signature, loss=None)
        return replace(self, traced=replace(self.traced, signature=signature))

    def for_compiling(self) -> Prepared:
        """This for compiled steps, whose backward draws random numbers again, and computes elementwise values again,
        instead of reading saved ones."""
        return replace(self, graph=compute_again(draw_again(self.graph)), compiled=True)

    def fixed(self, lengths: Mapping[str, int]) -> Prepared | None:
        """This at certain :attr:`lengths`; None if the model runs other operations then."""
        traced = self.traced.fixed(lengths)
        # At certain lengths, some reshapes and expansions change nothing.
        if traced is None:
            return None
        fixed = replace(self, traced=traced, graph=normalise(self.graph.fixed(lengths)))
        return fixed.for_compiling() if self.compiled else fixed


@collecting_rarely()
def prepare(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    device: torch.device | str,
    loss_fn: LossFunction | None,
    training: bool | None = None,
    grad: bool = True,
    differentiate: Differentiate = "loss",
    precision: Precision | None = None,
    timings: Timings | None = None,
    ranks: AxisGroup | None = None,
    lengths: Lengths = (),
) -> Prepared:
    """Traces a call under a policy of :mod:`autopar.precision`, once for all ``ranks``, and normalises the graph.
    ``lengths``: sizes of inputs to leave open, if the model allows it. Raises :class:`OptionsError` if the policy is
    not for such a model, or forward takes no input of a name."""
    timings = timings or Timings()
    check_names(model, args, kwargs)
    check_precision(model, precision)
    around = circumstances(model, model.training if training is None else training)
    half = autocast_dtype(precision)
    with timings.phase("trace"):
        request = request_for(
            model,
            args,
            kwargs,
            device=device,
            loss_fn=loss_fn,
            training=training,
            grad=grad,
            differentiate=differentiate,
            autocast=half,
            lengths=lengths,
        )
        traced = traced_once(request, ranks)
    with timings.phase("normalise"):
        graph = normalise(traced.graph)
        graph = with_scaled_loss(graph) if scales_loss(precision) else graph
    batch = dict(graph.symbols).get(BATCH, batch_size(args, kwargs))
    return Prepared(traced, graph, batch, loss_fn, around)


def circumstances(model: nn.Module, training: bool) -> object:
    """What a trace depends on besides the inputs of the call: the modes of modules, which parameters are trained,
    torch's state and hooks."""
    kind = kind_of(model, (), {}, True, "loss")
    # If ``training`` is not the model's mode, the trace switches every module to it.
    modes = kind.modes if model.training == training else (training,) * len(kind.modes)
    return modes, kind.wanted, kind.around, kind.hooks


def batch_size(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """The size of dim 0 that most tensor inputs share, which the trace takes as the batch size; 1 if there is none."""
    return describe_call(args, dict(kwargs)).batch or 1


def make_request(
    model: nn.Module,
    base: Prepared,
    mesh: tuple[int, ...],
    cluster: Cluster,
    options: Options,
    axis_names: tuple[str, ...] = (),
    propose: Propose | None = None,
) -> PlanRequest:
    """The request to plan a prepared model, with a description for people."""
    parameters = {node.target for node in base.graph.placeholders("param")}
    inputs = {node.target: node.type.shape for node in base.graph.at(**{BATCH: base.batch}).placeholders("input")}
    return PlanRequest(
        graph=base.graph,
        loss=base.loss,
        batch=base.batch,
        mesh=mesh,
        asked=mesh,
        cluster=as_stated(cluster, options),
        options=options,
        model=describe(model, inputs),
        axis_names=axis_names,
        notes=base.traced.notes,
        propose=propose,
        tied=tuple((name, first) for name, first in base.traced.signature.tied.items() if first in parameters),
        returned=_returned(base.traced.graph) if options.pins else (),
    )


def _returned(traced: Graph) -> tuple[tuple[str, tuple[Dim, ...]], ...]:
    """By path, the shape of what each module returned, which a normalised graph may have with other dims."""
    hints = {symbol(name): size for name, size in traced.symbols if name != BATCH}

    def shape(name: str) -> tuple[Dim, ...]:
        return tuple(dim if isinstance(dim, int) else dim.subs(hints) for dim in traced[name].type.shape)

    return tuple((path, shape(name)) for path, name in module_outputs(traced).items() if any(traced[name].types[:1]))
