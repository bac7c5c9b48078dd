"""Annotations in the text form of a graph: a node's strategies on the lines below it, its class at the end of its line.

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
    """Yields ``lines``, each given with the name of its node, and adds the strategies and the class of that node."""
    for name, line in lines:
        yield f"{line}  like %{classes[name]}" if name in classes else line
        for strategy in strategies.get(name, ()):
            yield f"  | {str(strategy).strip()}"


def split_annotations(lines: Iterable[str]) -> tuple[list[str], Strategies, Classes]:
    """Separates the annotations from the stripped ``lines`` of a graph. Raises :class:`GraphError` naming the line."""
    plain: list[str] = []
    strategies: dict[str, tuple[Strategy, ...]] = {}
    classes: dict[str, str] = {}
    for line in lines:
        if line.startswith("|"):
            name = _NAME.match(plain[-1]) if plain else None
            if name is None:
                raise GraphError(f"no node precedes the strategy {line!r}")
            strategies[name[1]] = (*strategies.get(name[1], ()), parse_strategy(line))
            continue
        like = _CLASS.search(line)
        name = _NAME.match(line) if like else None
        plain.append(line[: like.start()] if like and name else line)
        if like and name:
            classes[name[1]] = like[1]
    return plain, strategies, classes


def parse_strategy(line: str) -> Strategy:
    """Parses a line such as ``| (S(0)) (R) -> (S(0))``. Raises :class:`GraphError`."""
    match = _STRATEGY.match(line)
    if match is None:
        raise GraphError(f"cannot read the strategy {line!r}; write | (S(0)) (R) -> (S(0))")
    inputs, outputs = (tuple(map(parse_placements, side.split())) for side in (match[1], match[2]))
    return Strategy(inputs, outputs, match[3] or "")
