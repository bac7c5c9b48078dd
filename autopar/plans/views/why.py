"""Explains why a plan places a parameter, module or node as it does: the choice, who made it, what it costs, and what
alternatives would cost.
"""

from __future__ import annotations

import fnmatch
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from autopar.errors import OptionsError
from autopar.ir.assignment import ParameterPlacement
from autopar.ir.module_paths import did_you_mean
from autopar.ir.node import SAVED_ACTIVATION
from autopar.ir.placements import NOT, short
from autopar.ir.plan_record import Alternatives, PlanLine, PlanRecord

from .columns import columns
from .forbidden import Forbidden
from .module_tree import numbers, optimizer_text
from .page_width import page_width
from .quantities import clip, duration, signed_duration, signed_size, size
from .why_costs import Cost, held_bytes, line_costs
from .why_stage import is_stage_pin, sent_reasons, stage_reason

Provenance = Literal["user", "tied", "price", "only"]


@dataclass(frozen=True)
class Explanation:
    """The result of :meth:`autopar.plans.plan.Plan.why`; ``str`` is a table.

    ``choice`` maps what was chosen (``weight``, ``gradient``, ``optimizer``; ``output``; ``inputs``) to its placements.
    ``provenance`` says who chose: "user", by a pin; "price"; "tied", price for all layers that share one choice;
    "only", nobody, because there is only one possibility. ``reason`` says it in words. ``alternatives`` are None where
    there is no choice; they change ``together`` nodes. ``costs`` are those of the choice. With pipeline stages,
    ``stage`` says which stage it is on and why, and ``sent`` how its value is sent to other stages. ``forbidden`` is
    the plan solved again without the choice, where that was asked for.
    """

    name: str
    kind: Literal["parameter", "module", "node"]
    about: str
    axis_names: tuple[str, ...]
    choice: Mapping[str, str]
    provenance: Provenance
    reason: str
    costs: tuple[Cost, ...]
    alternatives: Alternatives | None
    together: int
    step_seconds: float
    spare_bytes: int
    parameters: Mapping[str, str] = field(default_factory=dict)
    stage: str = ""
    sent: tuple[str, ...] = ()
    forbidden: Forbidden | None = None

    def __str__(self) -> str:
        return "\n".join(line.rstrip() for line in self._lines())

    def _lines(self) -> Iterator[str]:
        yield clip(f"{self.kind}  {self.name}   {self.about}", page_width())
        names = f"({','.join(self.axis_names)})"
        for position, (what, place) in enumerate(self.choice.items()):
            yield f"  {what:<11}{place}" + (f"   placements read {names}" if position == 0 else "")
        for position, text in enumerate(textwrap.wrap(self.reason, page_width() - 13)):
            yield f"  {'chosen by' if position == 0 else '':<11}{text}"
        if self.stage:
            yield f"  {'stage':<11}{self.stage}"
        for position, text in enumerate(self.sent):
            yield f"  {'sent' if position == 0 else '':<11}{text}"
        room = page_width() - 40
        for path, place in self.parameters.items():
            yield f"  {'holds' if path == next(iter(self.parameters)) else '':<11}{clip(path, room):<{room}} {place}"
        yield from (f"  {line}" for line in self._cost_lines())
        yield from (f"  {line}" for line in self._alternative_lines())
        if self.forbidden is not None:
            yield from (f"  {line}" for line in self.forbidden.lines(self.step_seconds))

    def _cost_lines(self) -> Iterator[str]:
        if not self.costs:
            yield f"{'costs':<11}nothing: no time in a step and no memory that rests"
        rows = [
            (
                "costs" if i == 0 else "",
                cost.what,
                cost.detail,
                duration(cost.seconds) if cost.seconds else size(cost.bytes),
            )
            for i, cost in enumerate(self.costs)
        ]
        for lead, *cells in rows:
            what, detail, figure = cells
            room = page_width() - 38
            yield f"{lead:<11}{what:<12}{clip(detail, room):<{room}} {figure:>10}"

    def _alternative_lines(self) -> Iterator[str]:
        if self.alternatives is None:
            return
        alternatives = self.alternatives
        if not alternatives.possible:
            pinned = (
                "the pin leaves no other choice"
                if self.provenance == "user"
                else "every other choice needs its neighbours to change too"
            )
            yield f"{'instead':<11}nothing alone: {pinned}"
            return
        impossible = f", {alternatives.impossible} not possible alone" if alternatives.impossible else ""
        count = f"{alternatives.possible} possible{impossible}"
        where = f", in all {self.together} layers" if self.together > 1 else ""
        yield f"instead{where}, neighbours as they are ({count}):"
        rows = [
            (
                f"  {other.choice}",
                signed_duration(other.seconds),
                self._relative(other.seconds),
                self._memory(other.bytes),
            )
            for other in alternatives.cheapest
        ]
        yield from columns(("  choice", "step", "", "memory"), rows, right=(1, 2))
        if alternatives.possible > len(alternatives.cheapest):
            yield f"  … {alternatives.possible - len(alternatives.cheapest)} more, dearer"

    def _relative(self, seconds: float) -> str:
        return f"{seconds / self.step_seconds:+.1%}" if self.step_seconds else ""

    def _memory(self, count: int) -> str:
        return (signed_size(count) if count else "the same") + (", does not fit" if count > self.spare_bytes else "")


def explain(plan: PlanRecord, name: str) -> Explanation:
    """``plan.why(name)``. Raises :class:`OptionsError` for an unknown name."""
    if not isinstance(name, str):
        raise OptionsError(
            f"plan.why({name!r}): give the path of a parameter or module, or the name of a node, as text"
        )
    explanation = _explained(plan, name)
    if plan.stages == 1:
        return explanation
    plain = name.removeprefix("%")
    stage = stage_reason(plan, explanation.name, explanation.kind)
    return replace(explanation, stage=stage, sent=sent_reasons(plan, plain))


def _explained(plan: PlanRecord, name: str) -> Explanation:
    plain = name.removeprefix("%")
    plain = plan.tied.get(plain, plain)
    if plain in plan.parameters:
        return _explain_parameter(plan, plain)
    if plain in plan.outputs or any(line.module == plain for line in plan.lines if plain):
        return _explain_module(plan, plain)
    if plain in plan.nodes:
        target = plan.nodes[plain].target
        return _explain_parameter(plan, target) if plan.nodes[plain].op == "param" else _explain_node(plan, plain)
    raise OptionsError(_unknown(plan, name))


def _unknown(plan: PlanRecord, name: str) -> str:
    names = list(dict.fromkeys([*plan.parameters, *plan.tied, *plan.outputs, *plan.nodes]))
    hint = did_you_mean(name, names) or "; plan.tree() shows the paths there are"
    return f"the plan knows no parameter, module or node called {name!r}{hint}"


def _explain_parameter(plan: PlanRecord, path: str) -> Explanation:
    place, node = plan.parameters[path], plan.parameter_nodes.get(path, "")
    trained = path in plan.gradient_values
    choice = {"weight": short(place.weight)}
    if trained:
        choice |= {
            "gradient": short(place.gradient),
            "optimizer": optimizer_text(place),
        }
    about = plan.nodes[node].type if node else ""
    provenance, reason = _provenance(plan, node, path)
    return Explanation(
        name=path,
        kind="parameter",
        about=about + ("" if trained else ", no gradient"),
        axis_names=plan.axis_names,
        choice=choice,
        provenance=provenance,
        reason=reason,
        costs=(*line_costs(plan, list(_parameter_lines(plan, path, node))), *held_bytes(plan, {node})),
        alternatives=plan.alternatives.get(_first(plan, node)),
        together=len(_alike(plan, node)),
        step_seconds=plan.predicted.step_seconds,
        spare_bytes=plan.memory_limit - plan.predicted.peak_bytes,
    )


def _parameter_lines(plan: PlanRecord, path: str, node: str) -> Iterator[PlanLine]:
    yield from (line for line in plan.lines_by_name.get(node, ()) if line.kind != "gradient")
    if path in plan.gradient_values:
        for value in plan.gradient_values[path].split(","):
            yield from _gradient_lines(plan, path, value.partition(".")[0])


def _gradient_lines(plan: PlanRecord, path: str, producer: str) -> Iterator[PlanLine]:
    """The lines that move the gradient of ``path``. A node may compute several gradients. Its lines are in their order,
    and gradients that already have the right placement have none."""
    moved = [path for path, node in _moved(plan) if node == producer]
    lines = [line for line in plan.lines_by_name.get(producer, ()) if line.kind == "gradient"]
    yield from (line for other, line in zip(moved, lines, strict=True) if other == path)


def _moved(plan: PlanRecord) -> Iterator[tuple[str, str]]:
    """The parameters whose gradients are computed in another placement than they rest in, each with the node that
    computes the gradient."""
    for path, values in plan.gradient_values.items():
        yield from ((path, value.partition(".")[0]) for value in values.split(",") if _is_moved(plan, path, value))


def moved_gradients(plan: PlanRecord) -> Counter[str]:
    """For each node, how many of the gradients it computes are moved to another placement."""
    return Counter(node for _, node in _moved(plan))


def _is_moved(plan: PlanRecord, path: str, value: str) -> bool:
    """Whether ``value``, the gradient of a parameter, is computed in another placement than it rests in."""
    producer, _, index = value.partition(".")
    place = _placed_where(plan, path, producer)
    if producer in plan.parameter_nodes.values():
        return plan.parameters[plan.nodes[producer].target].weight != place.gradient
    return plan.strategies[producer].outputs[int(index or 0)] != place.gradient


def _placed_where(plan: PlanRecord, path: str, producer: str) -> ParameterPlacement:
    """How the chunk that computes ``producer``, a part of a parameter's gradient, has that parameter."""
    borrowed = {} if plan.pipeline is None else plan.pipeline.borrowed
    lent = {chunk: place for (chunk, other), place in borrowed.items() if other == path}
    if not lent:
        return plan.parameters[path]
    stages = {line.stage for line in plan.lines_by_name.get(producer, ())}
    assert plan.pipeline is not None
    placement = plan.pipeline.schedule.placement
    return next((place for chunk, place in lent.items() if placement[chunk] in stages), plan.parameters[path])


def _explain_node(plan: PlanRecord, name: str) -> Explanation:
    node, strategy = plan.nodes[name], plan.strategies[name]
    choice = {"output": " ".join(map(short, strategy.outputs))}
    if strategy.inputs:
        choice["inputs"] = " ".join(map(short, strategy.inputs))
    if strategy.local:
        choice["runs as"] = strategy.local
    if node.op in plan.rules:
        choice["rule"] = plan.rules[node.op]
    provenance, reason = _provenance(plan, name, node.target or name)
    where = f" in {node.module}" if node.module else ""
    return Explanation(
        name=name,
        kind="node",
        about=f"{node.op}{f' {node.target!r}' if node.target else ''} -> {node.type}{where}",
        axis_names=plan.axis_names,
        choice=choice,
        provenance=provenance,
        reason=reason,
        costs=(*line_costs(plan, list(_node_lines(plan, name))), *held_bytes(plan, _saved(plan, name))),
        alternatives=plan.alternatives.get(_first(plan, name)),
        together=len(_alike(plan, name)),
        step_seconds=plan.predicted.step_seconds,
        spare_bytes=plan.memory_limit - plan.predicted.peak_bytes,
    )


def _saved(plan: PlanRecord, name: str) -> set[str]:
    """The node, and the nodes that save its results for backward."""
    return {name, *(saved for saved, n in plan.nodes.items() if n.op == SAVED_ACTIVATION and n.operands == (name,))}


def _node_lines(plan: PlanRecord, name: str) -> Iterator[PlanLine]:
    """The lines of the node: its computation, the reshards of its results, and those of its operands."""
    yield from plan.lines_by_name.get(name, ())
    needs = {short(place) for place in plan.strategies[name].inputs}
    for operand in plan.nodes[name].operands:
        for line in plan.lines_by_name.get(operand, ()):
            if line.kind in ("reshard", "weight") and line.steps[-1].target in needs:
                yield line


def _explain_module(plan: PlanRecord, path: str) -> Explanation:
    node = plan.module_nodes.get(path, "")
    inside = {name for name, n in plan.nodes.items() if _within(n.module, path) or _within(n.target, path)}
    parameters = {p: short(place.weight) for p, place in plan.parameters.items() if _within(p, path)}
    shown = dict(list(parameters.items())[:8])
    if len(parameters) > len(shown):
        shown[f"… {len(parameters) - len(shown)} more parameters"] = ""
    provenance, reason = _provenance(plan, node, path)
    lines = [line for line in plan.lines if _within(line.module, path) or line.name in inside]
    return Explanation(
        name=path,
        kind="module",
        about=f"output made by {plan.nodes[node].op} -> {plan.nodes[node].type}" if node else "",
        axis_names=plan.axis_names,
        choice={"output": short(plan.outputs[path])} if path in plan.outputs else {},
        provenance=provenance,
        reason=reason,
        costs=(*line_costs(plan, lines), *held_bytes(plan, inside)),
        alternatives=plan.alternatives.get(_first(plan, node)),
        together=len(_alike(plan, node)),
        step_seconds=plan.predicted.step_seconds,
        spare_bytes=plan.memory_limit - plan.predicted.peak_bytes,
        parameters=shown,
    )


def _within(path: str, module: str) -> bool:
    return path == module or path.startswith(f"{module}.")


def _first(plan: PlanRecord, node: str) -> str:
    return (plan.nodes[node].tied or node) if node in plan.nodes else node


def _alike(plan: PlanRecord, node: str) -> list[str]:
    """The nodes that share the choice of ``node``, itself included."""
    return list(plan.alike.get(_first(plan, node), ()))


def _provenance(plan: PlanRecord, node: str, path: str) -> tuple[Provenance, str]:
    """Who chose for ``node``, and the reason in words. ``path`` names it for people."""
    first, alike = _first(plan, node), _alike(plan, node)
    for pattern, text in plan.pinned.items():
        for name in () if is_stage_pin(text) or text.lstrip().startswith(NOT) else alike:
            pinned = next((p for p in _paths(plan, name) if fnmatch.fnmatchcase(p, pattern)), None)
            if pinned is not None:
                also = "" if name == node else f", which fixes {pinned} and so all {len(alike)} of its kind"
                return "user", f"the user: pin {pattern!r}: {text!r}{also}"
    alternatives = plan.alternatives.get(first)
    if alternatives is None:
        op = plan.nodes[node].op if node in plan.nodes else ""
        reason = plan.rules.get(op, "").removeprefix("fallback").removeprefix(": ")
        fallback = f": {op} has no sharding rule" + (f" ({reason})" if reason else "") if op in plan.fallbacks else ""
        return "only", f"nobody: there is only one way{fallback}"
    under = f" under the layout {plan.layout}" if plan.layout else ""
    if len(alike) > 1:
        places = _layers(path, plan, alike)
        return "tied", f"price{under}, one choice for the same place in {len(alike)} layers: {places}"
    return "price", f"price: the cheapest step of all{under} within memory"


def _paths(plan: PlanRecord, name: str) -> list[str]:
    """The paths by which a pin may name a node: those of its parameter, or those of the modules whose output it
    computes."""
    if plan.nodes[name].op == "param":
        target = plan.nodes[name].target
        return [target, *(alias for alias, own in plan.tied.items() if own == target)]
    return [path for path, node in plan.module_nodes.items() if node == name]


def _layers(path: str, plan: PlanRecord, alike: list[str]) -> str:
    """``h.{0..11}.attn``: ``path`` with the numbers of all tied layers."""
    places = [(plan.nodes[name].target or plan.nodes[name].module).split(".") for name in alike]
    depth = next((i for i, part in enumerate(places[0]) if part.isdigit()), len(places[0]))
    layers = list(dict.fromkeys(place[depth] for place in places if len(place) > depth))
    if not layers or not all(layer.isdigit() for layer in layers):
        return path
    return ".".join([*places[0][:depth], numbers(layers), *path.split(".")[depth + 1 :]])
