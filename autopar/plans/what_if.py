"""Solves a plan's question again under other circumstances: :meth:`autopar.plans.plan.Plan.whatif`.

Each answer is what :func:`autopar.plan` returns for the changed question. What stays the same is computed once: the
trace of the model, its annotated graph, its prices and programs, and what memory does not limit. Of placements, those
that are found for one limit of memory and fit into a smaller one are not sought again: for that, a plan by itself may
find others, which take longer or are as quick within the gap. And what is found for a smaller limit and is quicker is
the answer for a larger one (:mod:`.within_limits`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from autopar.byte_sizes import bytes_of, parse_bytes
from autopar.cluster.description import Cluster
from autopar.errors import AutoparError, OptionsError
from autopar.ir.plan_record import PlanRecord
from autopar.plans.views.what_if import Answer, Sweep, WhatIf, in_order
from autopar.progress import shown

from .question import Question, question_of, remember
from .within_limits import quickest_within

# Parts of the plan's own peak that are asked if nothing is said. Chosen: less memory than half makes most models
# recompute or shard more.
PARTS_OF_PEAK = (1.0, 0.8, 0.6, 0.45, 0.35, 0.25)
# Multiples of its devices. Chosen: clusters grow by doubling.
MULTIPLES = (0.5, 1.0, 2.0, 4.0)


def what_if(plan: PlanRecord, asked: Mapping[Sweep, Sequence[Any] | None]) -> WhatIf[Any]:
    """``plan.whatif(**asked)``. Raises :class:`OptionsError` for values that are none, and for a plan whose model is
    not known."""
    question = question_of(plan)
    wanted = {sweep: _values(sweep, values) for sweep, values in asked.items() if values is not None}
    for precision in wanted.get("precision", ()):
        replace(question.options, precision=precision)  # Checks it.
    for cluster in wanted.get("cluster", ()):
        Cluster.get(cluster)
    if not wanted:
        wanted = dict(_unasked(plan, question))
    written = _written(asked.get("memory_limit"))
    answers: list[Answer[Any]] = []
    work = question.begin()
    for sweep, values in wanted.items():
        # What is found with much memory may do with less.
        falling = sorted(values, reverse=True) if sweep == "memory_limit" else values
        solved = [_answer(question, sweep, value, work) for value in falling]
        if sweep == "memory_limit":
            solved = [replace(answer, written=written.get(answer.amount, "")) for answer in solved]
            solved = _with_quickest(plan, question, solved)
        answers += in_order(solved)
    return WhatIf(plan, tuple(answers))


def _with_quickest(plan: PlanRecord, question: Question, solved: Sequence[Answer[Any]]) -> list[Answer[Any]]:
    """Answers for several limits of memory, each with the quickest of the plans that fits it."""
    options, cluster = question.options, Cluster.get(question.arguments["cluster"] or "local")
    found = quickest_within(solved, plan, options.gap, alone_first=cluster.sharing > 1)
    for before, answer in zip(solved, found, strict=True):
        if answer.plan is not None and answer.plan is not before.plan:
            arguments = {**question.arguments, "options": replace(options, memory_limit=answer.value)}
            remember(answer.plan, replace(question, arguments=arguments))
    return found


def _unasked(plan: PlanRecord, question: Question) -> Iterator[tuple[Sweep, tuple[Any, ...]]]:
    yield "memory_limit", tuple(math.ceil(part * plan.predicted.peak_bytes) for part in PARTS_OF_PEAK)
    devices = math.prod(question.shape)
    yield "devices", tuple(int(devices * times) for times in MULTIPLES if (devices * times).is_integer())


def _values(sweep: Sweep, values: Any) -> tuple[Any, ...]:
    """The values of one sweep, each once. Raises :class:`OptionsError` for what cannot be asked."""
    given = _listed(values)
    if sweep == "memory_limit":
        given = tuple(bytes_of(value, sweep) for value in given)
    if not given:
        raise OptionsError(f"{sweep}={values!r} asks nothing: give at least one value, or leave it out")
    for value in given:
        if sweep == "batch" and not _is_positive(value):
            raise OptionsError(f"batch={value!r} is not a positive whole number of samples")
        if sweep == "devices" and not all(map(_is_positive, value if isinstance(value, (tuple, list)) else (value,))):
            raise OptionsError(f"devices={value!r} is neither a number of devices nor a shape such as (2, 8)")
    if sweep == "devices":
        given = tuple(tuple(value) if isinstance(value, list) else value for value in given)
    return tuple(value for i, value in enumerate(given) if value not in given[:i])


def _listed(values: Any) -> tuple[Any, ...]:
    return tuple(values) if isinstance(values, (list, tuple, range)) else (values,)


def _written(values: Any) -> dict[int, str]:
    """Bytes that were given as text, and how they were written first."""
    texts = [text.strip() for text in _listed(values) if isinstance(text, str)]
    return {parse_bytes(text): text for text in reversed(texts)}


def _is_positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _answer(question: Question, sweep: Sweep, value: Any, work: Any) -> Answer[Any]:
    amount = math.prod(value) if isinstance(value, tuple) else value if isinstance(value, int) else 0
    named = value.name if isinstance(value, Cluster) else value
    answer = partial(Answer, sweep, named, amount)
    try:
        with shown(f"what if {sweep}={named}"):
            return answer(_solved(question, sweep, value, work))
    except AutoparError as error:
        return answer(None, str(error), needed_bytes=getattr(error, "needed_bytes", None))


def _solved(question: Question, sweep: Sweep, value: Any, work: Any) -> Any:
    """The plan for the changed question. Raises what :func:`autopar.plan` raises."""
    match sweep:
        case "memory_limit" | "precision":
            return question.again(options=replace(question.options, **{sweep: value}), work=work)
        case "devices":
            return question.again(mesh=question.mesh_of(value) if isinstance(value, int) else value, work=work)
        case "batch":
            return question.again(samples=value, work=work)
        case "cluster":
            return question.again(cluster=value, work=work)
