"""Plans as JSON: placements in short form, strategies in a table, exact numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from autopar.errors import OptionsError
from autopar.ir.placements import Strategy, short
from autopar.ir.plan_record import PlanLine, PlanRecord

from .as_written import DEFAULTS, signed
from .folded_tables import folded, unfolded
from .format import FOLDED, NUMBERS, OPTIONAL, PLAIN, UNFOLDED, VERSION
from .pipeline_json import pipeline_to_data

# What some editors begin a file with.
BYTE_ORDER_MARK = "\ufeff"
_FOLDED = ("nodes", "lines")
_ENCODER = json.JSONEncoder(allow_nan=False)


def plan_to_json(plan: PlanRecord) -> str:
    """``plan.to_json()``: strict JSON (numbers that are not finite as strings), indented, each entry of a table on one
    line."""
    data = {**folded(plan_to_dict(plan)), "version": FOLDED}
    entries = (f"  {_text(name)}: {_indented(value, name in _FOLDED)}" for name, value in data.items())
    return "{\n" + ",\n".join(entries) + "\n}"


def _indented(value: Any, is_folded: bool = False) -> str:
    """A field as JSON, with each entry of a table on a line of its own. An entry is not broken into lines: a plan would
    have ten times as many. A folded field has several tables."""
    if is_folded:
        return "{" + ", ".join(f"{_text(name)}: {_indented(table)}" for name, table in value.items()) + "}"
    if isinstance(value, dict) and value:
        rows = [f"{_text(name)}: {_text(item)}" for name, item in value.items()]
        return "{\n    " + ",\n    ".join(rows) + "\n  }"
    if isinstance(value, (list, tuple)) and any(isinstance(item, (list, str)) for item in value):
        return "[\n    " + ",\n    ".join(map(_text, value)) + "\n  ]"
    return _text(value)


def _text(value: Any) -> str:
    """A value as JSON on one line."""
    # The encoder is slow to begin with, and a plan has a number for each operation.
    return str(value) if type(value) is int else _ENCODER.encode(value)


def data_from_json(text: str) -> Any:
    """The data of the plan that :func:`plan_to_json` wrote, as :func:`plan_to_dict` has it. Raises
    :class:`OptionsError`."""
    try:
        data = json.loads(text.removeprefix(BYTE_ORDER_MARK), object_pairs_hook=without_repeats)
    except (ValueError, TypeError, RecursionError) as error:
        path = str(text).endswith(".json") and "\n" not in str(text)
        hint = f"; {text!r} looks like a path: autopar.Plan.load({text!r}) reads the file" if path else ""
        raise OptionsError(f"this is not a plan: it does not parse as JSON, or is cut off ({error}){hint}") from error
    return _whole(data)


def _whole(data: Any) -> Any:
    """The plan's data with folded tables unfolded. Raises :class:`OptionsError` if they are not tables."""
    version = data.get("version") if isinstance(data, dict) else None
    if not isinstance(version, int) or version not in UNFOLDED:
        return data
    try:
        return {**unfolded(data), "version": UNFOLDED[version]}
    except OptionsError as error:
        raise OptionsError(f"this is not a plan that autopar wrote: {error}") from error


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Raises ``ValueError`` for a name that is there twice; ``json`` would silently keep the last."""
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is there twice")
    return table


def plan_to_dict(plan: PlanRecord) -> dict[str, Any]:
    """The plan as plain data: dicts, lists, strings and numbers that JSON can hold, with digests."""
    data: dict[str, Any] = {"version": VERSION} | {name: getattr(plan, name) for name in PLAIN}
    data |= {name: _number(getattr(plan, name)) for name in NUMBERS}
    data["predicted"] = plan.predicted.to_dict()
    data["baselines"] = {name: p and p.to_dict() for name, p in plan.baselines.items()}
    data["parameters"] = {
        path: [short(p.weight), short(p.gradient), short(p.optimizer), _tier_data(p.offload)]
        for path, p in plan.parameters.items()
    }
    data["outputs"] = {path: short(p) for path, p in plan.outputs.items()}
    data |= _strategies_data(plan.strategies)
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
    data |= {name: value for name in OPTIONAL if (value := getattr(plan, name))}
    data |= {name: value for name, usual in DEFAULTS.items() if (value := getattr(plan, name)) != usual}
    records = {"sync": plan.sync, "searched": plan.searched}
    return signed(data | {name: asdict(record) for name, record in records.items() if record is not None})


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _strategies_data(strategies: Mapping[str, Strategy]) -> dict[str, Any]:
    """The table of strategies, and the number in it of each operation's."""
    objects = {id(strategy): strategy for strategy in strategies.values()}  # Equal layers have the same ones.
    table = {strategy: number for number, strategy in enumerate(dict.fromkeys(objects.values()))}
    numbers = {identity: table[strategy] for identity, strategy in objects.items()}
    return {
        "strategy_table": [_strategy_data(strategy) for strategy in table],
        "strategies": {name: numbers[id(strategy)] for name, strategy in strategies.items()},
    }


def _strategy_data(strategy: Strategy) -> list[Any]:
    return [[short(p) for p in strategy.inputs], [short(p) for p in strategy.outputs], strategy.local]


def _line_data(line: PlanLine) -> list[Any]:
    steps = [[s.kind, list(s.axes), s.source, s.target, s.bytes] for s in line.steps]
    return [line.kind, line.name, line.module, line.phase, line.seconds, steps, line.times, line.stage]


def _tier_data(tier: str) -> bool | str:
    """A tier; of host memory alone as earlier versions of autopar read it."""
    return tier == "host" if tier in ("", "host") else tier
