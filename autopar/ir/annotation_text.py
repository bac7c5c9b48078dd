"""Annotations in the text form of a graph: the strategies of a node on lines below its own, its class behind it.

%y: f32[8, 6] = aten.mm.default(%x, %w)  @layers.1  like %a
  | (R) (R) -> (R)
  | (S(0)) (R) -> (S(0))
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from autopar.errors import GraphError

from .placements import Strategy, parse_placements

Strategies = Mapping[str, tuple[Strategy, ...]]
Classes = Mapping[str, str]

_STRATEGY = re.compile(r"^\| (.*?) ?->(.*?)(?: \[([^\]]*)\])?$")
_CLASS = re.compile(r"  like %(\w+)$")
_NAME = re.compile(r"^(?:backward )?%(\w+)")


def annotate_lines(lines: Iterable[tuple[str, str]], strategies: Strategies, classes: Classes) -> Iterator[str]:
    """``lines``: the name of each node and its line. The same lines with what is known of the nodes."""
    for name, line in lines:
        yield f"{line}  like %{classes[name]}" if name in classes else line
        for strategy in strategies.get(name, ()):
            yield f"  | {str(strategy).strip()}"


def split_annotations(lines: Iterable[str]) -> tuple[list[str], Strategies, Classes]:
    """Stripped ``lines`` of a graph without annotations, and these. Raises :class:`GraphError` naming the line."""
    plain: list[str] = []
    strategies: dict[str, tuple[Strategy, ...]] = {}
    classes: dict[str, str] = {}
    for line in lines:
        if line.startswith("|"):
            name = _NAME.match(plain[-1]) if plain else None
            if name is None:
                raise GraphError(f"the strategy {line!r} is below no node")
            strategies[name[1]] = (*strategies.get(name[1], ()), parse_strategy(line))
            continue
        found = _CLASS.search(line)
        named = _NAME.match(line) if found else None
        plain.append(line[: found.start()] if found and named else line)
        if found and named:
            classes[named[1]] = found[1]
    return plain, strategies, classes


def parse_strategy(line: str) -> Strategy:
    """The strategy in ``| (S(0)) (R) -> (S(0))``. Raises :class:`GraphError`."""
    match = _STRATEGY.match(line)
    if match is None:
        raise GraphError(f"cannot read the strategy {line!r}; write | (S(0)) (R) -> (S(0))")
    inputs, outputs = (tuple(map(parse_placements, side.split())) for side in (match[1], match[2]))
    return Strategy(inputs, outputs, match[3] or "")
