"""Splits sections in two, to be run one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Set

from autopar.ir.node import Value, fresh_name
from autopar.ir.program import Instruction, Section


def split_section(section: Section, count: int, first: str, second: str) -> tuple[Section, Section]:
    """Splits the section in two. The ``first`` computes what the first ``count`` outputs need, and returns these and
    the values that the ``second`` needs; the ``second`` returns the other outputs."""
    needed = _needed(section.instructions, [v for v in section.outputs[:count] if v is not None])
    return split_after(section, count, needed, first, second)


def split_after(section: Section, count: int, names: Set[str], first: str, second: str) -> tuple[Section, Section]:
    """:func:`split_section` where the ``first`` has the instructions with these ``names``, which must include those
    that they use."""
    early = tuple(i for i in section.instructions if i.name in names)
    late = tuple(i for i in section.instructions if i.name not in names)
    own = {i.name for i in late}
    wanted = [value for i in late for value in i.operands]
    wanted += [value for value in section.outputs[count:] if value is not None]
    carried = tuple(dict.fromkeys(value for value in wanted if value.node not in own))
    new_names = _carried_names(carried, {*section.inputs, *(i.name for i in section.instructions)})

    def renamed(value: Value) -> Value:
        return new_names.get(value, value)

    outputs = tuple(value and renamed(value) for value in section.outputs[count:])
    inputs = tuple(renamed(value).node for value in carried)
    return (
        Section(first, section.inputs, early, (*section.outputs[:count], *carried)),
        Section(second, inputs, tuple(i.with_values(new_names) for i in late), outputs),
    )


def _carried_names(carried: tuple[Value, ...], taken: set[str]) -> dict[Value, Value]:
    """Names for second and later results, since inputs of a section are single values."""
    names: dict[Value, Value] = {}
    for value in carried:
        if value.index:
            names[value] = Value(fresh_name(f"{value.node}_result{value.index}", taken))
    return names


def _needed(instructions: tuple[Instruction, ...], values: Iterable[Value]) -> set[str]:
    """Names of the instructions that ``values`` depend on."""
    needed = {value.node for value in values}
    for instruction in reversed(instructions):
        if instruction.name in needed:
            needed.update(value.node for value in instruction.operands)
    return needed & {i.name for i in instructions}
