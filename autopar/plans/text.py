"""Plans as lines of text: readable, comparable line by line, and equal to the plan when read back.

::

    autopar plan 10
    # what print(plan) says
    model = "GPT2LMHeadModel, ..."
    [parameters]
    "wte.weight" = ["(R,S(0))","(R,S(0))","(S(0),S(0))",false]
    [lines]
    ["compute","mm","h.0.mlp","forward",1e-05,[],1,0]
    end

Values are JSON, each entry of a table on one line, so that line-by-line tools such as diff show what differs between
two plans. ``#`` starts a comment.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from autopar.errors import OptionsError
from autopar.ir.plan_record import PlanRecord
from autopar.plans.views.page_width import fixed_width
from autopar.plans.views.summary import plan_text

from .format import VERSION
from .json import BYTE_ORDER_MARK, plan_to_dict, without_repeats

HEAD = "autopar plan"


def plan_to_lines(plan: PlanRecord) -> str:
    """``plan.to_text()``."""
    with fixed_width():
        return "\n".join(_lines(plan)) + "\n"


def _lines(plan: PlanRecord) -> Iterator[str]:
    data = plan_to_dict(plan)
    yield f"{HEAD} {data.pop('version')}"
    yield from (f"# {line}".rstrip() for line in plan_text(plan).splitlines())
    tables = {name: value for name, value in data.items() if isinstance(value, dict) or name in _LISTS}
    yield from (f"{name} = {_compact(value)}" for name, value in data.items() if name not in tables)
    for name, table in tables.items():
        yield f"[{name}]"
        if isinstance(table, dict):
            yield from (f"{_compact(key)} = {_compact(value)}" for key, value in table.items())
        else:
            yield from map(_compact, table)
    yield "end"


_LISTS = ("strategy_table", "holdings", "lines")


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def data_from_lines(text: str) -> dict[str, Any]:
    """The data of the plan that :func:`plan_to_lines` wrote. Raises :class:`OptionsError` naming the line."""
    # ``splitlines`` would also break at U+2028, which JSON strings may contain. Other editors end lines with "\r\n".
    stripped = enumerate(map(str.strip, text.removeprefix(BYTE_ORDER_MARK).split("\n")), 1)
    rows = [(number, row) for number, row in stripped if row and not row.startswith("#")]
    if not rows or not rows[0][1].startswith(f"{HEAD} "):
        raise OptionsError(
            "this is not a plan: it is no JSON object, as Plan.to_json() writes, and does not start with "
            f"'{HEAD} {VERSION}', as what Plan.to_text() writes does"
        )
    if rows[-1][1] != "end":
        raise OptionsError(f"this plan is cut off: its last line, {rows[-1][0]}, is not 'end'")
    version = rows[0][1].removeprefix(HEAD).strip()
    data: dict[str, Any] = {"version": int(version) if version.isdecimal() else version}
    table: Any = data
    for number, row in rows[1:-1]:
        try:
            table = _read(row, data, table)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise OptionsError(f"line {number} of this plan does not parse: {row[:80]!r} ({error})") from error
    return data


def _read(row: str, data: dict[str, Any], table: Any) -> Any:
    """Reads one line into ``data``; returns the table that the next line belongs to."""
    if row.startswith("[") and row.endswith("]") and row[1:-1].isidentifier():
        if row[1:-1] in data:
            raise ValueError("it is there twice")
        data[row[1:-1]] = [] if row[1:-1] in _LISTS else {}
        return data[row[1:-1]]
    if isinstance(table, list):
        table.append(json.loads(row, object_pairs_hook=without_repeats))
        return table
    if table is data:
        key, separator, value = row.partition(" = ")
        end = len(key)
    else:
        key, end = json.JSONDecoder().raw_decode(row)
        separator, value = row[end : end + 3], row[end + 3 :]
    if separator != " = ":
        raise ValueError("no ' = '")
    if key in table:
        raise ValueError("it is there twice")
    table[key] = json.loads(value, object_pairs_hook=without_repeats)
    return table
