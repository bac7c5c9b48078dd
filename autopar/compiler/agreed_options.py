"""Checks that all ranks pass the same options: those of the first rank make the plan, and others would be dropped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields

from autopar.errors import OptionsError
from autopar.options import Options
from autopar.runtime.comm.groups import AxisGroup

from .rank_zero import gather_objects


def check_same_options(options: Options, names: Sequence[int], ranks: AxisGroup) -> None:
    """Raises :class:`OptionsError`, on every rank, if options differ: names them, and the ranks, called ``names``.
    Collective."""
    own = {field.name: _plain(getattr(options, field.name)) for field in fields(options)}
    everyone = gather_objects(ranks, own)
    if all(each == everyone[0] for each in everyone):
        return
    lines = [line for name in own if (line := _difference(name, [each.get(name) for each in everyone], names))]
    listed = "".join(f"\n  {line}" for line in lines)
    raise OptionsError(f"ranks pass different autopar.Options:{listed}\nPass the same on every rank")


def _difference(name: str, values: Sequence[object], names: Sequence[int]) -> str:
    """Which ranks have which value; "" if all have the same."""
    groups: dict[str, list[int]] = {}
    for rank, value in zip(names, values, strict=True):
        groups.setdefault(repr(value), []).append(rank)
    if len(groups) == 1:
        return ""
    fewest_first = sorted(groups.items(), key=lambda entry: len(entry[1]))
    return f"{name}: " + "; ".join(f"{value} on {_named(own)}" for value, own in fewest_first)


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _plain(value: object) -> object:
    return dict(value) if isinstance(value, Mapping) else value
