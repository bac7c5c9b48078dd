"""Numbers in capitals that decide something say what they are and where they come from: on a line of their own, above
them or beside them, or in a docstring below them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from .sources import module_files

# What may be called with numbers without hiding where they come from.
_MAKERS = ("range", "tuple", "frozenset", "set")


def unexplained(source: str) -> Iterator[str]:
    """The constants of a module, numbers or containers of numbers, that no comment or docstring stands next to."""
    lines, body = source.splitlines(), ast.parse(source).body
    for node, following in zip(body, (*body[1:], None), strict=True):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and (names := _names(node)) and _is_numeric(node.value):
            here = (lines[node.lineno - 1], lines[(node.end_lineno or node.lineno) - 1])
            above = node.lineno > 1 and lines[node.lineno - 2].startswith("#")
            if not (above or any("#" in line for line in here) or _is_docstring(following)):
                yield ", ".join(names)


def _names(node: ast.Assign | ast.AnnAssign) -> list[str]:
    """The names that are assigned, if all are in capitals."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    names = [part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]
    return names if all(name.isupper() for name in names) else []


def _is_numeric(value: ast.expr | None) -> bool:
    match value:
        case ast.Constant(value=number):
            return isinstance(number, (int, float)) and not isinstance(number, bool)
        case ast.UnaryOp(operand=operand):
            return _is_numeric(operand)
        case ast.BinOp(left=left, right=right):
            return _is_numeric(left) or _is_numeric(right)
        case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts) | ast.Dict(values=parts):
            return bool(parts) and all(map(_is_numeric, parts))
        case ast.Call(func=ast.Name(id=name), args=args) if name in _MAKERS:
            return bool(args) and all(map(_is_numeric, args))
    return False


def _is_docstring(node: ast.stmt | None) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def test_constants_say_where_they_come_from() -> None:
    found = [f"{path}: {name}" for path in module_files().values() for name in unexplained(path.read_text())]
    assert found == [], "one comment above each: what it is, and measured where, from which paper, or 'Chosen: why'"


@pytest.mark.parametrize(
    "source",
    ["LIMIT = 5", "A = 1\nB, _C = 2, -3.5", "SIZES: tuple[int, ...] = (1 << 4, 2)", "X = 8 * OTHER", "Y = {'a': 1}",
     "Z = range(8)", "# Of the first.\nFIRST = 1\nSECOND = 2"],
)  # fmt: skip
def test_what_says_nothing_is_found(source: str) -> None:
    assert len(list(unexplained(source))) == source.count("=") - ("#" in source)


@pytest.mark.parametrize(
    "source",
    ["# Chosen.\nLIMIT = 5", "LIMIT = 5  # chosen", 'LIMIT = 5\n"""Chosen."""', "limit = 5", "NAME = 'x'", "ON = True",
     "TABLE = {\n    'a': 1,  # chosen\n}  # all of it", "KINDS = ('a', 1)"],
)  # fmt: skip
def test_what_says_something_or_is_no_number_is_left_alone(source: str) -> None:
    assert list(unexplained(source)) == []
