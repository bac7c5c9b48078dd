"""The fields of a plan from the plain data that :func:`autopar.plans.json.plan_to_dict` wrote."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from autopar.errors import OptionsError
from autopar.ir.assignment import ParameterPlacement
from autopar.ir.module_paths import did_you_mean
from autopar.ir.node import SAVED_ACTIVATION, SAVED_ACTIVATION_BEFORE
from autopar.ir.placements import Placements, Strategy, parse_placements
from autopar.ir.plan_record import (
    Alternative,
    Alternatives,
    PlanLine,
    PlanNode,
    Predicted,
    ReshardStep,
    ResidentTensor,
)
from autopar.ir.planned_sync import PlannedSync
from autopar.ir.searched import Searched, TriedDivision
from autopar.offload import tier_of

from .as_written import DEFAULTS, DIGESTS, check_as_written, is_edited
from .entries import count, counts, number, one, record, rows, shown, table, text, texts, whole
from .format import (
    COUNTS,
    DEVICES,
    LISTS,
    NAMES,
    NUMBERS,
    OPTIONAL,
    READABLE,
    RECORDS,
    REQUIRED,
    STRINGS,
    UNFOLDED,
)
from .pipeline_json import pipeline_from_data

_KNOWN = ("version", *REQUIRED, *OPTIONAL, *RECORDS, *DEFAULTS, DIGESTS)
_STATUS = ("optimal", "feasible", "fallback")
_EDITED = "its placements were edited: status, gap, seconds and what is said of alternatives are the solved plan's"
_PLACES = "placements such as (R,S(0))"
_Places = Callable[[str], Placements]
_Fields = dict[str, Any]


def fields_from_dict(data: Any) -> _Fields:
    """The fields of the plan that ``plan_to_dict`` wrote as ``data``.

    Raises:
        OptionsError: names what is missing, of the wrong kind or not as it was written, or the version that wrote it.
    """
    if not isinstance(data, Mapping) or "version" not in data:
        raise OptionsError("this is not a plan: it has no version, as what Plan.to_json() writes has")
    version = data["version"]
    if type(version) is not int or version not in READABLE:
        versions = ", ".join(map(str, sorted({*READABLE, *UNFOLDED})))
        raise OptionsError(
            f"this plan has format version {shown(version)}, but this autopar reads versions {versions}; plan the "
            "model again"
        )
    unknown = [name for name in data if name not in _KNOWN]
    if unknown:
        raise OptionsError(f"a plan has no field {unknown[0]!r}{did_you_mean(unknown[0], _KNOWN)}")
    missing = [name for name in REQUIRED if name not in data]
    if missing:
        raise OptionsError(f"this is not a whole plan: {missing[0]!r} is missing")
    try:
        check_as_written(data)
        return _fields(data)
    except OptionsError as error:
        raise OptionsError(f"this is not a plan that autopar wrote: {error}") from error


def _fields(data: Mapping[str, Any]) -> _Fields:
    mesh = counts("mesh", data["mesh"])

    def places(written: str) -> Placements:
        placements = parse_placements(written)
        if len(placements) != len(mesh):
            raise OptionsError(f"{written!r} has {len(placements)} placements on the mesh {mesh}")
        return placements

    fields = {"mesh": mesh, **_settings(data), **_choices(data, places), **_figures(data)}
    pipeline = data["pipeline"]
    fields["pipeline"] = None if pipeline is None else pipeline_from_data(pipeline, places)
    if data["status"] not in _STATUS:
        raise OptionsError(f"status is {shown(data['status'])}, not one of {', '.join(_STATUS)}")
    if len(fields["axis_names"]) != len(mesh):
        raise OptionsError(f"axis_names are {list(fields['axis_names'])}, of the mesh {mesh}")
    return fields


def _settings(data: Mapping[str, Any]) -> _Fields:
    """What the plan was made for, and with what result."""
    fields: _Fields = {name: data[name] for name in ("status", "schedule")}
    fields |= {name: one(name, data[name], "a text", text) for name in STRINGS}
    fields |= {name: one(name, data[name], "a number", number) for name in NUMBERS}
    fields |= {name: one(name, data[name], "a count", count) for name in COUNTS}
    fields |= {name: table(name, data[name], "a text", text) for name in NAMES}
    fields |= {name: texts(name, data[name]) for name in LISTS}
    fields["warnings"] += (_EDITED,) if is_edited(data) and _EDITED not in fields["warnings"] else ()
    fields |= {name: counts(name, data.get(name, ())) for name in DEVICES}
    fields |= {name: data.get(name, usual) for name, usual in DEFAULTS.items()}
    fields["layout"] = one("layout", data.get("layout", ""), "a text", text)
    fields |= {name: table(name, data.get(name, {}), "a text", text) for name in ("tied", "excluded")}
    return fields


def _choices(data: Mapping[str, Any], places: _Places) -> _Fields:
    def resting(row: Any) -> ParameterPlacement:
        weight, gradient, optimizer, offload = row
        return ParameterPlacement(places(weight), places(gradient), places(optimizer), tier_of(offload))

    def strategy(row: Any) -> Strategy:
        inputs, outputs, local = row
        return Strategy(tuple(map(places, inputs)), tuple(map(places, outputs)), text(local))

    form = "[weight, gradient, optimizer state, where the state rests]"
    known = rows("strategy_table", data["strategy_table"], "[inputs, outputs, local operation]", strategy)
    number_of = f"the number of an entry of strategy_table, which has {len(known)}"
    return {
        "parameters": table("parameters", data["parameters"], form, resting),
        "outputs": table("outputs", data["outputs"], _PLACES, places),
        "strategies": table("strategies", data["strategies"], number_of, lambda at: known[count(at)]),
        "nodes": table("nodes", data["nodes"], "[operation, types, module, target, operands, tied to]", _node),
        "offloaded": texts("offloaded", data.get("offloaded", ())),
    }


def _figures(data: Mapping[str, Any]) -> _Fields:
    return {
        "timings": table("timings", data["timings"], "a number of seconds", number),
        "predicted": record("predicted", data["predicted"], Predicted),
        "baselines": table("baselines", data["baselines"], "a table", _baseline),
        "alternatives": table("alternatives", data["alternatives"], _ALTERNATIVES, _alternatives),
        "holdings": rows("holdings", data["holdings"], "[kind, name, module, bytes]", _holding),
        "lines": _lines(data["lines"]),
        "sync": record("sync", data["sync"], PlannedSync) if "sync" in data else None,
        "searched": _searched(data["searched"]) if "searched" in data else None,
    }


def _baseline(row: Any) -> Predicted | None:
    return None if row is None else record("", row, Predicted)


def _searched(data: Any) -> Searched:
    found = record("searched", data, Searched)
    tried = rows("searched.tried", found.tried, "a table", lambda row: record("", row, TriedDivision))
    return replace(found, tried=tried)


def _node(row: Any) -> PlanNode:
    op, kind, module, target, operands, tied = row
    op = SAVED_ACTIVATION if op == SAVED_ACTIVATION_BEFORE else op
    if not isinstance(operands, (list, tuple)):
        raise TypeError
    return PlanNode(op, kind, module, target, tuple(operands), tied)


_ALTERNATIVES = "[possible, impossible, [[choice, seconds, bytes], ...]]"


def _alternatives(row: Any) -> Alternatives:
    possible, impossible, cheapest = row
    choices = (Alternative(text(choice), number(seconds), whole(size)) for choice, seconds, size in cheapest)
    return Alternatives(tuple(choices), count(possible), count(impossible))


def _holding(row: Any) -> ResidentTensor:
    kind, name, module, size = row
    return ResidentTensor(kind, name, module, count(size))


def _lines(written: Any) -> tuple[PlanLine, ...]:
    """The lines. Those that share the list of their steps share the steps."""
    read: dict[int, tuple[ReshardStep, ...]] = {}

    def line(row: Any) -> PlanLine:
        kind, name, module, phase, seconds, steps, times, stage = row
        if id(steps) not in read:
            read[id(steps)] = rows("its steps", steps, "[kind, axes, source, target, bytes]", _step)
        return PlanLine(
            kind=text(kind),
            name=text(name),
            module=text(module),
            phase=text(phase),
            seconds=number(seconds),
            steps=read[id(steps)],
            times=count(times),
            stage=count(stage),
        )

    return rows("lines", written, "[kind, name, module, phase, seconds, steps, times, stage]", line)


def _step(row: Any) -> ReshardStep:
    kind, axes, source, target, size = row
    return ReshardStep(kind, tuple(map(count, axes)), text(source), text(target), count(size))
