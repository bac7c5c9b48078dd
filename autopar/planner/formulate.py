"""The placement program that a question poses on its mesh: with the choices that its options leave."""

from __future__ import annotations

from autopar.ir.graph import Graph
from autopar.passes.annotate.fold import fold_layers
from autopar.placement.constraints import pin_instance, pinned_apart, with_choices, zero_allows
from autopar.placement.formulation import Instance, build_instance
from autopar.placement.prices import Prices

from .memory_limit import may_widen, widened
from .request import Question, host_limit_of, memory_limit_of

STRETCHES = 3


def posed(question: Question, annotated: Graph, prices: Prices, stretches: int = 1) -> Instance:
    """The instance of an annotated graph without recomputation and offload. Equal layers are tied within so many
    ``stretches`` of depth."""
    folded = fold_layers(annotated, stretches, pinned_apart(annotated, question.options.pins))
    instance = build_instance(
        folded,
        prices,
        optimizer=question.options.optimizer,
        memory_limit=float(memory_limit_of(question)),
        host_limit=host_limit_of(question),
        repeats=question.repeats,
    )
    return _restricted(question, instance)


def stretched(question: Question, annotated: Graph, folded: Instance) -> Instance:
    """The instance whose equal layers are tied only within stretches of depth, as wide as ``folded``."""
    instance = posed(question, annotated, folded.prices, STRETCHES)
    return widest(question, instance) if folded.is_wide else instance


def widest(question: Question, instance: Instance) -> Instance:
    """The instance with recomputation and offload, if the options leave them and they are not yet in it."""
    if not may_widen(question.options, instance):
        return instance
    return _restricted(question, widened(instance, question.options))


def _restricted(question: Question, instance: Instance) -> Instance:
    """With only the choices that the options leave."""
    stage, free = question.options.zero, instance
    if stage is not None:
        instance = with_choices(instance, zero_allows(instance, stage), gathers=stage == 3)
    return pin_instance(instance, question.options.pins, free, "" if stage is None else f"Options(zero={stage})")
