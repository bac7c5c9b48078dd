"""Random changes to a plan's JSON and text, as somebody who edits the file by hand might make, and worse."""

from __future__ import annotations

import copy
import json
import random
import re
from typing import Any

PLACES = ("R", "S(0)", "S(1)", "S(7)", "P(sum)", "S(0/2)", "S(0/0)", "P(max)", "S(1/3)")
ODD: tuple[Any, ...] = (None, True, -1, 0, 1, 2, 3, 1.5, -0.0, 1e-9, 1e308, 2**70, "", "R", "x", "nan", "inf", [], {})


def _spots(data: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in ``data``."""
    found: list[tuple[Any, Any]] = []
    pairs = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in pairs:
        found.append((data, key))
        found += _spots(value)
    return found


def _other(draw: random.Random, value: Any, known: list[Any]) -> Any:
    """Another value: mostly of the same kind, for what is of another kind is found out at once."""
    kind = draw.random()
    if kind < 0.15:
        return draw.choice(ODD)
    if isinstance(value, str) and re.search(r"[RSP]", value) and value.startswith("("):
        places = re.findall(r"R|[SP]\([\w/]+\)", value)
        places[draw.randrange(len(places))] = draw.choice(PLACES)
        return f"({','.join(places)})"
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return draw.choice([value + 1, value - 1, 2 * value, draw.randrange(40)])
    if isinstance(value, float):
        return draw.choice([value * 2, -value, value + 1.0, float("nan"), float("inf")])
    same = [other for other in known if type(other) is type(value)]
    return copy.deepcopy(draw.choice(same)) if same else draw.choice(ODD)


def mutated(text: str, draw: random.Random, changes: int = 1, tables: list[str] | None = None) -> str:
    """The JSON of a plan with some entries deleted, replaced, retyped, swapped, renamed or repeated; of
    ``tables`` if given."""
    data = json.loads(text)
    for _ in range(changes):
        # Any table first, or the thousands of entries of a few would be all that is ever changed.
        top = draw.choice(tables or [key for key in data if key != "version"])
        if top not in data:
            continue
        spots = [(data, top), *_spots(data[top])]
        container, key = draw.choice(spots)
        known = [c[k] for c, k in spots]
        _change(draw, container, key, known)
    return json.dumps(data)


def _change(draw: random.Random, container: Any, key: Any, known: list[Any]) -> None:
    action = draw.choice(("replace", "replace", "replace", "delete", "repeat", "rename", "swap"))
    if action == "delete":
        del container[key]
    elif action == "repeat" and isinstance(container, list):
        container.insert(key, copy.deepcopy(container[key]))
    elif action == "rename" and isinstance(container, dict):
        name = draw.choice([k for k in container if k != key] or ["x"]) if draw.random() < 0.5 else f"{key}x"
        container[name] = container.pop(key)
    elif action == "swap" and len(container) > 1:
        other = draw.choice(list(container) if isinstance(container, dict) else range(len(container)))
        container[key], container[other] = container[other], container[key]
    else:
        container[key] = _other(draw, container[key], known)


def mutated_lines(text: str, draw: random.Random) -> str:
    """The text of a plan with a line deleted, repeated, moved or changed somewhere."""
    rows = text.split("\n")
    at = draw.randrange(len(rows))
    action = draw.choice(("delete", "repeat", "move", "number", "place", "cut", "letter"))
    if action == "delete":
        del rows[at]
    elif action == "repeat":
        rows.insert(draw.randrange(len(rows)), rows[at])
    elif action == "move":
        rows.insert(draw.randrange(len(rows)), rows.pop(at))
    elif action == "number":
        rows[at] = re.sub(r"\d+", lambda m: str(draw.choice([0, 1, 2, 99, int(m[0]) + 1])), rows[at], count=1)
    elif action == "place":
        rows[at] = re.sub(r"R|S\(\d\)|P\(sum\)", lambda _: draw.choice(PLACES), rows[at], count=draw.randint(0, 2))
    elif action == "cut":
        rows[at] = rows[at][: draw.randrange(len(rows[at]) + 1)]
    elif rows[at]:
        spot = draw.randrange(len(rows[at]))
        rows[at] = rows[at][:spot] + draw.choice('x"[]{},1=') + rows[at][spot + 1 :]
    return "\n".join(rows)
