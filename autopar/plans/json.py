"""Plans as JSON: placements in short form, strategies in a table, exact numbers."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

from autopar.errors import AutoparError, OptionsError
from autopar.ir.assignment import ParameterPlacement
from autopar.ir.module_paths import did_you_mean
from autopar.ir.node import SAVED_ACTIVATION, SAVED_ACTIVATION_BEFORE
from autopar.ir.placements import Placements, Strategy, parse_placements, short
from autopar.ir.plan_record import (
    Alternative,
    Alternatives,
    PlanLine,
    PlanNode,
    PlanRecord,
    Predicted,
    ReshardStep,
    ResidentTensor,
)
from autopar.ir.planned_sync import PlannedSync
from autopar.ir.searched import Searched
from autopar.offload import tier_of

from .as_written import DEFAULTS, DIGESTS, check_as_written, digests
from .folded_tables import folded, unfolded
from .pipeline_json import pipeline_from_data, pipeline_to_data

# Of the file's form: raised by hand when a reader of the old one would misread the new one.
VERSION = 8
# Version 7 had another name for the operation that saves an activation.
READABLE = (7, VERSION)
# Of JSON in which the tables that grow with depth are folded (:mod:`.folded_tables`). Unfolded, it is version 8.
FOLDED, _FOLDED = 9, ("nodes", "lines")
_STRINGS = ("model", "cluster", "cluster_source", "graph_hash", "precision")
_NUMBERS = ("objective", "bound", "gap", "solve_seconds")
_COUNTS = ("batch", "memory_limit", "stages", "microbatches")
_NAMES = ("pinned", "module_nodes", "gradient_values", "rules")
_OTHERS = ("mesh", "axis_names", "status", "fallbacks", "warnings", "timings", "schedule", "recomputed")
_PLAIN = (*_STRINGS, *_COUNTS, *_NUMBERS, *_OTHERS, *_NAMES)
_TABLES = ("predicted", "baselines", "parameters", "outputs", "strategy_table", "strategies", "nodes", "alternatives")
_DEVICES = ("device_peaks", "device_limits")
_OPTIONAL = ("layout", "tied", "offloaded", "excluded", *_DEVICES)
_RECORDS = ("holdings", "lines", "pipeline", "sync", "searched")
_KNOWN = ("version", *_PLAIN, *_TABLES, *_RECORDS, *_OPTIONAL, *DEFAULTS, DIGESTS)


def plan_to_json(plan: PlanRecord) -> str:
    """``plan.to_json()``: strict JSON (numbers that are not finite as strings), indented, each entry of a table on one
    line."""
    whole = plan_to_dict(plan)
    data = {**folded(whole), "version": FOLDED, DIGESTS: digests(whole)}
    entries = (f"  {json.dumps(name)}: {_indented(value, name in _FOLDED)}" for name, value in data.items())
    return "{\n" + ",\n".join(entries) + "\n}"


def _indented(value: Any, is_folded: bool = False) -> str:
    """A field as JSON, with each entry of a table on a line of its own. An entry is not broken into lines: a plan would
    have ten times as many. A folded field has several tables."""
    if is_folded:
        return "{" + ", ".join(f"{json.dumps(name)}: {_indented(table)}" for name, table in value.items()) + "}"
    if isinstance(value, dict) and value:
        rows = [f"{json.dumps(name)}: {json.dumps(item, allow_nan=False)}" for name, item in value.items()]
        return "{\n    " + ",\n    ".join(rows) + "\n  }"
    if isinstance(value, (list, tuple)) and any(isinstance(item, (list, str)) for item in value):
        return "[\n    " + ",\n    ".join(json.dumps(item, allow_nan=False) for item in value) + "\n  ]"
    return json.dumps(value, allow_nan=False)


def fields_from_json(text: str) -> dict[str, Any]:
    """The fields of the plan that :func:`plan_to_json` wrote. Raises :class:`OptionsError`."""
    try:
        data = json.loads(text, object_pairs_hook=without_repeats)
    except (ValueError, TypeError, RecursionError) as error:
        path = str(text).endswith(".json") and "\n" not in str(text)
        hint = f"; {text!r} looks like a path: autopar.Plan.load({text!r}) reads the file" if path else ""
        raise OptionsError(f"this is not a plan: it does not parse as JSON, or is cut off ({error}){hint}") from error
    return fields_from_dict(_whole(data))


def _whole(data: Any) -> Any:
    """The plan's data with the tables of version 9 unfolded. Raises :class:`OptionsError` if they are not tables."""
    if not isinstance(data, dict) or data.get("version") != FOLDED:
        return data
    try:
        return {**unfolded(data), "version": VERSION}
    except KeyError as error:
        raise OptionsError(f"this is not a whole plan: {error} is missing") from error
    except (ValueError, TypeError, IndexError, AttributeError) as error:
        raise OptionsError(f"this is not a plan that autopar wrote: {type(error).__name__}: {error}") from error


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Raises ``ValueError`` for a name that is there twice; ``json`` would silently keep the last."""
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is there twice")
    return table


def plan_to_dict(plan: PlanRecord) -> dict[str, Any]:
    """The plan as plain data: dicts, lists, strings and numbers that JSON can hold."""
    data: dict[str, Any] = {"version": VERSION} | {name: getattr(plan, name) for name in _PLAIN}
    data |= {name: _number(getattr(plan, name)) for name in _NUMBERS}
    data["predicted"] = plan.predicted.to_dict()
    data["baselines"] = {name: p and p.to_dict() for name, p in plan.baselines.items()}
    data["parameters"] = {
        path: [short(p.weight), short(p.gradient), short(p.optimizer), _tier_data(p.offload)]
        for path, p in plan.parameters.items()
    }
    data["outputs"] = {path: short(p) for path, p in plan.outputs.items()}
    table = {strategy: i for i, strategy in enumerate(dict.fromkeys(plan.strategies.values()))}
    data["strategy_table"] = [_strategy_data(strategy) for strategy in table]
    data["strategies"] = {name: table[strategy] for name, strategy in plan.strategies.items()}
    data["nodes"] = {
        name: [n.op, n.type, n.module, n.target, list(n.operands), n.tied] for name, n in plan.nodes.items()
    }
    data["alternatives"] = {
        name: [a.possible, a.impossible, [[c.choice, c.seconds, c.bytes] for c in a.cheapest]]
        for name, a in plan.alternatives.items()
    }
    data["holdings"] = [[h.kind, h.name, h.module, h.bytes] for h in plan.holdings]
    data["lines"] = [_line_data(line) for line in plan.lines]
    data["pipeline"] = plan.pipeline and pipeline_to_data(plan.pipeline)
    # Only where there is something, as most plans have none of these.
    data |= {name: value for name in _OPTIONAL if (value := getattr(plan, name))}
    data |= {name: value for name, usual in DEFAULTS.items() if (value := getattr(plan, name)) != usual}
    records = {"sync": plan.sync, "searched": plan.searched}
    return data | {name: asdict(record) for name, record in records.items() if record is not None}


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _strategy_data(strategy: Strategy) -> list[Any]:
    return [[short(p) for p in strategy.inputs], [short(p) for p in strategy.outputs], strategy.local]


def _line_data(line: PlanLine) -> list[Any]:
    steps = [[s.kind, list(s.axes), s.source, s.target, s.bytes] for s in line.steps]
    return [line.kind, line.name, line.module, line.phase, line.seconds, steps, line.times, line.stage]


def fields_from_dict(data: Any) -> dict[str, Any]:
    """The fields of the plan that :func:`plan_to_dict` wrote as ``data``.

    Raises:
        OptionsError: names what is missing, of the wrong kind or not as it was written, or the version that wrote it.
    """
    if not isinstance(data, dict) or "version" not in data:
        raise OptionsError("this is not a plan: it has no version, as what Plan.to_json() writes has")
    if data["version"] not in READABLE:
        raise OptionsError(
            f"this plan has format version {data['version']!r}, but this autopar reads versions "
            f"{', '.join(map(str, (*READABLE, FOLDED)))}; plan the model again"
        )
    unknown = [name for name in data if name not in _KNOWN]
    if unknown:
        raise OptionsError(f"a plan has no field {unknown[0]!r}{did_you_mean(unknown[0], _KNOWN)}")
    check_as_written(data)
    try:
        return _fields(data)
    except KeyError as error:
        raise OptionsError(f"this is not a whole plan: {error} is missing") from error
    except (ValueError, TypeError, IndexError, AttributeError, OverflowError, RecursionError, AutoparError) as error:
        reason = str(error) if isinstance(error, AutoparError) else f"{type(error).__name__}: {error}"
        raise OptionsError(f"this is not a plan that autopar wrote: {reason}") from error


def _tier_data(tier: str) -> bool | str:
    """A tier; of host memory alone as earlier versions of autopar read it."""
    return tier == "host" if tier in ("", "host") else tier


def _fields(data: dict[str, Any]) -> dict[str, Any]:
    mesh = tuple(_count(n) for n in data["mesh"])

    def places(text: str) -> Placements:
        placements = parse_placements(text)
        if len(placements) != len(mesh):
            raise ValueError(f"{text!r} has {len(placements)} placements on the mesh {mesh}")
        return placements

    fields: dict[str, Any] = {name: data[name] for name in _PLAIN} | {"mesh": mesh}
    fields |= {name: tuple(map(_string, data[name])) for name in ("axis_names", "fallbacks", "warnings", "recomputed")}
    fields |= {name: _string(data[name]) for name in _STRINGS}
    fields |= {name: float(data[name]) for name in _NUMBERS} | {name: _count(data[name]) for name in _COUNTS}
    fields |= {name: {_string(k): _string(v) for k, v in data[name].items()} for name in _NAMES}
    fields["timings"] = {name: float(seconds) for name, seconds in data["timings"].items()}
    fields["predicted"] = Predicted(**data["predicted"])
    fields["baselines"] = {name: p and Predicted(**p) for name, p in data["baselines"].items()}
    fields["parameters"] = {
        path: ParameterPlacement(places(weight), places(gradient), places(optimizer), tier_of(offload))
        for path, (weight, gradient, optimizer, offload) in data["parameters"].items()
    }
    fields["outputs"] = {path: places(p) for path, p in data["outputs"].items()}
    fields |= _node_fields(data, [_strategy(item, places) for item in data["strategy_table"]])
    fields["holdings"] = tuple(
        ResidentTensor(kind, name, module, _count(n)) for kind, name, module, n in data["holdings"]
    )
    fields["lines"] = _lines(data["lines"])
    fields["layout"] = _string(data.get("layout", ""))
    fields["tied"] = {_string(k): _string(v) for k, v in data.get("tied", {}).items()}
    fields["excluded"] = {_string(k): _string(v) for k, v in data.get("excluded", {}).items()}
    fields["sync"] = PlannedSync(**data["sync"]) if "sync" in data else None
    fields["searched"] = Searched.of(data["searched"]) if "searched" in data else None
    fields["offloaded"] = tuple(map(_string, data.get("offloaded", ())))
    fields |= {name: tuple(map(_count, data.get(name, ()))) for name in _DEVICES}
    fields |= {name: data.get(name, usual) for name, usual in DEFAULTS.items()}
    fields["pipeline"] = data["pipeline"] and pipeline_from_data(data["pipeline"], places)
    if data["status"] not in ("optimal", "feasible", "fallback") or len(fields["axis_names"]) != len(mesh):
        raise ValueError(f"status {data['status']!r} with axes {fields['axis_names']} of mesh {mesh}")
    return fields


def _node_fields(data: dict[str, Any], table: list[Strategy]) -> dict[str, Any]:
    return {
        "strategies": {name: table[_count(i)] for name, i in data["strategies"].items()},
        "nodes": {
            name: PlanNode(_current_op(op), kind, module, target, tuple(operands), tied)
            for name, (op, kind, module, target, operands, tied) in data["nodes"].items()
        },
        "alternatives": {
            name: Alternatives(
                tuple(Alternative(_string(c), float(s), int(b)) for c, s, b in cheapest), possible, impossible
            )
            for name, (possible, impossible, cheapest) in data["alternatives"].items()
        },
    }


def _current_op(op: str) -> str:
    return SAVED_ACTIVATION if op == SAVED_ACTIVATION_BEFORE else op


def _strategy(data: Any, places: Any) -> Strategy:
    inputs, outputs, local = data
    return Strategy(tuple(map(places, inputs)), tuple(map(places, outputs)), _string(local))


def _lines(rows: Any) -> tuple[PlanLine, ...]:
    """The lines. Those that share the list of their steps share the steps."""
    lists = {id(steps): steps for _, _, _, _, _, steps, _, _ in rows}
    hops = {key: tuple(map(_step, steps)) for key, steps in lists.items()}
    return tuple(_line(row, hops[id(row[5])]) for row in rows)


def _step(data: Any) -> ReshardStep:
    kind, axes, source, target, count = data
    return ReshardStep(kind, tuple(map(_count, axes)), source, target, _count(count))


def _line(data: Any, hops: tuple[ReshardStep, ...]) -> PlanLine:
    kind, name, module, phase, seconds, _, times, stage = data
    kind, name, module, phase = map(_string, (kind, name, module, phase))
    return PlanLine(
        kind=kind,
        name=name,
        module=module,
        phase=phase,
        seconds=float(seconds),
        steps=hops,
        times=_count(times),
        stage=_count(stage),
    )


def _string(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError(f"{value!r} is not a count")
    return value
